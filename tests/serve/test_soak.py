"""Random clients that disconnect, abort, overflow, send garbage and reload weights; afterwards
nothing is left over and the server still answers."""

import asyncio
import random

import httpx
import pytest

from paddock.engine import EngineWeightUpdater
from tests.patience import until
from tests.serve.live import serving

HELLO = [{"role": "user", "content": "Say hello."}]
COUNT = [{"role": "user", "content": "Count."}]
RUBBISH = [b"", b"{", b"\xff\xfe", b"[" * 3000, b'{"messages": 5}', b'{"input_ids": [-1]}', b"null"]


class Client:
    """A client that sends `count` random requests."""

    def __init__(self, http, folder, seed):
        self.http, self.folder, self.rng = http, str(folder), random.Random(seed)
        self.statuses = {}

    async def live(self, count):
        acts = [
            self.chat,
            self.generate,
            self.messages,
            self.leaves_stream,
            self.leaves,
            self.rubbish,
        ]
        acts += [self.overflow, self.steers]
        for _ in range(count):
            try:
                status = await self.rng.choice(acts)()
            except (httpx.TimeoutException, httpx.RemoteProtocolError):
                status = "left"
            self.statuses[status] = self.statuses.get(status, 0) + 1

    async def post(self, path, body, **more):
        found = await self.http.post(path, json=body, **more)
        assert found.status_code < 500, found.text
        return found.status_code

    async def chat(self):
        body = {
            "messages": HELLO,
            "max_tokens": self.rng.randint(1, 30),
            "n": self.rng.randint(1, 3),
        }
        body["user"] = f"user {self.rng.randint(0, 3)}"
        return await self.post("/v1/chat/completions", body | {"stream": self.rng.random() < 0.5})

    async def generate(self):
        start = self.rng.randint(20, 30)
        ids = list(range(start, start + self.rng.randint(1, 120)))
        params = {"max_new_tokens": self.rng.randint(0, 30), "temperature": self.rng.random()}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        body |= {
            "logprob_start_len": self.rng.choice([-1, 0]),
            "priority": self.rng.randint(0, 2),
        }
        return await self.post("/generate", body)

    async def messages(self):
        path = self.rng.choice(["/v1/messages", "/v1/messages/count_tokens"])
        return await self.post(path, {"messages": HELLO, "max_tokens": 10})

    async def leaves_stream(self):
        body = {"messages": COUNT, "stream": True, "ignore_eos": True, "max_tokens": 200}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                if self.rng.random() < 0.3:
                    return "left"
        return stream.status_code

    async def leaves(self):
        params = {"max_new_tokens": 200, "ignore_eos": True}
        body = {"input_ids": [5, 6], "sampling_params": params}
        return await self.post("/generate", body, timeout=self.rng.uniform(0.01, 0.2))

    async def rubbish(self):
        path = self.rng.choice(["/generate", "/v1/chat/completions", "/v1/messages", "/tokenize"])
        found = await self.http.post(path, content=self.rng.choice(RUBBISH))
        return found.status_code

    async def overflow(self):
        body = {"prompt": [7] * self.rng.randint(400, 700), "max_tokens": 150}
        return await self.post("/v1/completions", body)

    async def steers(self):
        what = self.rng.random()
        if what < 0.2:
            return await self.post("/abort_request", {"abort_all": True})
        if what < 0.3:
            version = str(self.rng.randint(1, 50))
            update = {"new_version": version, "abort_all_requests": False}
            return await self.post("/update_weight_version", update)
        if what < 0.4:  # the same weights again under another version
            update = {"model_path": self.folder, "weight_version": f"w{self.rng.random()}"}
            return await self.post("/update_weights_from_disk", update)
        if what < 0.6:
            mode = self.rng.choice(["retract", "in_place"])
            await self.post("/pause_generation", {"mode": mode})
            return await self.post("/continue_generation", {})
        return (
            await self.http.get(self.rng.choice(["/metrics", "/flush_cache", "/v1/loads"]))
        ).status_code


async def soaked(url, folder, clients, count):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        people = [Client(http, folder, seed) for seed in range(clients)]
        await asyncio.gather(*(person.live(count) for person in people))
    total = {}
    for person in people:
        for status, count in person.statuses.items():
            total[status] = total.get(status, 0) + count
    return total


@pytest.mark.parametrize("mtp_steps", [0, 2])
def test_nothing_is_left_over_after_a_soak(folder, mtp_steps):
    few_pages = {"num_pages": 80, "max_running_requests": 6, "num_speculative_tokens": mtp_steps}
    with serving(folder, replicas=2, engine=few_pages, weights=EngineWeightUpdater) as live:
        total = asyncio.run(soaked(live.url, folder, clients=16, count=10))
        assert total.get(200, 0) > 10 and total.get(400, 0) > 3 and total.get("left", 0) > 3, total
        assert not set(total) - {200, 400, "left"}, total
        assert live.audit() == []
        assert sum(engine.stats().counters.failed for engine in live.engines) == 0
        until(lambda: not live.tasks())  # connections that are closing
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 40}
        done = live.post("/v1/chat/completions", body).json()
        assert done["choices"][0]["message"]["content"] == "Hello there, friend!"
        assert live.post("/flush_cache", {}).json()["success"]
        assert [engine.stats().pages_used for engine in live.engines] == [0, 0]
