"""Checkpoints are loaded on another number of ranks than saved them."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from paddock.config import dump_toml
from paddock.model.config import MoESettings
from paddock.train.settings import ComputeSettings, ParallelSettings
from tests.parallel.ranks import all_on_ranks, curve, quiet, train_run
from tests.train.tiny import network_folder, run_in, settings

STEPS = 4  # a checkpoint at 3


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Runs of two ranks, each with half of the experts, by dtype."""
    folder = tmp_path_factory.mktemp("written")
    start = network_folder(folder / "init", moe=MoESettings(experts=8, active=2, inner=16))
    runs = {}
    for dtype in ("float32", "bfloat16"):
        compute, parallel = ComputeSettings(dtype=dtype), ParallelSettings(expert=2)
        chosen = settings(start, steps=STEPS, compute=compute, parallel=parallel)
        runs[dtype] = run_in(folder / dtype, chosen)
    all_on_ranks(2, [(train_run, run) for run in runs.values()])
    return runs


def tensors(folder):
    return load_file(folder / "model" / "model.safetensors") | load_file(
        folder / "optimizer.safetensors"
    )


def write_again(run):
    """Load the newest checkpoint and save it again as step 99."""
    from paddock.parallel import ParallelDegrees, init_mesh
    from paddock.train.loop import (
        PackedDataLoader,
        build_trainer,
        load_checkpoint,
        open_corpus,
        open_run_tokenizer,
        save_checkpoint,
    )

    sizes = ParallelDegrees(**run.settings.parallel.model_dump())
    with init_mesh(sizes, torch.device("cpu")) as mesh:
        tokenizer = open_run_tokenizer(run, quiet)
        trainer = build_trainer(run, tokenizer, mesh)
        corpus = open_corpus(run, tokenizer, quiet)
        stream = PackedDataLoader(corpus.split("train"), run.settings.dataloader)
        load_checkpoint(run, trainer, stream)
        save_checkpoint(run, trainer, stream, tokenizer, 99)


def copies_with_mesh(runs, folder, **sizes):
    """Copies of the runs to be resumed on another mesh."""
    parallel, copies = ParallelSettings(**sizes), {}
    for dtype, run in runs.items():
        shutil.copytree(run.folder, folder / dtype)
        shutil.copytree(run.corpora_dir, folder / "corpora", dirs_exist_ok=True)
        chosen = run.settings.model_copy(update={"parallel": parallel})
        copies[dtype] = run_in(folder / dtype, chosen)
    return copies


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, {}), (2, {"data": 2}), (4, {"expert": 2, "context": 2})]
)
def test_weights_and_optimizer_round_trip_bitwise_on_other_meshes(written, tmp_path, ranks, sizes):
    copies = copies_with_mesh(written, tmp_path, **sizes)
    all_on_ranks(ranks, [(write_again, run) for run in copies.values()])
    for dtype, run in copies.items():
        before = tensors(written[dtype].checkpoints / f"step-{STEPS:08d}")
        after = tensors(run.checkpoints / "step-00000099")
        assert before.keys() == after.keys()
        assert any(name.endswith("/momentum") for name in before)
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), (dtype, name)


def test_a_run_resumes_on_more_ranks_with_the_same_loss(written, tmp_path):
    copies = copies_with_mesh(written, tmp_path, data=2, context=2)
    for run in copies.values():
        shutil.rmtree(run.checkpoints / f"step-{STEPS:08d}")
    all_on_ranks(4, [(train_run, run) for run in copies.values()])
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        *_, last, again = curve(copies[dtype])
        assert again == pytest.approx(last, abs=tolerance)


def test_torchrun_trains_a_recipe_and_one_rank_logs(written, tmp_path):
    exact = written["float32"]
    (tmp_path / "recipe.toml").write_text(dump_toml(exact.settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "paddock.cli", "train"]
    command += [str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]
    command += ["--set", "parallel.data=2", "--set", "parallel.expert=1"]
    done = output_of(command)
    assert done.count("done:") == 1
    assert "Traceback" not in done
    run = replace(exact, folder=tmp_path / "run")
    assert curve(run) == pytest.approx(curve(exact), abs=1e-5)


def output_of(command, timeout_s=120):
    """Output of a command, which is killed with all its children if it does not end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
