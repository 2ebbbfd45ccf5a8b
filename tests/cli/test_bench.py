"""`paddock bench` on real engines, servers, train steps and kernels. No speed is asserted."""

import json

import pytest
import torch
from typer.testing import CliRunner

from paddock.bench.kernels import KERNELS as CASES
from paddock.bench.kernels import time_kernels
from paddock.cli.__main__ import app
from paddock.config import dump_toml
from paddock.kernels.dispatch import KERNELS
from paddock.text import train_tokenizer, with_chat_template
from tests.train.tiny import network_folder, settings


def bench(*words):
    return CliRunner().invoke(app, ["bench", *(str(word) for word in words)])


def lines(found):
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = network_folder(tmp_path_factory.mktemp("bench") / "model")
    text = (f"{a} + {b} = {a + b}" for a in range(30) for b in range(30))
    with_chat_template(train_tokenizer(text, vocab=320, splitting="words"), "5").save(target)
    return target


SMALL = ("--input-len", 12, "--output-len", 5, "--max-concurrency", "1,3", "--json")


def test_a_local_model_gets_the_requested_concurrency(folder):
    one, three = lines(bench("serve", folder, *SMALL))
    found = [(row["max_concurrency"], row["completed"], row["failed"]) for row in (one, three)]
    assert found == [(1, 4, 0), (3, 12, 0)]
    assert (three["total_input_tokens"], three["total_output_tokens"]) == (12 * 12, 12 * 5)
    assert (three["backend"], three["device"], three["dtype"]) == ("engine", "cpu", "float32")
    assert three["total_token_throughput"] == pytest.approx(12 * 17 / three["duration"])
    assert three["peak_rss_bytes"] > 0
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread = [three[f"p{p}_{name}_ms"] for p in (50, 90, 95, 99)]
        assert 0 < spread[0] == three[f"median_{name}_ms"]
        assert spread == sorted(spread)


def test_speculative_decoding_does_not_change_token_counts(folder):
    words = ("--num-speculative-tokens", 2, *SMALL[:4], "--max-concurrency", 2, "--json")
    (row,) = lines(bench("serve", folder, *words))
    assert row["total_output_tokens"] == 8 * 5


def test_a_preset_needs_no_folder_and_the_default_output_is_a_table():
    words = ("--input-len", 8, "--output-len", 3, "--max-concurrency", 2, "--num-prompts", 2)
    found = bench("serve", "nano", *words)
    assert found.exit_code == 0, found.output
    assert "8 input tokens, 3 output tokens" in found.stdout
    assert found.stdout.count("p99") == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "pass either a MODEL"),
        (("nano", "--base-url", "http://127.0.0.1:9"), "pass either a MODEL"),
        (("nono",), "'nono' is neither a folder nor a preset"),
        (("glm5",), "fresh weights need"),
        (("nano", "--max-concurrency", "two"), "expected numbers such as 1,8,32"),
        (("nano", "--input-len", 8, "--prefix-len", 8), "must be smaller than --input-len"),
        (("--base-url", "http://127.0.0.1:9"), "server unreachable"),
        (("--base-url", "127.0.0.1:8000"), "expected a URL such as"),
        (("--base-url", "http://127.0.0.1:9", "--model", "m"), "all 1 requests failed"),
        (("nano", "--input-len", 100_000), "exceeds the model's"),
        (("nano", "--request-rate", 0), "--request-rate 0 must be positive"),
        (("nano", "--burstiness", 0), "--burstiness 0 must be positive"),
    ],
)
def test_invalid_options_are_a_one_line_error(words, complaint):
    found = bench("serve", *words)
    assert found.exit_code == 1
    assert complaint in found.stderr
    assert found.stderr.startswith("error: ")


def test_a_step_is_timed_and_nothing_is_saved(tmp_path):
    recipe = tmp_path / "stage.toml"
    recipe.write_text(dump_toml(settings(network_folder(tmp_path / "init"))))
    before = sorted(tmp_path.rglob("*"))
    (row,) = lines(bench("train", recipe, "--steps", 2, "--json"))
    assert sorted(tmp_path.rglob("*")) == before
    assert row["tokens_per_step"] == 128
    assert row["tokens_per_second"] == pytest.approx(128 / row["seconds_per_step"])
    assert row["peak_bytes"] > row["parameters"] * 4
    assert row["mfu"] is None  # a CPU has no known peak
    shown = bench("train", recipe, "--steps", 1)
    assert "tok/s" in shown.stdout


def test_a_recipe_for_several_processes_is_rejected():
    found = bench("train", "recipes/glm5/pretrain.toml")
    assert found.exit_code == 1
    assert "processes, and one is timed here" in found.stderr


def test_every_kernel_has_a_case_that_runs():
    assert set(CASES) == set(KERNELS) | {"gated_delta"}
    found = {each.kernel: each for each in time_kernels((), torch.device("cpu"), 1)}
    assert set(found) == set(CASES)
    assert all(each.reference_ms > 0 for each in found.values())
    without = {name for name, each in found.items() if each.kernel_ms is None}
    assert without == set(KERNELS) - {"cpu"}
    assert all("NVIDIA GPU" in found[name].note for name in without)
    assert found["gated_delta"].difference < 1e-4
    assert found["gated_delta"].speedup > 0


def test_kernels_are_listed_and_an_unknown_one_is_named():
    found = bench("kernels", "norm", "gated_delta", "--repeats", 1)
    assert found.exit_code == 0, found.output
    assert "the kernel needs an NVIDIA GPU" in found.stdout
    assert [row["kernel"] for row in lines(bench("kernels", "rope", "--json"))] == ["rope"]
    wrong = bench("kernels", "nrom")
    assert wrong.exit_code == 1
    assert "kernel 'nrom' not found" in wrong.stderr


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_agrees_with_its_reference():
    exact = {"expert_topk", "topk"}
    for each in time_kernels((), torch.device("cuda"), 1):
        assert each.kernel_ms is not None, each.kernel
        if each.kernel != "adamw":  # its result changes with every step
            assert each.difference <= (0.0 if each.kernel in exact else 0.03), each
