"""Serve a model and ask it a question through the OpenAI-compatible API.

    python examples/serve_and_ask.py [OUT]

Trains a tiny model in the folder OUT first. `launch.open_server` runs the server in a thread;
`launch.serve` (or `paddock serve`) blocks until it is interrupted.
"""

import sys
from pathlib import Path

import httpx

from paddock import launch


def main(out: str = "runs/examples/serve") -> None:
    model = launch.train(Path(__file__).with_name("tiny.toml"), out=out)
    with launch.open_server(model, launch.ServeOptions(port=0)) as server:
        body = {
            "messages": [{"role": "user", "content": "Take 3 , first add 2 . Last digit ?"}],
            "max_tokens": 16,
        }
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        print(f"finish reason: {choice['finish_reason']}")
        print(f"reply: {choice['message'].get('content')!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
