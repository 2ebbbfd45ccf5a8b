"""A run that is stopped at any step and resumed ends like an uninterrupted one."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from paddock.checkpoint import CheckpointError, load_pretrained
from paddock.checkpoint.training_state import (
    latest_model,
    list_checkpoints,
    load_latest,
    load_training_state,
    prune_checkpoints,
    save_training_state,
)
from paddock.config import dump_toml
from paddock.journal import Journal
from paddock.train import train
from paddock.train.run import claim_run_folder
from paddock.train.trainer import TrainingError
from tests.train.tiny import network_folder, run_in, settings

STEPS = 8


def quiet(_: object) -> None:
    pass


def weights(folder):
    return load_pretrained(latest_model(folder)).state_dict()


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    chosen = settings(network_folder(folder / "init"), steps=STEPS)
    train(run_in(folder / "run", chosen), log=quiet, on_update=quiet)
    return folder


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 3, 4, 7])
def test_an_interrupted_run_resumes_to_the_same_weights(uninterrupted, tmp_path, stop_at):
    chosen = settings(uninterrupted / "init", steps=STEPS)
    run = run_in(tmp_path / "run", chosen)

    def stop(update):
        if update.step == stop_at:
            raise Stop

    with pytest.raises(Stop):
        train(run, log=quiet, on_update=stop)
    train(run, log=quiet, on_update=quiet)
    assert_same_weights(weights(run.folder), weights(uninterrupted / "run"))


def test_a_killed_run_resumes_to_the_same_weights(uninterrupted, tmp_path):
    chosen = settings(uninterrupted / "init", steps=STEPS)
    (tmp_path / "recipe.toml").write_text(dump_toml(chosen))
    command = [sys.executable, "-m", "paddock.cli", "train", str(tmp_path / "recipe.toml")]
    command += ["--out", str(tmp_path / "run")]
    rng = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        metrics = tmp_path / "run" / "metrics.jsonl"
        seen = metrics.read_text().count("\n") if metrics.is_file() else 0
        wanted = seen + rng.randint(1, 3)
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.is_file() and metrics.read_text().count("\n") >= wanted:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert_same_weights(weights(tmp_path / "run"), weights(uninterrupted / "run"))


def test_a_finished_run_is_not_trained_further(uninterrupted):
    before = weights(uninterrupted / "run")
    chosen = settings(uninterrupted / "init", steps=STEPS)
    train(run_in(uninterrupted / "run", chosen), log=quiet, on_update=quiet)
    assert_same_weights(weights(uninterrupted / "run"), before)


def test_a_folder_with_other_settings_is_rejected(uninterrupted):
    chosen = settings(uninterrupted / "init", steps=STEPS + 1)
    with pytest.raises(TrainingError, match="holds a run with other settings"):
        train(run_in(uninterrupted / "run", chosen), log=quiet, on_update=quiet)


def test_a_run_older_than_a_setting_is_resumed_with_its_default(uninterrupted):
    chosen = settings(uninterrupted / "init", steps=STEPS)
    recipe = uninterrupted / "run" / "recipe.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace("balance_coef = ", "# balance_coef = "))
    assert recipe.read_text() != text
    run_in(uninterrupted / "run", chosen).claim()
    assert recipe.read_text() == text
    recipe.write_text(f"removed_since = 1\n{text}")
    with pytest.raises(TrainingError, match="holds a run with other settings"):
        run_in(uninterrupted / "run", chosen).claim()
    recipe.write_text(text)


def test_a_second_process_does_not_change_the_recipe_of_a_live_run(uninterrupted, tmp_path):
    run = run_in(tmp_path / "run", settings(uninterrupted / "init", steps=STEPS))
    theirs = run.folder / "recipe.toml"
    with Journal(run.folder):
        theirs.write_text("of the run that is alive")
        with pytest.raises(BlockingIOError, match="is in use by another process"):
            train(run, log=quiet, on_update=quiet)
    assert theirs.read_text() == "of the run that is alive"


def test_a_partially_written_recipe_is_named(uninterrupted, tmp_path):
    chosen = settings(uninterrupted / "init", steps=STEPS)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "recipe.toml").write_text(dump_toml(chosen)[:40].rstrip() + '\nkind = "mu')
    with pytest.raises(TrainingError, match=r"recipe\.toml is damaged: "):
        claim_run_folder(tmp_path, chosen, may_change=())


def test_a_full_disk_does_not_lock_a_run_out_of_its_folder(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    run = run_in(tmp_path / "run", settings(uninterrupted / "init", steps=STEPS))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            run.claim()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.claim()


def test_old_checkpoints_are_pruned(uninterrupted, tmp_path):
    assert list(list_checkpoints(uninterrupted / "run" / "checkpoints")) == [6, 8]
    for step in range(1, 8):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune_checkpoints(tmp_path, keep_last=2, keep_every=3)
    assert list(list_checkpoints(tmp_path)) == [3, 6, 7]


def test_a_network_too_small_for_the_tokenizer_is_rejected(tmp_path):
    chosen = settings(network_folder(tmp_path / "init", vocab=100))
    with pytest.raises(TrainingError, match=r"tokenizer has .*, the model's vocabulary only 100"):
        train(run_in(tmp_path / "run", chosen), log=quiet, on_update=quiet)


def test_a_missing_initial_checkpoint_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        train(run_in(tmp_path / "run", settings(tmp_path / "nowhere")), log=quiet, on_update=quiet)


def test_a_truncated_optimizer_state_is_rejected_by_name(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    state = newest / "optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        load_training_state(newest)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model/model.safetensors", "state.json"])
def test_a_corrupt_newest_checkpoint_suggests_the_newest_intact_one(uninterrupted, tmp_path, file):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.copytree(uninterrupted / "corpora", tmp_path / "corpora")
    run = run_in(tmp_path / "run", settings(uninterrupted / "init", steps=STEPS))
    whole, newest = (run.checkpoints / f"step-{step:08d}" for step in (6, 8))
    data = (newest / file).read_bytes()
    (newest / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError) as caught:
        train(run, log=quiet, on_update=quiet)
    message = str(caught.value)
    assert message.startswith(str(newest / file))
    assert f"; {whole} is intact: to resume from it, remove what is newer with `" in message
    subprocess.run(message.split("`")[1], shell=True, check=True)
    train(run, log=quiet, on_update=quiet)
    assert_same_weights(weights(run.folder), weights(uninterrupted / "run"))


def test_a_corrupt_checkpoint_without_an_intact_one_is_reported(uninterrupted, tmp_path):
    copy = shutil.copytree(uninterrupted / "run" / "checkpoints", tmp_path / "checkpoints")
    for path in copy.glob("*/model/model.safetensors"):
        flip(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="no older checkpoint is intact"):
        load_latest(copy)


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model/model.safetensors"])
def test_a_flipped_bit_is_detected_anywhere(uninterrupted, tmp_path, file):
    rng = random.Random(0)
    newest = max((uninterrupted / "run" / "checkpoints").glob("step-*"))
    damaged = shutil.copytree(newest, tmp_path / newest.name) / file
    data = damaged.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    end = len(data[:header].rstrip())  # followed by insignificant spaces
    slots = [found.start() + 1 for found in re.finditer(b"/momentum", data[:header])]
    for at in (
        *(rng.randrange(header, len(data)) for _ in range(25)),
        *(rng.randrange(end) for _ in range(25)),
        *slots[:5],
    ):
        flip(damaged, at, rng.randrange(8))
        with pytest.raises(CheckpointError, match="is damaged" if at >= header else None):
            load_training_state(tmp_path / newest.name)
        damaged.write_bytes(data)


@pytest.mark.parametrize("max_bytes", [100, 300_000, 400_000])  # bytes: model, optimizer, state
def test_a_full_disk_is_reported_and_keeps_old_checkpoints(uninterrupted, tmp_path, max_bytes):
    state = load_training_state(uninterrupted / "run" / "checkpoints" / f"step-{STEPS:08d}")
    save_training_state(tmp_path, 1, state.network, state.optimizer, extra={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002.*: cannot be written: .*large"):
            save_training_state(
                tmp_path, 2, state.network, state.optimizer, extra={"x": "y" * 10**6}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_is_synced_before_it_is_renamed(uninterrupted, tmp_path, monkeypatch):
    state = load_training_state(uninterrupted / "run" / "checkpoints" / f"step-{STEPS:08d}")
    flushed, fsync = set(), os.fsync

    def seen(handle):
        flushed.add(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    target = save_training_state(tmp_path, 1, state.network, state.optimizer, extra={})
    assert {path.name for path in target.rglob("*") if path.is_file()} <= flushed
