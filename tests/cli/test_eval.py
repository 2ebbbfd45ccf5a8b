"""`paddock eval`: the limits of a conversation."""

import json

from typer.testing import CliRunner

from paddock.cli.__main__ import app
from tests.cli.untrained import save_untrained


def evaluated(folder, *more):
    words = ["eval", str(folder), "nano-chain", "--num-tasks", "3", "--json", *more]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    return json.loads(found.output.splitlines()[-1])


def test_a_prompt_beyond_the_context_length_gets_no_reply(tmp_path):
    folder = save_untrained(tmp_path / "model", seed=1)
    assert evaluated(folder)["mean_turns"] == 1.0
    short = evaluated(folder, "--context-length", "8")  # the question alone has more
    assert short["mean_turns"] == 0.0 and short["mean_reward"] == 0.0 and not short["failures"]
