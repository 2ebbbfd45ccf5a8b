"""`paddock bench` on real engines, servers, train steps and kernels. No speed is asserted."""

import asyncio
import json

import pytest
import torch
from typer.testing import CliRunner

from paddock.bench.kernels import KERNELS as CASES
from paddock.bench.kernels import time_kernels
from paddock.bench.serving import LatencyPercentiles, Workload, run_workload
from paddock.cli.__main__ import app
from paddock.config import dump_toml
from paddock.kernels.dispatch import KERNELS
from paddock.records import Completion, Segment
from paddock.rollout.client import OutputDelta, RequestOutput, StatelessClient
from paddock.text import train_tokenizer, with_chat_template
from tests.serve.live import serving
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
    assert [(row["max_concurrency"], row["requests"]) for row in (one, three)] == [(1, 4), (3, 12)]
    assert (three["prompt_tokens"], three["output_tokens"]) == (12 * 12, 12 * 5)
    assert (three["device"], three["dtype"]) == ("cpu", "float32")
    rate = (three["prompt_tokens"] + three["output_tokens"]) / three["seconds"]
    assert three["total_token_throughput"] == pytest.approx(rate)
    for name in ("ttft_ms", "itl_ms", "e2e_latency_ms"):
        spread = three[name]
        assert 0 < spread["p50"] <= spread["p95"] <= spread["p99"]


def test_speculative_decoding_does_not_change_token_counts(folder):
    words = ("--num-speculative-tokens", 2, *SMALL[:4], "--max-concurrency", 2, "--json")
    (row,) = lines(bench("serve", folder, *words))
    assert row["output_tokens"] == 8 * 5


def test_a_preset_needs_no_folder_and_the_default_output_is_a_table():
    words = ("--input-len", 8, "--output-len", 3, "--max-concurrency", 2, "--num-prompts", 2)
    found = bench("serve", "nano", *words)
    assert found.exit_code == 0, found.output
    assert "8 input tokens, 3 output tokens" in found.stdout
    assert found.stdout.count("p99") == 2


def test_a_server_is_benchmarked_in_the_same_way(folder):
    with serving(folder) as live:
        rows = lines(bench("serve", "--base-url", live.url, *SMALL))
        assert live.audit() == []
    assert [row["requests"] for row in rows] == [4, 12]
    assert [row["output_tokens"] for row in rows] == [20, 60]
    assert rows[0]["url"] == live.url


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
        (("nano", "--input-len", 100_000), "exceeds the model's"),
    ],
)
def test_invalid_options_are_a_one_line_error(words, complaint):
    found = bench("serve", *words)
    assert found.exit_code == 1
    assert complaint in found.stderr
    assert found.stderr.startswith("error: ")


def test_percentiles_are_ordered_and_within_the_measurements():
    assert LatencyPercentiles.of([n / 1000 for n in range(1, 101)]) == LatencyPercentiles(
        p50=50.0, p95=95.0, p99=99.0
    )
    assert LatencyPercentiles.of([n / 1000 for n in range(7, 0, -1)]) == LatencyPercentiles(
        p50=4.0, p95=7.0, p99=7.0
    )
    assert LatencyPercentiles.of([0.007]) == LatencyPercentiles(p50=7.0, p95=7.0, p99=7.0)


def test_prompts_differ_except_for_their_shared_prefix():
    load = Workload(input_len=40, output_len=1, num_prompts=1, prefix_len=16, vocab=300)
    warm, timed = load.prompts("warm"), load.prompts("timed")
    found = [next(warm), next(warm), next(timed)]
    assert {len(prompt) for prompt in found} == {40}
    assert len({prompt[:16] for prompt in found}) == 1
    assert len({prompt[16:] for prompt in found}) == 3
    assert next(load.prompts("timed")) == found[2]


class Paced(StatelessClient):
    """Returns two tokens after a second, one a second later, and two more after four."""

    def __init__(self):
        self.now, self.running, self.concurrency = 0.0, 0, []  # running requests at each submission

    def clock(self):
        return self.now

    async def stream(self, ask):
        self.running += 1
        self.concurrency.append(self.running)
        done = Completion(
            token_ids=(1,) * 5, logprobs=(0.0,) * 5, versions=(Segment(0, 5),), finish="length"
        )
        for seconds, tokens in ((1, 2), (1, 1), (4, 2)):
            await asyncio.sleep(0)
            self.now += seconds
            last = RequestOutput(completion=done) if seconds == 4 else None
            yield OutputDelta(
                token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, version=0, output=last
            )
        self.running -= 1


def test_latencies_are_those_of_the_tokens():
    paced = Paced()
    load = Workload(input_len=3, output_len=5, num_prompts=2)
    found = asyncio.run(run_workload(paced, load, 1, paced.clock))
    assert (found.requests, found.output_tokens, found.seconds) == (2, 10, 12.0)
    assert found.ttft_ms == LatencyPercentiles(p50=1000.0, p95=1000.0, p99=1000.0)
    assert found.itl_ms == LatencyPercentiles(p50=2000.0, p95=2000.0, p99=2000.0)
    assert found.e2e_latency_ms.p50 == 6000.0
    assert found.output_throughput == pytest.approx(10 / 12)


def test_concurrency_holds_and_warmup_is_excluded():
    paced = Paced()
    found = asyncio.run(
        run_workload(paced, Workload(input_len=3, output_len=5, num_prompts=7), 3, paced.clock)
    )
    assert (found.requests, len(paced.concurrency)) == (7, 10)
    assert paced.concurrency[:3] == paced.concurrency[3:6] == [1, 2, 3]
    assert max(paced.concurrency) == 3


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
