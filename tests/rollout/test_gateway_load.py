"""The gateway under load: agents wait while the engine is full; unused sessions are closed."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.rollout.gateway import build_gateway
from paddock.rollout.session_manager import GatewaySettings, SessionConfig, SessionManager
from paddock.text import Tokenizer, get_renderer
from tests.patience import until, until_async
from tests.rollout.engines import RandomEngine, renderer
from tests.rollout.test_gateway import GREEDY, gateway, in_process, opened


def test_stock_clients_wait_while_the_queue_of_the_engine_is_full(folder):
    words = Tokenizer.load(folder)
    settings = EngineSettings(kv_cache_bytes=1 << 22, max_running_requests=1, max_queued_requests=1)
    refused = []

    def note(response):
        if response.status_code != 200:
            refused.append((response.status_code, response.headers.get("retry-after")))

    def agent(number):
        key, told = opened(url, f"s{number}").key, httpx.Client(event_hooks={"response": [note]})
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=100, http_client=told)
        ask = [{"role": "user", "content": "Say hello."}]
        client.chat.completions.create(model="any", messages=ask)

    with (
        Engine(load_pretrained(folder), words, settings) as engine,
        gateway(in_process(engine), get_renderer(words), GREEDY) as (url, sessions),
    ):
        engine.pause()  # so that all of them meet
        with ThreadPoolExecutor(6) as pool:
            agents = [pool.submit(agent, number) for number in range(6)]
            until(lambda: len(refused) >= 4)
            engine.resume()
            for each in agents:
                each.result()
        assert [len(live.session.tree.nodes) for live in sessions] == [1] * 6
    assert set(refused) == {(503, "1")}


def test_sessions_that_nobody_uses_are_closed():
    async def served():
        settings, closed = GatewaySettings(idle_timeout_s=3600.0), []
        sessions = SessionManager(RandomEngine(), renderer(), settings, closed.append)
        left = sessions.open("left", SessionConfig(idle_timeout_s=0.01))
        asks, _ = sessions.open("asks", SessionConfig(idle_timeout_s=0.01)), sessions.open("new")
        app = build_gateway(sessions)
        with asks.busy():
            async with app.router.lifespan_context(app):
                await until_async(lambda: left in closed)
        assert closed == [left] and len(sessions) == 2
        assert sessions.with_key(left.api_key) is None

    asyncio.run(served())
