from typer.testing import CliRunner

from paddock.cli.__main__ import app
from tests.rl.vault_runs import recipe_in, register


def invoke(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.output


def test_a_dry_run_prints_the_resolved_recipe_and_the_estimate(tmp_path):
    register()
    recipe = recipe_in(tmp_path, "nowhere")
    code, text = invoke("rl", recipe, "--dry-run", "--set", "steps=6")
    assert code == 0, text
    for line in (
        "steps = 6",
        'kind = "double_sided"',
        "max_staleness = 4",
        "reset_optimizer = true",
    ):
        assert line in text
    assert "at least 48 rollouts" in text  # six batches of two groups of four
    assert " nowhere: a checkpoint or run folder: " in text


def test_a_user_error_is_one_line(tmp_path):
    recipe = recipe_in(tmp_path, tmp_path / "nowhere")
    for words, complaint in (
        (
            ["--set", "loss.clip_lwo=1"],
            "error: unknown setting 'loss.clip_lwo' in --set; did you mean",
        ),
        (["--set", "stage=agentc"], "error: unknown stage 'agentc'; must be one of"),
        (
            ["--debug", "train-only"],
            "--debug train-only and --replay FOLDER need each other",
        ),
        ([], "error: "),
    ):
        code, text = invoke("rl", recipe, *words)
        assert code == 1 and complaint in text, text
        assert "Traceback" not in text


def test_distill_needs_a_distill_recipe(tmp_path):
    code, text = invoke("distill", recipe_in(tmp_path, "nowhere"), "--dry-run")
    assert code == 1 and "stage must be 'distill', got 'agentic'" in text
