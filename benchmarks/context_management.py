"""Accuracy against token budget: a small agent that looks things up, with and without context
management.

    python -m benchmarks.context_management --model runs/nano/distill

A prompt and its reply may have so many tokens together; a conversation that outgrows them fails.
Each cell is one call of `paddock eval` on the same held-out tasks of nano-tools: a search that
names a key, or files to read, and then one look-up after another.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rl_learn import paddock
from benchmarks.table import Claim

BUDGETS = (80, 88, 96, 104, 112, 128, 160)  # tokens
REPLY = 20  # tokens that a restart leaves for the reply
TASKS = 200
KINDS = ("--set", 'kinds=["search", "file", "follow"]')


def strategies(budget: int) -> dict[str, dict[str, object]]:
    longest = budget - REPLY
    return {
        "keep all": {"strategy": "keep_all"},
        "keep recent 1": {"strategy": "keep_recent", "recent_turns": 1},
        "discard all": {"strategy": "discard_all", "max_tokens": longest},
        "hierarchical": {"strategy": "hierarchical", "recent_turns": 1, "max_tokens": longest},
    }


def accuracy(model: Path, budget: int, rule: dict[str, object]) -> tuple[float, float]:
    """Mean reward and its standard error."""
    options = [w for key, value in rule.items() for w in ("--context-management", f"{key}={value}")]
    found = paddock(
        *("eval", str(model), "nano-tools", "--num-tasks", str(TASKS), *KINDS, "--json"),
        *("--context-length", str(budget), *options),
    )
    result = json.loads(found)
    return result["mean_reward"], result["stderr"]


def measure(model: Path) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for budget in BUDGETS:
        for name, rule in strategies(budget).items():
            found.setdefault(name, []).append(accuracy(model, budget, rule))
            print(budget, name, found[name][-1], flush=True)
    return found


def claims(model: Path = Path("runs/nano/distill")) -> list[Claim]:
    found = measure(model)
    table = Table("tokens", *map(str, BUDGETS))
    for name, cells in found.items():
        table.add_row(name, *(f"{mean:.3f} ± {error:.3f}" for mean, error in cells))
    Console(width=120).print(table)
    best = {name: " ".join(f"{mean:.2f}" for mean, _ in cells) for name, cells in found.items()}
    return [Claim(name=f"{name}, {BUDGETS} tokens", measured=text) for name, text in best.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/nano/distill"))
    claims(parser.parse_args().model)


if __name__ == "__main__":
    main()
