"""GLM-5's attention module on one GPU, batch 1, against transformers' own with the same weights.

Everything is included: projections, norms, rotation, the indexer, top-k, attention, the output.
Transformers uses SDPA with a mask of the selected keys, and holds a float32 score per index head
and pair of tokens; where that does not fit, ours is reported alone. Before a length is timed the
two outputs are compared: only selections among nearly equal scores may differ in bfloat16.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.kernels import Figure, matmul_rate, medians
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import AttentionMetadata, ModelConfig, Transformer, preset

LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
BACKWARD = (4096, 8192)
THEIR_EPS = 1e-6  # of the latent norms, whatever config.json says
PEER = "transformers' module"
# Relative error of the output. With random weights attention is nearly uniform, and an output is
# the mean of 2,048 values: another selection of one per cent of them changes it by a seventh.
TOLERANCE = 0.3

Arm = Callable[[Tensor], Tensor]


def one_layer(full: ModelConfig) -> ModelConfig:
    """The first layer alone, with a tiny vocabulary and no MTP."""
    assert full.indexer is not None
    return full.model_copy(
        update={
            "vocab": 256,
            "attention": full.attention[:1],
            "mlp": ("dense",),
            "indexer": full.indexer.model_copy(update={"layers": full.indexer.layers[:1]}),
            "moe": None,
            "mtp": None,
        }
    )


def modules(config: ModelConfig, dtype: torch.dtype, device: str) -> tuple[Arm, Arm]:
    """Our module and theirs: from the normalized input to the output before the residual."""
    from transformers import GlmMoeDsaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        save_pretrained(Transformer.from_config(config, seed=0).cast(dtype), Path(name))
        kind = str(dtype).removeprefix("torch.")
        network = load_pretrained(Path(name), kind, device, latent_norm_eps=THEIR_EPS)
        model = GlmMoeDsaForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="sdpa", pad_token_id=None
        )
    decoder = model.to(device).model
    attention: nn.Module = network.layers[0].attention

    def ours(x_TD: Tensor) -> Tensor:
        context = network.make_context(AttentionMetadata.packed([len(x_TD)], device=x_TD.device))
        out_TD, _, _ = attention(x_TD, context, None)
        return out_TD  # type: ignore[no-any-return]

    def theirs(x_TD: Tensor) -> Tensor:
        length = len(x_TD)
        position_1T = torch.arange(length, device=x_TD.device).unsqueeze(0)
        mask_TT = torch.full((length, length), float("-inf"), device=x_TD.device, dtype=dtype)
        out, *_ = decoder.layers[0].self_attn(
            hidden_states=x_TD.unsqueeze(0),
            position_embeddings=decoder.rotary_emb(x_TD.unsqueeze(0), position_1T),
            attention_mask=mask_TT.triu_(1)[None, None],
            position_ids=position_1T,
        )
        return out[0]  # type: ignore[no-any-return]

    return ours, theirs


def relative_error(ours: Arm, theirs: Arm, x_TD: Tensor) -> float:
    """Relative norm of the error."""
    with torch.no_grad():
        one_TD, other_TD = ours(x_TD).double(), theirs(x_TD).double()
    return float((one_TD - other_TD).norm() / other_TD.norm())


def figures() -> Iterator[Figure]:
    rate, config = matmul_rate(), one_layer(preset("glm5"))
    ours, theirs = modules(config, torch.bfloat16, "cuda")
    for length in LENGTHS:
        yield _figure(config, ours, theirs, length, rate, backward=False)
    for length in BACKWARD:
        yield _figure(config, ours, theirs, length, rate, backward=True)


def _figure(
    config: ModelConfig, ours: Arm, theirs: Arm, length: int, rate: float, *, backward: bool
) -> Figure:
    torch.manual_seed(0)
    x_TD = torch.randn(length, config.hidden, device="cuda", dtype=torch.bfloat16)
    x_TD.requires_grad_(backward)

    def timed(arm: Arm) -> Callable[[], object]:
        def run() -> object:
            with torch.set_grad_enabled(backward):
                out_TD = arm(x_TD)
                return out_TD.sum().backward() if backward else out_TD  # type: ignore[no-untyped-call]

        return run

    torch.cuda.empty_cache()
    fits = True
    try:
        error = relative_error(ours, theirs, x_TD.detach())
        assert error < TOLERANCE, f"relative error of the outputs: {error:.3g}"
        ms, peer_ms = medians([timed(ours), timed(theirs)], repeats=5, warm=1)
    except torch.OutOfMemoryError:
        fits = False
        torch.cuda.empty_cache()
        (ms,) = medians([timed(ours)], repeats=5, warm=1)
    flops = _flops(config, length) * (3 if backward else 1)
    what = "forward and backward" if backward else "forward"
    return Figure(
        section="module",
        name=f"{what} {length // 1024}K",
        ms=ms,
        rate=flops / ms / 1e9,
        unit="TFLOP/s",
        floor_ms=flops / rate * 1e3,
        peer=PEER if fits else f"{PEER}: out of memory",
        peer_ms=peer_ms if fits else None,
    )


def _flops(config: ModelConfig, length: int) -> float:
    """Of a forward pass: weights, index scores of every pair, expanded heads over selected keys."""
    assert config.mla is not None
    assert config.indexer is not None
    mla, indexer = config.mla, config.indexer
    assert mla.q_rank is not None
    per_token = config.hidden * (mla.q_rank + mla.kv_cache_dim + indexer.dim + indexer.heads)
    per_token += mla.q_rank * (mla.heads * mla.qk_head_dim + indexer.heads * indexer.dim)
    per_token += mla.heads * (mla.kv_rank * (mla.nope + mla.value) + mla.value * config.hidden)
    selected = sum(min(t + 1, indexer.topk) for t in range(length))
    pairs = length * (length + 1) / 2 * indexer.heads * indexer.dim
    return 2 * (length * per_token + pairs + selected * mla.heads * (mla.qk_head_dim + mla.value))
