"""Malformed and hostile requests against a running `paddock serve` and `paddock dash`.

    python -m benchmarks.attack_requests [--quick]

None may cause a server error, hang, leak other clients' data, or stop the service; afterwards no
request is running, and memory was bounded throughout.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.table import Claim, print_claims
from paddock.checkpoint import save_pretrained
from paddock.model import Transformer
from tests.dashboard.ledgers import write_rl_run
from tests.model.networks import latent_config
from tests.serve.attacks import (
    CHAT,
    USER,
    Attack,
    complaint,
    dash_attacks,
    serve_attacks,
)
from tests.serve.memorized_model import CONTEXT, tokenizer

IDLE = 400  # connections at once
MAX_GROWTH_MB = 1000  # of the server's peak memory, for requests of up to 32 MB
SECRET = "a-secret-of-the-environment"


def claims(*, quick: bool = False) -> list[Claim]:
    with TemporaryDirectory() as scratch:
        folder, runs = random_model(Path(scratch) / "model"), Path(scratch) / "runs"
        write_rl_run(runs / "rl")
        log = Path(scratch) / "log"
        with running("serve", str(folder), "--num-pages", "512", log=log) as (url, process):
            found = [*against_serve(url, process, quick=quick)]
        found.append(log_claim(log))
        with running("dash", str(runs), log=log) as (url, process):
            found += against_dash(url, process)
    return found


def random_model(folder: Path) -> Path:
    """A small model with random weights."""
    words = tokenizer()
    config = latent_config(
        vocab=words.vocab_size,
        context=CONTEXT,
        attention=("dsa",) * 2,
        mlp=("dense", "moe"),
        indexer={"heads": 2, "dim": 8, "topk": 256, "layers": ("full",) * 2},
        eos=words.special_token_ids.stop_token_ids,
    )
    save_pretrained(Transformer.from_config(config, seed=0), folder)
    words.save(folder)
    return folder


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running paddock server: its URL and process."""
    command = [sys.executable, "-m", "paddock.cli", *arguments, "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"ATTACK_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        try:
            printed = ""
            for line in process.stdout:
                printed += line
                if line.startswith(("ready", "press Ctrl-C")):
                    break
            yield re.findall(r"http://[\d.]+:\d+", printed)[0], process
        finally:
            process.terminate()
            process.wait(60)


def against_serve(url: str, process: subprocess.Popen[str], *, quick: bool) -> Iterator[Claim]:
    before = peak_megabytes(process)
    attacks = list(serve_attacks())[:: 40 if quick else 1]
    yield attack_claim("serve", url, attacks, lambda: chats(url))
    yield idle_claim(url)
    yield Claim(
        name="serve: no request is left running, chat still works",
        target="0 requests",
        measured=f"{unfinished_requests(url)} requests, chat {'works' if chats(url) else 'fails'}",
        holds=unfinished_requests(url) == 0 and chats(url),
    )
    growth = peak_megabytes(process) - before
    yield Claim(
        name="serve: growth of peak memory",
        target=f"< {MAX_GROWTH_MB} MB",
        measured=f"{growth:.0f} MB, from {before:.0f} MB",
        holds=growth < MAX_GROWTH_MB,
    )


def against_dash(url: str, process: subprocess.Popen[str]) -> list[Claim]:
    def is_alive() -> bool:
        return process.poll() is None and httpx.get(url + "/api/runs").status_code == 200

    return [attack_claim("dash", url, list(dash_attacks()), is_alive)]


def attack_claim(name: str, url: str, attacks: Iterable[Attack], is_alive: object) -> Claim:
    """Attacks that were mishandled; the service must still respond after each."""
    assert callable(is_alive)
    bad: dict[str, str] = {}
    count = 0
    for count, attack in enumerate(attacks, 1):
        why = complaint(url, attack)
        if not why and (count % 25 == 0 or attack.leaves) and not is_alive():
            why = "the service does not respond afterwards"
        if why:
            bad[attack.name] = why
    kinds = ", ".join(f"{n} x {why}" for why, n in Counter(bad.values()).most_common(3))
    first = next(iter(bad), "")
    return Claim(
        name=f"{name}: {count} malformed or hostile requests",
        target="no error, hang, leak or crash",
        measured=f"{len(bad)} mishandled" + (f": {first}: {kinds}"[:300] if bad else ""),
        holds=not bad,
    )


def idle_claim(url: str) -> Claim:
    """Hundreds of connections that send nothing or half a request, while others are served."""
    host, port = url.removeprefix("http://").split(":")
    partial = (b"", b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"GET /")
    with ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(IDLE)
        ]
        for i, sock in enumerate(socks):
            sock.sendall(partial[i % len(partial)])
        served = chats(url)
        closed = sum(is_closed(sock) for sock in socks)
    return Claim(
        name=f"serve: {IDLE} idle or half-sent connections",
        target="others are served, all are closed",
        measured=f"chat {'works' if served else 'fails'}, {closed} closed",
        holds=served and closed == IDLE,
    )


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def log_claim(log: Path) -> Claim:
    lines = log.read_text(errors="replace").splitlines()
    forged = [line for line in lines if line.endswith("INFO forged")]
    errors = [line for line in lines if line.startswith("Traceback")]
    return Claim(
        name=f"serve: its log of {len(lines):,} lines",
        target="no forged line, no traceback, no secret",
        measured=f"{len(forged)} forged, {len(errors)} tracebacks",
        holds=not forged and not errors and SECRET not in log.read_text(errors="replace"),
    )


def chats(url: str) -> bool:
    body = {"messages": USER, "max_tokens": 1}
    return httpx.post(url + CHAT, json=body, timeout=60).status_code == 200


def unfinished_requests(url: str) -> int:
    """Requests that are still running or queued after up to 20 s."""
    count = -1
    for _ in range(200):
        states = httpx.get(url + "/server_info", timeout=60).json()["internal_states"]
        count = sum(s["num_running_reqs"] + s["num_waiting_reqs"] for s in states)
        if count == 0:
            break
        time.sleep(0.1)
    return count


def peak_megabytes(process: subprocess.Popen[str]) -> float:
    """Peak resident memory so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one request in forty")
    print_claims(claims(quick=parser.parse_args().quick))


if __name__ == "__main__":
    main()
