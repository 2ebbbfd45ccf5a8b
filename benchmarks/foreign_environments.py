"""Environments in Pythons of their own: verifiers and OpenEnv, installed apart, tested and trained.

    python -m benchmarks.foreign_environments

Makes their virtual environments where there are none yet, runs the tests that plain test runs skip
without them, and trains a tiny network in a game that ships with verifiers (TextArena's Hangman).
NLTK's word list, which the game downloads, is replaced by that of the package english-words, so
that a package index is all that is needed.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.table import Claim, print_claims
from paddock.envs.foreign.interpreter import find_interpreter

TEXTARENA = ("verifiers[ta]==0.4.0", "english-words==2.0.2")
VENVS = (("verifiers==0.4.0",), ("openenv==0.10.0",))
TESTS = (
    "tests/envs/test_foreign.py",
    "tests/envs/test_openenv.py",
    "tests/rl/test_environments_run.py",
)
LONG_CONTEXT = {"max_position_embeddings": 8192}
WORDS = """
import pathlib, sys
from english_words import get_english_words_set
folder = pathlib.Path(sys.prefix, "nltk_data", "corpora", "words")
folder.mkdir(parents=True, exist_ok=True)
words = sorted(get_english_words_set(["web2"], lower=True, alpha=True))
for name in ("en", "en-basic"):
    (folder / name).write_text("\\n".join(words))
"""


def claims() -> list[Claim]:
    for requirements in VENVS:
        find_interpreter("", requirements)
    return [_tests(), _hangman()]


def _tests() -> Claim:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1].strip("= ")
    holds = done.returncode == 0 and "skipped" not in last
    return Claim(
        name="tests with verifiers 0.4.0 and openenv 0.10.0 in Pythons of their own",
        target="all pass, none skipped",
        measured=last,
        holds=holds,
    )


def _hangman() -> Claim:
    """Two updates in a taskset from the wheel."""
    from paddock.cli.rl import run_rl
    from paddock.journal import LEDGER_FILE, Ledger
    from paddock.records import Verdict
    from tests.rl.test_environments_run import RECIPE
    from tests.rl.vault_env import pretrained_on_vault
    from tests.rl.vault_runs import SYNCHRONOUS, numbers, recipe_in

    python = find_interpreter("", TEXTARENA)
    subprocess.run([python, "-c", WORDS], check=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        start = pretrained_on_vault(folder / "start")
        config = start / "config.json"  # the rules of the game are longer than any vault
        config.write_text(json.dumps({**json.loads(config.read_text()), **LONG_CONTEXT}))
        recipe = recipe_in(folder, start, RECIPE.replace("ENV", "verifiers"))
        sets = [
            'tasks.short.args.taskset="textarena"',
            'tasks.short.args.args.game="Hangman-v0"',
            f'tasks.short.args.python="{python}"',
            "tasks.short.args.max_turns=2",
            "engines.kv_cache_bytes=67108864",
            "credit.keep_zero_variance=true",  # the tiny network never wins
        ]
        run_rl(recipe, folder / "run", [*SYNCHRONOUS, *sets])
        updates = len(numbers(folder / "run"))
        with Ledger(folder / "run" / LEDGER_FILE) as ledger:
            found = [b[0] for g in ledger.groups() for b in ledger.rollouts(g.ordinal).values()]
    scored = sum(isinstance(rollout.outcome, Verdict) for rollout in found)
    return Claim(
        name="TextArena's Hangman, from the wheel of verifiers 0.4.0, trains",
        target="2 updates, every rollout scored",
        measured=f"{updates} updates, {scored} of {len(found)} rollouts scored",
        holds=updates == 2 and scored == len(found) > 0,
    )


if __name__ == "__main__":
    print_claims(claims())
