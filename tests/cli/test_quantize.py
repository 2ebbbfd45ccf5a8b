"""`paddock quantize` as a command and as a pipeline stage."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.cli.__main__ import app
from paddock.config import ConfigError
from paddock.dashboard import read_pipeline_report
from paddock.data import CorpusSettings
from paddock.data.reasoning import ReasoningSource
from paddock.launch import engines, suites
from paddock.launch.calibration_texts import CalibrationBudget, load_calibration_texts
from paddock.launch.pipeline import finished_stages, load_pipeline, resolve_stages
from paddock.launch.quantize import paired_difference
from paddock.quant import QuantSettings
from paddock.quant.calibration_data import make_batches
from paddock.quant.layer_quantizer import text_digest
from paddock.text import Tokenizer
from paddock.train import train
from tests.cli.pipelines import write_pipeline
from tests.quant.fake_device import FAKE_DEVICE, FakeDeviceMode
from tests.train.tiny import network_folder, run_in, settings

QUICK = ["--set", "n_grid=2", "--set", "calibration_rows=16"]
LITTLE = [
    *("--calibration-tokens", "300", "--eval-tokens", "200"),
    *("--needles", "0", "--max-seq-length", "64"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("quantize")
    source = ReasoningSource(name="chains", family="chains", count=300)
    corpus = CorpusSettings(sources=(source,), held_out_fraction=0.1)
    chosen = settings(network_folder(home / "init"), steps=2, corpus=corpus)
    train(run_in(home / "run", chosen))
    return home / "run"


def quantize(*words):
    return CliRunner().invoke(app, ["quantize", *map(str, words)])


def test_a_run_is_quantized_with_its_own_text_and_reported(run, tmp_path):
    found = quantize(run, tmp_path / "out", *QUICK, *LITTLE)
    assert found.exit_code == 0, found.output
    for word in ("weights", "nats/token", "layer error", f"done: {tmp_path / 'out'}"):
        assert word in found.output
    report = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert report["settings"]["n_grid"] == 2
    assert report["tokens"] > 100
    exact, integers = load_pretrained(latest_model(run)), load_pretrained(tmp_path / "out")
    with torch.no_grad():
        gap = (exact.logits([5, 6, 7]) - integers.logits([5, 6, 7])).abs().max()
    assert 0 < float(gap) < 1
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_it_runs_on_an_accelerator_if_present(run, tmp_path, monkeypatch):
    """Unless a device is set."""
    monkeypatch.setattr(engines, "pick_devices", lambda name, _: [name or str(FAKE_DEVICE)])
    with FakeDeviceMode():
        found = quantize(run, tmp_path / "there", *QUICK, *LITTLE)
    assert found.exit_code == 0, found.output
    assert quantize(run, tmp_path / "here", *QUICK, *LITTLE, "--device", "cpu").exit_code == 0
    there, here = (
        json.loads((tmp_path / name / "quantization.json").read_text())
        for name in ("there", "here")
    )
    assert (there["device"], here["device"]) == (FAKE_DEVICE.type, "cpu")
    assert there["nll"] == pytest.approx(here["nll"], abs=2e-3)


def test_a_checkpoint_is_quantized_with_given_text(run, tmp_path):
    lines = [json.dumps({"text": "the number of apples is 12 . " * 8}) for _ in range(12)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    words = [latest_model(run), tmp_path / "out", "--calibration-data", tmp_path / "text.jsonl"]
    found = quantize(*words, *QUICK, *LITTLE)
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "out" / "quantization.json").read_text())["tokens"] > 60


def test_no_document_is_longer_than_the_context(run, tmp_path):
    (tmp_path / "book.txt").write_text("a word and another word . \n" * 800)
    words = [
        latest_model(run),
        tmp_path / "out",
        "--calibration-data",
        tmp_path / "book.txt",
        *QUICK,
    ]
    found = quantize(
        *words,
        "--calibration-tokens",
        300,
        "--eval-tokens",
        300,
        "--needles",
        0,
        "--max-seq-length",
        1000,
    )
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert report["tokens"] == 2 * 255  # the context is 256
    assert "2048" not in report["kl_by_position"]


def test_needles_in_given_text_are_measured(run, tmp_path):
    (tmp_path / "book.txt").write_text("a word and another word . \n" * 400)
    words = [
        latest_model(run),
        tmp_path / "out",
        "--calibration-data",
        tmp_path / "book.txt",
        *QUICK,
    ]
    found = quantize(
        *words,
        "--calibration-tokens",
        200,
        "--eval-tokens",
        0,
        "--needles",
        3,
        "--max-seq-length",
        200,
    )
    assert found.exit_code == 0, found.output
    assert "needle recall (3 tasks)" in found.output


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("latin.txt", "un été à la campagne".encode("latin-1"), "invalid encoding (1)"),
        ("body.jsonl", b'{"body": "a word"}\n' * 2, "no text in 'text' (2)"),
    ],
)
def test_text_that_is_entirely_skipped_is_rejected_with_the_reason(
    run, tmp_path, name, content, why
):
    (tmp_path / name).write_bytes(content)
    found = quantize(latest_model(run), tmp_path / "out", "--calibration-data", tmp_path / name)
    assert found.exit_code == 1
    assert f"tokens or more; dropped: {why}" in found.output


def test_a_file_name_is_not_a_glob_pattern(run, tmp_path):
    (tmp_path / "book1.txt").write_text("5 6 7 " * 40)
    (tmp_path / "book[1].txt").write_text("a word . " * 40)
    amounts = CalibrationBudget(calibrate=500, held_out=0, needles=0, length=1000)
    tokenizer = Tokenizer.load(latest_model(run))
    (found,) = load_calibration_texts([tmp_path / "book[1].txt"], tokenizer, amounts)
    assert tokenizer.decode(found.ids).startswith("a word")


def test_texts_of_runs_and_files_are_mixed(run, tmp_path):
    """A checkpoint without a record of its training data gets the text of a run and of a file."""
    (tmp_path / "book.txt").write_text("a word and another word . \n" * 400)
    book = tmp_path / "book.txt"
    texts = [word for text in (run, book, book) for word in ("--calibration-data", text)]
    few = [
        "--calibration-tokens",
        "200",
        "--eval-tokens",
        "100",
        "--needles",
        "2",
        "--max-seq-length",
        "200",
    ]
    found = quantize(latest_model(run), tmp_path / "out", *texts, *QUICK, *few)
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert report["needle_tasks"] == 2  # the run has no needles, so they are in the first book
    assert 150 < report["tokens"] + 3 < 600  # a third from each, up to a whole text


def test_suites_are_measured_before_and_after_task_by_task(run, tmp_path):
    words = ["--recipe", "rtn", "--env", "nano-chain", "--num-tasks", "3"]
    found = quantize(latest_model(run), tmp_path / "out", *words)
    assert found.exit_code == 0, found.output
    assert "nano-chain, 3 tasks" in found.output
    (suite,) = json.loads((tmp_path / "out" / "quantization.json").read_text())["envs"]
    assert suite["tasks"] == 3
    again = quantize(latest_model(run), tmp_path / "out", *words)  # as if stopped before the suites
    assert again.exit_code == 0, again.output


def test_the_standard_error_of_a_suite_is_that_of_its_change():
    before = {"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0, "only here": 1.0}
    after = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0}
    found = paired_difference(before, after)
    assert found["reward"] == [0.5, 0.75]
    assert found["error"] == pytest.approx(0.25)  # three tasks unchanged, one improved
    assert found["tasks"] == 4
    assert paired_difference(before, before)["error"] == 0


def test_round_to_nearest_needs_no_text(run, tmp_path):
    found = quantize(latest_model(run), tmp_path / "out", "--recipe", "rtn")
    assert found.exit_code == 0, found.output
    assert "weights" in found.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "w4a9"], "'w4a9' must be a file or one of w4a8, rtn, qat"),
        (["--set", "alpha=3"], "unknown setting 'alpha'"),
        ([], "pass text with --calibration-data"),
        (["--calibration-data", "nowhere.jsonl"], "nowhere.jsonl: file or folder not found"),
    ],
)
def test_invalid_options_are_explained(run, tmp_path, words, message):
    found = quantize(latest_model(run), tmp_path / "out", *words)
    assert found.exit_code == 1
    assert message in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "out").exists()


def test_an_unsupported_run_is_a_one_line_error(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "rl")
    recipe = 'stage = "reasoning"\nsteps = 1\n[rollout]\ngroups_per_batch = 1\n'
    (other / "recipe.toml").write_text(recipe)
    found = quantize(other, tmp_path / "out")
    (line,) = found.output.splitlines()
    assert "does not name a training corpus" in line and line.endswith("with --calibration-data")
    found = quantize(other, tmp_path / "out", "--recipe", "rtn")
    assert found.exit_code == 0, found.output


def test_a_folder_is_never_quantized_twice(run, tmp_path):
    assert quantize(latest_model(run), tmp_path / "once", "--recipe", "rtn").exit_code == 0
    found = quantize(tmp_path / "once", tmp_path / "twice", "--recipe", "rtn")
    assert found.exit_code == 1
    assert "already quantized" in found.output


def test_a_dry_run_prints_the_recipe(run, tmp_path):
    found = quantize(run, tmp_path / "out", "--dry-run", "--set", "expert_group_size=16")
    assert found.exit_code == 0
    assert "expert_group_size = 16" in found.output
    assert not (tmp_path / "out").exists()


PIPELINE = """
[[stages]]
name = "first"
recipe = "first.toml"

