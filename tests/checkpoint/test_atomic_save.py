"""Saving replaces a checkpoint atomically and changes nothing else."""

import ctypes
import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import paddock
from paddock.checkpoint import CheckpointError, load_pretrained, save_pretrained
from tests.model.networks import build_network, grouped_config

ROOT = Path(paddock.__file__).parents[1]
CONFIG = grouped_config("gqa", "swa")


@pytest.fixture
def old():
    return build_network(CONFIG, seed=1)


@pytest.fixture
def new():
    return build_network(CONFIG, seed=2)


@pytest.fixture
def target(old, tmp_path):
    """A checkpoint with a tokenizer, of several shards."""
    save_pretrained(old, tmp_path / "model", shard_bytes=10_000)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def is_network(folder, network):
    found = load_pretrained(folder).state_dict()
    return all(torch.equal(tensor, found[name]) for name, tensor in network.state_dict().items())


class InjectedError(Exception):
    pass


def fail_after(monkeypatch, module, function, calls, error=InjectedError):
    """The function works `calls` times and then raises."""
    original, count = getattr(module, function), iter(range(calls))

    def wrapped(*args, **kwargs):
        if next(count, None) is None:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(module, function, wrapped)


@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("module", "function", "calls"),
    [
        ("paddock.checkpoint.save", "save_file", 0),
        ("paddock.checkpoint.save", "save_file", 2),
        ("shutil", "copy2", 0),
        ("os", "fsync", 0),
        ("os", "fsync", 3),
        ("ctypes", "CDLL", 0),
    ],
)
def test_a_failed_save_changes_nothing(target, new, monkeypatch, module, function, calls, error):
    before = contents(target.parent)
    fail_after(monkeypatch, sys.modules[module], function, calls, error)
    with pytest.raises(error):
        save_pretrained(new, target, shard_bytes=10_000)
    assert contents(target.parent) == before


def test_a_failed_first_save_leaves_no_files(new, tmp_path, monkeypatch):
    fail_after(monkeypatch, sys.modules["paddock.checkpoint.save"], "save_file", 1)
    with pytest.raises(InjectedError):
        save_pretrained(new, tmp_path / "model", shard_bytes=10_000)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_changes_nothing(target, new):
    before = contents(target.parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(Exception, match="File too large"):
            save_pretrained(new, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(target.parent) == before


def test_a_network_with_a_nan_replaces_nothing(target, new):
    before = contents(target.parent)
    with torch.no_grad():
        new.layers[1].mlp.up.weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"'layers.1.mlp.up.weight' holds nan at \(3, 4\)"):
        save_pretrained(new, target)
    assert contents(target.parent) == before


def test_a_checkpoint_is_replaced_and_its_old_shards_are_gone(target, new):
    assert len(list(target.glob("*.safetensors"))) > 1
    save_pretrained(new, target)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert is_network(target, new)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_other_files_of_a_checkpoint_are_kept(target, new):
    (target / "original").mkdir()
    (target / "original" / "params.json").write_text("[]")
    (target / ".gitattributes").write_text("*")
    (target / "chat_template.jinja").symlink_to("original/params.json")
    (target / "dangling").symlink_to("nowhere")
    kept = {"tokenizer.json", "original", "original/params.json", ".gitattributes"}
    before = {name: text for name, text in contents(target).items() if name in kept}
    save_pretrained(new, target)
    assert before.items() <= contents(target).items()
    assert os.readlink(target / "chat_template.jinja") == "original/params.json"
    assert os.readlink(target / "dangling") == "nowhere"
    assert is_network(target, new)


def test_extra_files_are_written_with_the_weights_and_replace_old_ones(target, new, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text("mine")
    (target / "chat_template.jinja").symlink_to(outside)
    files = {"tokenizer.json": b"new", "chat_template.jinja": b"hi"}
    save_pretrained(new, target, extra_files=files)
    assert (target / "tokenizer.json").read_bytes() == b"new"
    assert (target / "chat_template.jinja").read_bytes() == b"hi"
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "x.safetensors", "../up", "/etc/x", "sub/x", "", ".."],
)
def test_an_extra_file_may_not_be_a_weight_file_or_leave_the_folder(target, new, name):
    before = contents(target.parent)
    with pytest.raises(ValueError, match="cannot be the name of an extra file"):
        save_pretrained(new, target, extra_files={name: b""})
    assert contents(target.parent) == before


def test_a_folder_that_is_missing_or_empty_is_filled(new, tmp_path):
    save_pretrained(new, tmp_path / "a" / "b" / "model")
    assert is_network(tmp_path / "a" / "b" / "model", new)
    (tmp_path / "empty").mkdir()
    save_pretrained(new, tmp_path / "empty")
    assert is_network(tmp_path / "empty", new)
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o755
    weights, config = (tmp_path / "empty" / name for name in ("model.safetensors", "config.json"))
    assert (
        weights.stat().st_mode == config.stat().st_mode
    )  # safetensors alone would make it private


