"""MLA decode preparation on a GPU: at real widths, in a CUDA graph, and in a whole network."""

import pytest
import torch

from paddock.engine import Engine, EngineSettings, Request
from paddock.kernels import dispatch, mla_prepare
from paddock.kernels.mla_prepare import fused, reference
from paddock.model import Transformer, preset
from paddock.model.attention.mla import MLA
from paddock.records import SamplingParams
from tests.kernels.mla_prepare_cases import CASES, Prepare, exact, first_token

pytestmark = pytest.mark.gpu

WIDE = {"latent": 2048, "row": 512, "pairs": 32, "key": 128, "heads": 64, "head": 256}
WIDE |= {"index_heads": 32, "hidden": 6144, "slots": 500}
GLM5 = {f"GLM-5, {n} tokens": Prepare(tokens=n, wide=n == 8, **WIDE) for n in (1, 3, 8, 64, 128)}
GLM5["halves, 3 tokens"] = Prepare(tokens=3, interleaved=False, index_interleaved=False, **WIDE)


def error(found, expected):
    """Relative error; NaN must be where the expected result has it."""
    found = found.double().cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(), expected.nan_to_num()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CASES, *GLM5])
def test_the_kernel_matches_float64(name, dtype):
    case = (CASES | GLM5)[name]
    inputs = case.inputs(dtype, "cuda")
    expected = case.prepared(reference, exact(inputs))
    with torch.no_grad():
        assert mla_prepare.suits(inputs[0].raw_TQ, inputs[0].weight_Q)
    found = case.prepared(mla_prepare, inputs)
    for part in expected:
        assert error(found[part], expected[part]) < (1e-5 if part == "weights" else 6e-3), part
    again = case.prepared(fused, case.inputs(dtype, "cuda"))
    assert all(torch.equal(found[k].nan_to_num(), again[k].nan_to_num()) for k in found)


@pytest.mark.parametrize("name", GLM5)
def test_it_rounds_like_the_operations_it_replaces(name):
    case = GLM5[name]
    found = case.prepared(fused, case.inputs(torch.bfloat16, "cuda"))
    plain = case.prepared(reference, case.inputs(torch.bfloat16, "cuda"))
    for part in found.keys() - {"weights"}:
        differ = (found[part].nan_to_num() != plain[part].nan_to_num()).double().mean()
        assert differ < 0.01, (part, float(differ))


def test_a_token_does_not_depend_on_the_others():
    case = GLM5["GLM-5, 64 tokens"]
    whole = case.prepared(fused, case.inputs(torch.bfloat16, "cuda"))
    inputs = first_token(case.inputs(torch.bfloat16, "cuda"))
    alone = case.prepared(fused, inputs)
    for part, found in alone.items():
        at = inputs[4][0] if part in ("rows", "keys") else 0
        assert torch.equal(found[at].nan_to_num(), whole[part][at].nan_to_num()), part


def test_unsupported_inputs():
    x, weight = torch.randn(129, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda")
    half = weight.bfloat16()
    assert not mla_prepare.suits(x[:1], half)  # gradients are on
    with torch.no_grad():
        assert mla_prepare.suits(x[:128], half)
        assert not mla_prepare.suits(x, half)
        assert not mla_prepare.suits(x[:1], weight)
        assert not mla_prepare.suits(x[:1].float(), weight)
        assert not mla_prepare.suits(x[:0], half)
        with dispatch.disable_kernels("mla_prepare"):
            assert not mla_prepare.suits(x[:1], half)


def test_graph_replay_reads_current_slots_and_inputs():
    case = GLM5["GLM-5, 8 tokens"]
    inputs = case.inputs(torch.bfloat16, "cuda")
    latent, row, key, _, slot, queries, index = inputs
    case.prepared(fused, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.prepared(fused, inputs)
    for turn in range(3):
        for raw in (latent.raw_TQ, row.raw_TC, key.raw_TD, queries.raw_THD, index.raw_THD):
            raw.copy_(torch.randn_like(raw))
        slot.copy_((slot.flip(0) + turn) % case.slots)
        for x in (row.stored_SC, key.stored_SD, queries.absorbed_THC):
            x.fill_(torch.nan)
        graph.replay()
        held = {name: x.clone() for name, x in found.items()}
        for x in (row.stored_SC, key.stored_SD, queries.absorbed_THC):
            x.fill_(torch.nan)
        expected = case.prepared(fused, inputs)
        assert all(torch.equal(held[k].nan_to_num(), expected[k].nan_to_num()) for k in held)


@pytest.fixture(scope="module")
def network():
    """Three layers of the small preset with topk 64, so that every reply uses sparse attention."""
    config = preset("small")
    layers = {"topk": 64, "layers": config.indexer.layers[:3]}
    changes = {"attention": config.attention[:3], "mlp": config.mlp[:3], "context": 2048}
    changes["indexer"] = config.indexer.model_copy(update=layers)
    return (
        Transformer.from_config(config.model_copy(update=changes), seed=0)
        .cuda()
        .cast(torch.bfloat16)
    )


@pytest.mark.parametrize("graphs", [False, None])
def test_replies_match_with_and_without_the_kernel(network, graphs, monkeypatch):
    """Rounding may change greedy replies where two logits are close, but not at once."""
    taken, plain = [], MLA.prepare_decode

    def counted(self, *args, **kwargs):
        taken.append(self.layer)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(MLA, "prepare_decode", counted)
    rng = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(0, 32_000, (40 + 30 * i,), generator=rng).tolist()) for i in range(4)
    ]

    def replies():
        settings = EngineSettings(
            kv_cache_bytes=1 << 28, stop_token_ids=(), page_size=64, cuda_graphs=graphs
        )
        sampling = SamplingParams(temperature=0.0, max_new_tokens=16)
        with Engine(network, None, settings) as serving:
            requests = [Request(token_ids=prompt, sampling_params=sampling) for prompt in prompts]
            found = [answer.completion for answer in serving.generate_outputs(requests)]
            assert serving.audit() == []
        return found

    with_it = replies()
    assert set(taken) == {0, 1, 2}
    taken.clear()
    with dispatch.disable_kernels("mla_prepare"):
        without_it = replies()
    assert not taken
    for a, b in zip(with_it, without_it, strict=True):
        assert a.token_ids[:4] == b.token_ids[:4]
        torch.testing.assert_close(
            torch.tensor(a.logprobs[:4]), torch.tensor(b.logprobs[:4]), atol=5e-2, rtol=0
        )
