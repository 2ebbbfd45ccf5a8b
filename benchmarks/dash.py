"""Dashboard: opening a run of 100,000 rollouts; also creates the bundled demo runs.

    python -m benchmarks.dash [--rollouts 100000]
    python -m benchmarks.dash demo RUN [OTHER ...]

`demo` recreates paddock/dashboard/demo from real runs: the first with its ledger (and the tokens of
its newest groups), the others with metrics only. The bundled ones were made by

    paddock rl recipes/nano/agentic.toml --out agentic-0 --set init.checkpoint=sft --set seed=0 \\
        --set steps=6 --set rollout.pipeline_depth=0 --set rollout.max_staleness=0 \\
        --set engines.num_speculative_tokens=2 --set tasks.tools.attempt_timeout_s=3

and the same with seed 1, from nano's fine-tuned model.
"""

import argparse
import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.table import Claim, print_claims
from paddock.dashboard.demo import LEDGER_SQL
from tests.dashboard.ledgers import write_large

ROLLOUTS = 100_000
LIMIT_S = 2.0
DEMO = Path(__file__).parents[1] / "paddock" / "dashboard" / "demo"
GROUPS, ROWS = 14, 600  # kept in the demo: groups with tokens, rows of rollouts.jsonl


def claims(rollouts: int = ROLLOUTS) -> list[Claim]:
    with TemporaryDirectory() as folder:
        run = write_large(Path(folder) / "runs" / "large", rollouts)
        megabytes = (run / "ledger.sqlite").stat().st_size / 1e6
        before = digests(run)
        seconds, pages = open_pages(run.parent)
        unchanged = digests(run) == before
    latencies = ", ".join(f"{name} {1000 * took:.0f} ms" for name, took in pages.items())
    return [
        Claim(
            name=f"open {rollouts:,} rollouts ({megabytes:.0f} MB): command to reward table",
            target=f"< {LIMIT_S:g} s",
            measured=f"{seconds:.2f} s",
            holds=seconds < LIMIT_S,
        ),
        Claim(name="first request, then each page again", measured=latencies),
        Claim(
            name="run folder is unchanged",
            target="same bytes and mtimes",
            measured="same" if unchanged else "changed",
            holds=unchanged,
        ),
    ]


def open_pages(runs: Path) -> tuple[float, dict[str, float]]:
    """Seconds from starting the command to the first page of rollouts, and latency of each page."""
    start = time.perf_counter()
    with dashboard(runs) as url, httpx.Client(base_url=url) as client:

        def get(path: str, **query: object) -> float:
            sent = time.perf_counter()
            client.get(path, params=query, timeout=60).raise_for_status()  # type: ignore[arg-type]
            return time.perf_counter() - sent

        first = get("/api/runs") + get("/api/rollouts", run="large")
        seconds = time.perf_counter() - start
        return seconds, {
            "first": first,
            "runs": get("/api/runs"),
            "rewards": get("/api/rollouts", run="large"),
            "one step": get("/api/rollouts", run="large", step=3),
            "group": get("/api/group", run="large", ordinal=17),
            "tokens": get("/api/rollout", run="large", ordinal=17, rollout=3),
            "timeline": get("/api/timeline", run="large"),
            "failures": get("/api/failures", run="large"),
            "prefix tree": get("/api/prefix_tree", run="large"),
        }


@contextmanager
def dashboard(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "paddock.cli", "dash", str(runs), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield next(line.strip() for line in server.stdout if line.startswith("http"))
    finally:
        server.terminate()
        server.wait()


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(folder)): (
            hashlib.sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# --- demo runs ------------------------------------------------------------------------------------


def make_demo(runs: list[Path]) -> None:
    shutil.rmtree(DEMO, ignore_errors=True)
    for number, run in enumerate(runs):
        to = DEMO / run.resolve().name
        to.mkdir(parents=True)
        for name in ("recipe.toml", "metrics.jsonl", "events.jsonl"):
            shutil.copyfile(run / name, to / name)
        if number == 0:
            _copy_truncated(run, to)
    files = [file for file in DEMO.rglob("*") if file.is_file()]
    print(f"{len(files)} files, {sum(f.stat().st_size for f in files) / 1e3:.0f} kB in {DEMO}")


def _copy_truncated(run: Path, to: Path) -> None:
    for name, num_rows in (("rollouts.jsonl", ROWS), ("engine.jsonl", 200), ("network.jsonl", 1)):
        lines = (run / name).read_text().splitlines()[-num_rows:]
        (to / name).write_text("\n".join(lines) + "\n")
    (to / "tokenizer").mkdir()
    (model,) = sorted(run.glob("checkpoints/step-*/model"))[-1:]
    whole = json.loads((model / "tokenizer.json").read_text())
    (to / "tokenizer" / "tokenizer.json").write_text(json.dumps(whole, separators=(",", ":")))
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger.sqlite"
        shutil.copyfile(run / "ledger.sqlite", copy)
        base = sqlite3.connect(copy)
        (last,) = base.execute(
            "SELECT MAX(ordinal) FROM groups WHERE status = 'trained'"
        ).fetchone()
        old = f"SELECT ordinal FROM groups WHERE ordinal <= {last - GROUPS} OR ordinal > {last}"
        base.execute(
            f"DELETE FROM lessons WHERE session IN (SELECT task || '-' || number || '-' || member"
            f" FROM attempts JOIN groups USING (ordinal) WHERE ordinal IN ({old}))"
        )
        base.execute(f"UPDATE attempts SET packed = NULL WHERE ordinal IN ({old})")
        base.commit()
        (to / LEDGER_SQL).write_text("\n".join(base.iterdump()) + "\n")
        base.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("demo").add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "demo":
        make_demo(options.runs)
    else:
        print_claims(claims(options.rollouts))


if __name__ == "__main__":
    main()
