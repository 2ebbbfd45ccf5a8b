"""A task service in its own process.

    python -m tests.rollout.task_service PORT GATEWAY_URL

Its agent takes two turns; the reward is 1 for even problem numbers.
"""

import asyncio
import sys

import httpx
import uvicorn

from paddock.records import Verdict
from paddock.rollout.sglang_client import ServerClient, connection_pool
from paddock.rollout.task_service import build_task_service, register_periodically

KEY = "services"  # shared with the gateway


async def rollout(spec, session):
    messages = [{"role": "user", "content": f"problem {spec.number}"}]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(timeout=30, headers=headers) as http:
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            reply = await http.post(f"{session.base_url}/v1/chat/completions", json=body)
            reply.raise_for_status()
            messages.append(reply.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": "go on"})
            await asyncio.sleep(0.05)
    return Verdict(reward=float(spec.number % 2 == 0), parts={"member": spec.member})


async def main(port, gateway_url):
    app = build_task_service({"echo": rollout}, key=KEY)
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning"))
    async with connection_pool() as http:
        registering = asyncio.ensure_future(
            register_periodically(
                ServerClient(gateway_url, http, api_key=KEY), {"echo": f"http://127.0.0.1:{port}"}
            )
        )
        await server.serve()
        registering.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