[[stages]]
name = "small"
command = "quantize"
recipe = "small.toml"
description = "a quarter of the memory"
model = "first"
calibration_stages = ["first", "first"]

[[suites]]
name = "loss"
kind = "loss"
args = { corpus_stage = "first" }
num_tasks = 1
from_stage = "first"

[[suites]]
name = "chain"
env = "nano-chain"
num_tasks = 2
from_stage = "small"
"""


@pytest.fixture
def pipeline(tmp_path):
    return write_pipeline(tmp_path, PIPELINE, steps=2, small="n_grid = 2\ncalibration_rows = 16\n")


def run_pipeline(pipeline, *words):
    return CliRunner().invoke(
        app, ["run", str(pipeline), "--out", str(pipeline.parent / "run"), *words]
    )


def texts_of(*runs):
    """The default amount of calibration text, without needles."""
    amounts = CalibrationBudget(calibrate=65_536, held_out=32_768, needles=0, length=2048)
    passages = load_calibration_texts(runs, Tokenizer.load(latest_model(runs[0])), amounts)
    return make_batches(passages, QuantSettings().batch_tokens)


def test_a_pipeline_may_end_with_a_quantize_stage(pipeline, monkeypatch):
    read, opened = [], suites._load_network
    monkeypatch.setattr(suites, "_load_network", lambda *how: read.append(how) or opened(*how))
    found = run_pipeline(pipeline)
    assert found.exit_code == 0, found.output
    out = pipeline.parent / "run"
    assert read == [(out / name, "float32") for name in ("first", "small")], "not as it was trained"
    assert f"paddock quantize {out / 'first'} {out / 'small'} --recipe" in found.output
    first, small = read_pipeline_report(out).stages
    assert small.scores["loss"] == pytest.approx(first.scores["loss"], abs=0.2)
    assert small.scores["loss"] != first.scores["loss"]
    assert 0 <= small.scores["chain"] <= 1
    report = json.loads((out / "small" / "quantization.json").read_text())
    assert report["settings"]["n_grid"] == 2
    assert report["text"] == text_digest(texts_of(out / "first", out / "first"))
    again = run_pipeline(pipeline)
    assert "small: already finished" in again.output


def test_a_pipeline_stopped_after_quantization_resumes(pipeline):
    """The folder is complete, but the end of the stage was not recorded."""
    (pipeline / "pipeline.toml").write_text(PIPELINE[: PIPELINE.rindex("[[suites]]")])
    assert run_pipeline(pipeline).exit_code == 0
    events = pipeline.parent / "run" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    done = ("small", "stage_finished")
    end = next(i for i, e in enumerate(lines) if (e.get("stage"), e["kind"]) == done)
    events.write_text("".join(json.dumps(line) + "\n" for line in lines[:end]))
    assert list(finished_stages(pipeline.parent / "run")) == ["first"]
    found = run_pipeline(pipeline)
    assert found.exit_code == 0, found.output
    assert list(finished_stages(pipeline.parent / "run")) == ["first", "small"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "first"', "", "'model' names the stage to quantize"),
        ('command = "quantize"', "", "'model' names the stage to quantize"),
        ('model = "first"', 'model = "small"', "no earlier stage is called 'small'"),
        (
            'calibration_stages = ["first", "first"]',
            'calibration_stages = ["last"]',
            "no earlier stage is called 'last'",
        ),
    ],
)
def test_a_quantize_stage_without_a_source_is_rejected(pipeline, old, new, message):
    (pipeline / "pipeline.toml").write_text(PIPELINE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_pipeline(pipeline, [])


def test_other_calibration_text_changes_the_stage_digest(pipeline):
    one = resolve_stages(load_pipeline(pipeline, [])[1], pipeline, pipeline)
    (pipeline / "pipeline.toml").write_text(
        PIPELINE.replace('calibration_stages = ["first", "first"]', "")
    )
    two = resolve_stages(load_pipeline(pipeline, [])[1], pipeline, pipeline)
    assert one[0].digest == two[0].digest
    assert one[1].digest != two[1].digest