def test_saving_through_a_symlink_replaces_its_target(target, new):
    link = target.parent / "latest"
    link.symlink_to(target.name)
    save_pretrained(new, link)
    assert link.is_symlink()
    assert is_network(target, new)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("thesis.tex", b"", "is not empty and not a checkpoint; not replaced"),
        ("config.json", b'{"port": 80}', "is not empty and not a checkpoint"),
        ("config.json", b"{", "not valid JSON"),
    ],
)
def test_a_folder_with_other_content_is_rejected(new, tmp_path, file, content, complaint):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        save_pretrained(new, tmp_path / "home")
    assert contents(tmp_path) == {"home": None, f"home/{file}": content}


def test_other_safetensors_are_neither_lost_nor_mixed_in(target, new):
    save_file({"lora": torch.ones(1)}, target / "adapter_model.safetensors")
    before = contents(target.parent)
    with pytest.raises(CheckpointError, match=r"holds adapter_model\.safetensors, which would be"):
        save_pretrained(new, target)
    assert contents(target.parent) == before


def test_a_file_in_place_of_the_folder_is_rejected(new, tmp_path):
    (tmp_path / "model").write_text("precious")
    with pytest.raises(CheckpointError, match="model: is a file, not a folder"):
        save_pretrained(new, tmp_path / "model")
    assert (tmp_path / "model").read_text() == "precious"


def no_exchange(*args, **kwargs):
    raise OSError("this system has no renameat2")


def test_without_atomic_exchange_folders_are_renamed_one_by_one(target, new, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", no_exchange)
    save_pretrained(new, target)
    assert is_network(target, new)
    assert (target / "tokenizer.json").exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("calls", [0, 1])
def test_if_renaming_fails_the_old_checkpoint_is_restored(target, new, monkeypatch, calls):
    before = contents(target)
    monkeypatch.setattr(ctypes, "CDLL", no_exchange)
    original, count = os.replace, iter(range(10))

    def replace(*args):
        if next(count) == calls:
            raise InjectedError
        original(*args)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(InjectedError):
        save_pretrained(new, target)
    assert contents(target) == before


def test_leftovers_of_a_killed_save_are_removed_and_those_of_a_running_one_are_not(target, new):
    names = ("dead", "living")
    dead, living = (target.parent / f".model.saving-{name}" for name in names)
    other = target.parent / ".model.saved"
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        save_pretrained(new, target)
    finally:
        os.close(handle)
    assert (living.exists(), other.exists(), dead.exists()) == (True, True, False)
    save_pretrained(new, target)
    assert (living.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize(
    ("module", "function"),
    [("json", "loads"), ("paddock.checkpoint.safetensors_folder", "safe_open")],
    ids=["after its config.json was read", "when its shards are about to be opened"],
)
def test_a_checkpoint_replaced_while_being_opened_is_opened_again(
    target, new, monkeypatch, module, function
):
    slower = new.config.rope.model_copy(update={"theta": 9.0})
    new.config = new.config.model_copy(update={"rope": slower})
    original, first = getattr(sys.modules[module], function), iter([True])

    def meanwhile(*args, **kwargs):
        if function == "loads":
            found = original(*args, **kwargs)
        if next(first, False):
            save_pretrained(new, target)
        return found if function == "loads" else original(*args, **kwargs)

    monkeypatch.setattr(sys.modules[module], function, meanwhile)
    found = load_pretrained(target)
    assert found.config.rope.theta == 9.0
    assert torch.equal(found.embed.weight, new.embed.weight)


def test_an_open_checkpoint_stays_readable_after_it_was_replaced(target, old, new):
    from paddock.checkpoint.load import (
        load_tensors,
        match_tensors,
        materialize,
        meta_model,
        open_checkpoint,
    )

    config, tensors = open_checkpoint(target)
    save_pretrained(new, target)
    network = meta_model(config)
    plan = match_tensors(network, tensors)
    network = materialize(network, torch.float32, "cpu")
    load_tensors(network, tensors, plan)
    assert torch.equal(network.logits([1, 2, 3]), old.logits([1, 2, 3]))


def run_stress(what, folder):
    return subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.replace_stress", what, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_writer_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    outcome = run_stress("kill", tmp_path / "model")
    assert outcome.returncode == 0, outcome.stderr


def test_a_reader_sees_the_old_checkpoint_or_the_new_one_never_a_mixture(tmp_path):
    outcome = run_stress("read", tmp_path / "model")
    assert outcome.returncode == 0, outcome.stderr
