"""A folder in which the commands of README and docs are run as they stand.

It looks like a checkout in which the laptop's pipeline has run, but the recipes are made small:
the table SMALLER says how. A few commands have defaults of their own that take long; what the table
FEWER adds to such a command makes it short. Nothing else about a command is changed, but that a
server listens on a port that is free.
"""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from tests.docs.pages import ROOT, Block

# In recipes, and in those that pages tell the reader to write. Two steps, little text, short rows.
SMALLER = {
    r"^steps = .*$": "steps = 2",
    r"\bcount = \d+": "count = 60",
    r"\bmax_bytes = \d+": "max_bytes = 20000",
    r"^documents_per_source = .*$": "documents_per_source = 60",
    r"^vocab_size = .*$": "vocab_size = 960",
    r"^(seq_len|context_length) = \d+": r"\1 = 224",
    r"^batch_tokens = .*$": "batch_tokens = 448",
    r"\b(max_tokens|tokens) = \d+": r"\1 = 180",
    r"^groups_per_batch = .*$": "groups_per_batch = 2",
    r"\bgroup_size = \d+": "group_size = 2",
    r"^(num_tasks|rollouts_per_task) = \d+\n": "",
    r"^\[\[suites\]\]$": "[[suites]]\nnum_tasks = 2",
    r'(preset|like) = "small"': r'\1 = "nano"',
    r'^dtype = "bfloat16"$': 'dtype = "float32"',
    # A network that has learnt nothing earns nothing: all groups are alike, and are kept.
    r"^\[rollout\]$": "[sampling]\nmax_new_tokens = 8\n\n"
    "[credit]\nkeep_zero_variance = true\n\n[rollout]",
}
# The network that talks has a short memory, so that replies that never end end soon.
ALSO = {"nano/sft.toml": ("[init]\n", "[init]\ncontext = 72\n")}
SMALL_PLANS = ("nano", "small")
# Added to a command of these; the last of two options counts.
FEWER = {
    "eval": ["--num-tasks", "2", "--rollouts-per-task", "1"],
    "sample": ["--n", "1", "--num-tasks", "2"],
    "quantize": [
        *("--calibration-tokens", "512", "--eval-tokens", "256", "--needles", "2"),
        *("--max-seq-length", "64", "--num-tasks", "2"),
    ],
    "bench serve": [
        *("--max-concurrency", "1", "--num-prompts", "1"),
        *("--input-len", "8", "--output-len", "2"),
    ],
    "bench train": ["--steps", "1"],
    "bench kernels": ["--repeats", "1"],
}
# What is typed at a command that talks.
TYPED = {"chat": "Hello\n/think off\n/new\n/quit\n", "env try": "red\n"}
# What an untrained network may do to a game, and no other failure is forgiven.
ENDLESS = "rollout failed (policy at engine): the reply does not end within"
SERVERS = {"serve": 8000, "dash": 8001}  # and the ports they take unless told otherwise
PROGRAMS = {"paddock", "python", "torchrun", "curl", "echo"}
SHELL = re.compile(r"[|<>]|\$\(")


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()  # a command that stands on two pages is run once
        self._servers: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}  # with their ports
        self._ports: dict[str, str] = {}  # what a page says, and where that server listens
        lay_out(folder)

    def play(self, block: Block, commands: list[str]) -> None:
        """One block: its file is written, its code is run, or those of its commands."""
        if block.file:
            target = self.folder / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            text = smaller(block.text) if block.file.endswith(".toml") else block.text
            target.write_text(text)
        elif block.language == "python":
            code = compile(self._with_ports(block.text), f"{block.page}:{block.line}", "exec")
            with contextlib.chdir(self.folder):
                exec(code, {"__name__": "__main__"})
        for command in commands:
            self.run(command)

    def run(self, command: str) -> None:
        """Fails with what the command said, if it fails."""
        program, *words = shlex.split(command)
        assert program in PROGRAMS, f"{command}: neither run nor listed as not run"
        if program == "paddock" and words[0] in SERVERS:
            self._serve(command, words)
            return
        if command in self.done:
            return
        if program == "paddock" and not SHELL.search(command):
            self._paddock(words, TYPED.get(verb_of(words)))
        elif piped := re.fullmatch(r'echo "([^"]*)" \| paddock ([^|<>$]*)', command):
            self._paddock(shlex.split(piped[2]), f"{piped[1]}\n")
        else:
            self._bash(command)
        self.done.add(command)

    def rest(self) -> None:
        """Stops every server, which must end well."""
        codes = {}
        for command, (_, server) in self._servers.items():
            server.terminate()
            codes[command] = server.wait(timeout=60)
        self._servers.clear()
        assert set(codes.values()) <= {0, -15}, codes

    # --- ways to run ------------------------------------------------------------------------------

    def _paddock(self, words: list[str], typed: str | None) -> None:
        words = [self._with_ports(word) for word in (*words, *FEWER.get(verb_of(words), ()))]
        sys.path.append(str(self.folder))  # as the front door does: the reader's own modules
        try:
            with contextlib.chdir(self.folder):
                found = CliRunner().invoke(app, words, input=typed)
        finally:
            sys.path.remove(str(self.folder))
        if found.exception and not isinstance(found.exception, SystemExit):
            raise found.exception
        ended = found.exit_code == 0 or ENDLESS in found.output
        assert ended, f"paddock {shlex.join(words)}\n{found.output[-3000:]}"

    def _bash(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._with_ports(command)],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{said[-3000:]}"
        assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"  # curl is content with it

    def _serve(self, command: str, words: list[str]) -> None:
        """Until the end, for every page that starts the same. Whoever answers is there."""
        wanted = words[words.index("--port") + 1] if "--port" in words else f"{SERVERS[words[0]]}"
        if command in self._servers:
            self._ports[wanted] = self._servers[command][0]
            return
        port = self._ports[wanted] = free_port()
        server = subprocess.Popen(
            [sys.executable, "-m", "paddock.cli", *map(self._with_ports, words), "--port", port],
            cwd=self.folder,
            env=self._environment(),
        )
        deadline = time.monotonic() + 120
        while not answers(port):
            assert server.poll() is None, f"{command} ended by itself"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.2)
        self._servers[command] = port, server

    def _with_ports(self, text: str) -> str:
        return re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda m: self._ports.get(m[0], m[0]), text)

    def _environment(self) -> dict[str, str]:
        paths = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def verb_of(words: list[str]) -> str:
    """
    >>> verb_of(["env", "try", "math"]), verb_of(["eval", "folder"])
    ('env try', 'eval')
    """
    return " ".join(words[: 2 if words[0] in ("env", "bench", "model") else 1])


def smaller(text: str) -> str:
    for pattern, instead in SMALLER.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def lay_out(folder: Path) -> None:
    """A checkout: README, recipes, and the programs that an installation brings."""
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    for recipe in sorted((ROOT / "recipes").rglob("*.toml")):
        place = recipe.relative_to(ROOT / "recipes")
        text = recipe.read_text()
        if place.parts[0] in SMALL_PLANS:
            text = smaller(text)
        if place.as_posix() in ALSO:
            old, new = ALSO[place.as_posix()]
            assert old in text, f"{place}: no {old!r} to change"
            text = text.replace(old, new)
        target = folder / "recipes" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    programs = {
        "paddock": f'exec {sys.executable} -m paddock.cli "$@"',
        "python": f'exec {sys.executable} "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    (folder / "bin").mkdir()
    for name, line in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)


def answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=5).status_code < 500
    except httpx.TransportError:
        return False


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Workshop]:
    made = Workshop(folder)
    try:
        yield made
    finally:
        made.rest()
