"""Runs the commands of README and docs unchanged in a temporary checkout.

The nano pipeline has run in it, with recipes made small by the table SHRINK. Commands whose
defaults take long get the options of SHORT_OPTIONS. Nothing else of a command is changed, except
that servers listen on free ports.
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

# For shipped recipes and for those on pages: two steps, little text, short sequences.
SHRINK = {
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
    # An untrained network has reward zero: all groups are zero-variance and must be kept.
    r"^\[rollout\]$": "[sampling]\nmax_new_tokens = 8\n\n"
    "[credit]\nkeep_zero_variance = true\n\n[rollout]",
}
# A short context for the chat model, so that endless replies end soon.
ALSO = {"nano/sft.toml": ("[init]\n", "[init]\ncontext = 72\n")}
SHRUNK_PIPELINES = ("nano", "small")
# Appended to these commands; the last of two equal options counts.
SHORT_OPTIONS = {
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
# Input for interactive commands.
TYPED = {"chat": "Hello\n/think off\n/new\n/quit\n", "env try": "red\n"}
# The only failure that is tolerated: an untrained network may not end its reply.
ENDLESS = "rollout failed (policy at engine): the reply does not end within"
SERVERS = {"serve": 8000, "dash": 8001, "gateway": 8002}  # and their default ports
PROGRAMS = {"paddock", "python", "torchrun", "curl", "echo"}
SHELL = re.compile(r"[|<>]|\$\(")


class CommandRunner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()  # a command on two pages is run once
        self._servers: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}  # with their ports
        self._ports: dict[str, str] = {}  # port on the page -> actual port
        write_checkout(folder)

    def run_block(self, block: Block, commands: list[str]) -> None:
        """One block: write its file, run its code, or run these of its commands."""
        if block.file:
            target = self.folder / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            text = shrink(block.text) if block.file.endswith(".toml") else block.text
            target.write_text(text)
        elif block.language == "python":
            code = compile(self._with_ports(block.text), f"{block.page}:{block.line}", "exec")
            with contextlib.chdir(self.folder):
                exec(code, {"__name__": "__main__"})
        for command in commands:
            self.run(command)

    def run(self, command: str) -> None:
        """Run a command; a failure raises with its output."""
        program, *words = shlex.split(command)
        assert program in PROGRAMS, f"{command}: neither run nor listed as not run"
        if program == "paddock" and words[0] in SERVERS:
            self._serve(command, words)
            return
        if command in self.done:
            return
        if program == "paddock" and not SHELL.search(command):
            self._paddock(words, TYPED.get(command_of(words)))
        elif piped := re.fullmatch(r'echo "([^"]*)" \| paddock ([^|<>$]*)', command):
            self._paddock(shlex.split(piped[2]), f"{piped[1]}\n")
        else:
            self._bash(command)
        self.done.add(command)

    def stop_servers(self) -> None:
        """Stop every server; each must exit cleanly."""
        codes = {}
        for command, (_, server) in self._servers.items():
            server.terminate()
            codes[command] = server.wait(timeout=60)
        self._servers.clear()
        assert set(codes.values()) <= {0, -15}, codes

    # --- ways to run ------------------------------------------------------------------------------

    def _paddock(self, words: list[str], typed: str | None) -> None:
        words = [
            self._with_ports(word) for word in (*words, *SHORT_OPTIONS.get(command_of(words), ()))
        ]
        sys.path.append(str(self.folder))  # as the CLI does: modules of the reader
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
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{output[-3000:]}"
        assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"  # curl exits with 0 anyway

    def _serve(self, command: str, words: list[str]) -> None:
        """Start a server once for all pages; ready when it answers."""
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
        return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command_of(words: list[str]) -> str:
    """
    >>> command_of(["env", "try", "math"]), command_of(["eval", "folder"])
    ('env try', 'eval')
    """
    return " ".join(words[: 2 if words[0] in ("env", "bench", "model") else 1])


def shrink(text: str) -> str:
    for pattern, instead in SHRINK.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def write_checkout(folder: Path) -> None:
    """A checkout: README, recipes, and the installed programs."""
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    for recipe in sorted((ROOT / "recipes").rglob("*.toml")):
        place = recipe.relative_to(ROOT / "recipes")
        text = recipe.read_text()
        if place.parts[0] in SHRUNK_PIPELINES:
            text = shrink(text)
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
def open_runner(folder: Path) -> Iterator[CommandRunner]:
    made = CommandRunner(folder)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{path}"  # as in an activated environment
    try:
        yield made
    finally:
        os.environ["PATH"] = path
        made.stop_servers()
