"""The routed experts of a GLM-5 layer on one GPU, against PyTorch's grouped GEMM.

256 experts of 6144 -> 2048, eight per token, bfloat16, uniform random routing. The baseline is
plain PyTorch: a stable sort by expert, gathered rows, `torch._grouped_mm`, silu(gate) * up, a
second grouped GEMM, outputs weighted and summed by `index_add_`. Routing itself is in neither.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels import Figure, at_least, copy_rate, matmul_rate, medians
from paddock.model.config import MoESettings
from paddock.model.moe import GroupedExperts, Routing

HIDDEN, INNER, EXPERTS, ACTIVE = 6144, 2048, 256, 8
FEW, MANY = (1, 8, 64), (1024, 4096, 16_384)
TRAINED = (4096, 16_384)
MIN_RATIO = 1.15


def figures() -> Iterator[Figure]:
    experts = _experts()
    bytes_s, flops_s = copy_rate() / 2, matmul_rate()
    for tokens in (*FEW, *MANY):
        with torch.no_grad():
            yield _figure(experts, tokens, bytes_s, flops_s, backward=False)
    for tokens in TRAINED:
        yield _figure(experts, tokens, bytes_s, flops_s, backward=True)


def _experts() -> GroupedExperts:
    moe = MoESettings(experts=EXPERTS, active=ACTIVE, inner=INNER, shared=1)
    with torch.device("meta"):
        experts = GroupedExperts(HIDDEN, moe).to(torch.bfloat16)
    experts = experts.to_empty(device="cuda")
    with torch.no_grad():
        for stack in experts.parameters():
            stack.normal_(std=0.02)
    return experts


def _routing(tokens: int) -> Routing:
    score_TE = torch.rand(tokens, EXPERTS, device="cuda")
    expert_TK = score_TE.topk(ACTIVE).indices.sort(-1).values
    weight_TK = score_TE.gather(1, expert_TK)
    return Routing(expert_TK, weight_TK / weight_TK.sum(-1, keepdim=True), score_TE)


def plain(x_TD: Tensor, routing: Routing, experts: GroupedExperts) -> Tensor:
    expert_R, order_R = routing.expert_TK.flatten().sort(stable=True)
    token_R = order_R // ACTIVE
    end_E = torch.bincount(expert_R, minlength=EXPERTS).cumsum(0).to(torch.int32)
    both_RG = torch._grouped_mm(x_TD[token_R], experts.gate_up.transpose(1, 2), offs=end_E)
    gate_RF, up_RF = both_RG.chunk(2, dim=-1)
    out_RD = torch._grouped_mm(F.silu(gate_RF) * up_RF, experts.down.transpose(1, 2), offs=end_E)
    weighted_RD = out_RD * routing.weight_TK.flatten()[order_R, None].to(out_RD.dtype)
    return torch.zeros_like(x_TD).index_add_(0, token_R, weighted_RD)


def _figure(
    experts: GroupedExperts, tokens: int, bytes_s: float, flops_s: float, *, backward: bool
) -> Figure:
    torch.manual_seed(0)
    routing = _routing(tokens)
    x_TD = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x_TD.requires_grad_(backward)
    grad_TD = torch.randn_like(x_TD)

    def timed(layer: Callable[[], Tensor]) -> Callable[[], object]:
        def run() -> object:
            y_TD = layer()
            inputs = [x_TD, *experts.parameters()]
            return torch.autograd.grad(y_TD, inputs, grad_TD) if backward else y_TD

        return run

    ours, theirs = lambda: experts(x_TD, routing), lambda: plain(x_TD, routing, experts)
    _check(ours(), theirs())
    ms, peer_ms = medians([timed(ours), timed(theirs)], repeats=9)
    active = min(EXPERTS, len(routing.expert_TK.unique()))
    weights = active * 3 * HIDDEN * INNER
    flops = 2.0 * tokens * ACTIVE * 3 * HIDDEN * INNER * (3 if backward else 1)
    by_bytes, by_flops = 2 * weights * (3 if backward else 1) / bytes_s, flops / flops_s
    memory_bound = by_bytes > by_flops
    figure = Figure(
        section="moe",
        name=f"{tokens} tokens, {'forward and backward' if backward else 'forward'}",
        ms=ms,
        rate=2 * weights / ms / 1e9 if memory_bound else flops / ms / 1e9,
        unit="TB/s" if memory_bound else "TFLOP/s",
        floor_ms=max(by_bytes, by_flops) * 1e3,
        peer="grouped_mm",
        peer_ms=peer_ms,
    )
    return at_least(figure, ratio=MIN_RATIO)


def _check(ours_TD: Tensor, theirs_TD: Tensor) -> None:
    error = (ours_TD.float() - theirs_TD.float()).norm() / theirs_TD.float().norm()
    assert error < 2e-2, f"the two arms differ by {error:.3f}"
