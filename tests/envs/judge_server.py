"""A fake judge and reward-model server with scripted replies, errors and delays."""

import asyncio
import json
import threading
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse


class Endpoint:
    """`script` holds the response to each request; its last entry repeats. An entry is a text, a
    status code, "slow", "dead", or a function of the request body."""

    def __init__(self, script):
        self.script, self.bodies, self.headers = list(script), [], []
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/score")(self.score)

    async def _next(self, request: Request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        step = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        if step == "slow":
            await asyncio.sleep(3)
        return step(self.bodies[-1]) if callable(step) else step

    async def chat(self, request: Request):
        step = await self._next(request)
        if isinstance(step, int):
            return JSONResponse({"error": {"message": "no"}}, status_code=step)
        if isinstance(step, dict):
            return step
        return {"choices": [{"message": {"role": "assistant", "content": step}}]}

    async def score(self, request: Request):
        step = await self._next(request)
        if isinstance(step, int) and step >= 400:
            return PlainTextResponse("busy", status_code=step)
        return step


def graded(score, reasoning="because"):
    return json.dumps({"reasoning": reasoning, "score": score})


@contextmanager
def serving(*script):
    """A real server on a free port; yields its URL and the endpoint with the received requests."""
    endpoint = Endpoint(script)
    config = uvicorn.Config(endpoint.app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", endpoint
    finally:
        server.should_exit = True
        thread.join()
