import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paddock.checkpoint import save_pretrained
from paddock.cli.__main__ import app
from paddock.model import Transformer, preset

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    save_pretrained(Transformer.from_config(preset("nano"), 0), tmp_path / "nano")
    return tmp_path / "nano"


def check(folder):
    return CliRunner().invoke(app, ["model", "check", str(folder)])


def change(folder, **tensors):
    """Replace tensors, or remove them for None; two underscores stand for a dot."""
    stored = load_file(folder / WEIGHTS) | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({name: t for name, t in stored.items() if t is not None}, folder / WEIGHTS)


def test_a_valid_folder_is_summarized(folder):
    done = check(folder)
    assert done.exit_code == 0
    assert done.stderr == ""  # no progress bar without a terminal
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:-1])
    assert rows["family"] == "glm_moe_dsa"
    count = len(load_file(folder / WEIGHTS))
    assert rows["tensors"] == str(count)
    assert rows["dtypes"] == f"float32 ({count})"
    assert rows["MTP"] == "present"
    assert done.stdout.endswith("ok\n")


def test_a_missing_mtp_layer_is_a_warning(folder):
    stored = load_file(folder / WEIGHTS)
    save_file({k: v for k, v in stored.items() if ".layers.4." not in k}, folder / WEIGHTS)
    done = check(folder)
    assert done.exit_code == 0
    assert "MTP      in config.json, but not in the files" in done.stdout


def truncate(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def misspell(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_topkk": 3}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: change(f, model__norm__weight=None), "'model.norm.weight' is missing"),
        (lambda f: change(f, stray=torch.zeros(2)), "unexpected tensor 'stray'"),
        (lambda f: change(f, model__norm__weight=torch.ones(3)), "'model.norm.weight' has shape"),
        (
            lambda f: change(f, model__norm__weight=torch.full((96,), torch.nan)),
            "'model.norm.weight' holds nan at (0,)",
        ),
        (truncate, "model.safetensors: truncated"),
        (misspell, "unknown setting 'index_topkk'; did you mean 'index_topk'?"),
        (lambda f: (f / WEIGHTS).unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "config.json").unlink(), "config.json: file not found"),
    ],
)
def test_damage_is_named_in_one_line(folder, damage, named):
    damage(folder)
    done = check(folder)
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_a_missing_folder_is_named(tmp_path):
    done = check(tmp_path / "nowhere")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path}/nowhere: folder not found\n")
