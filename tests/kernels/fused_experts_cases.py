"""The plan of the fused experts kernel, and its result, run by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.fused_experts_cases FILE [--all]

FILE receives, as JSON, for every case whether the plan equals a stable sort by expert; for
"products", the distance from the reference.
"""

import json
import sys
from pathlib import Path

import torch

ROWS = (1, 2, 15, 16, 17, 40, 255, 256, 257, 1000, 4096)
ALL_ROWS = (*ROWS, 3, 33, 64, 100, 511, 512, 513, 2047, 2048, 3000, 4095)
SKEWS = ("uniform", "skewed", "one expert")
EXPERTS = (1, 8, 60, 256)


def drawn(skew: str, rows: int, experts: int) -> torch.Tensor:
    """Experts of rows: equally likely, Zipf-distributed in a random order, or all the same."""
    generator = torch.Generator().manual_seed(rows * 1000 + experts)
    if skew == "one expert":
        return torch.full((rows,), experts - 1)
    weight_E = torch.ones(experts)
    if skew == "skewed":
        weight_E = 1 / (1.0 + torch.randperm(experts, generator=generator)) ** 1.5
    return torch.multinomial(weight_E, rows, replacement=True, generator=generator)


def stable_blocks(expert_R: torch.Tensor, block: int) -> list[tuple[int, list[int]]]:
    """The rows of each expert in their order, `block` at a time."""
    order_R = expert_R.argsort(stable=True)
    found = []
    for expert in expert_R.unique().tolist():
        rows = order_R[expert_R[order_R] == expert].tolist()
        found += [(expert, rows[i : i + block]) for i in range(0, len(rows), block)]
    return found


def plan_is_a_stable_sort(expert_R: torch.Tensor, experts: int) -> bool:
    from paddock.kernels.fused_experts import triton as kernels

    work = kernels.plan(expert_R, experts)
    wanted = stable_blocks(expert_R, kernels.BM)
    padded = [rows + [-1] * (kernels.BM - len(rows)) for _, rows in wanted]
    unused = len(work.expert_N) - len(wanted)
    return (
        work.expert_N.tolist() == [expert for expert, _ in wanted] + [-1] * unused
        and work.row_NM.tolist() == padded + [[-1] * kernels.BM] * unused
    )


def product_distance(tokens: int) -> float:
    from paddock.kernels.fused_experts import fused, reference

    generator = torch.Generator().manual_seed(tokens)
    x_TD, weight_TK = (torch.randn(tokens, n, generator=generator) for n in (24, 4))
    shapes = (6, 80, 24), (6, 24, 40)
    stacks = [torch.randn(*shape, generator=generator) / 5 for shape in shapes]
    likely_TE = 1 / torch.arange(1.0, 7).expand(tokens, 6)
    expert_TK = torch.multinomial(likely_TE, 4, generator=generator)
    found = fused.fused_experts(x_TD, expert_TK, weight_TK, *stacks).double()
    wide = [x.double() for x in (weight_TK, *stacks)]
    exact = reference.fused_experts(x_TD.double(), expert_TK, *wide)
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    rows = ALL_ROWS if "--all" in sys.argv else ROWS
    experts = EXPERTS if "--all" in sys.argv else (8, 256)
    found = {
        f"{skew}, {r} rows, {e} experts": plan_is_a_stable_sort(drawn(skew, r, e), e)
        for skew in SKEWS
        for r in rows
        for e in experts
    }
    distances = [product_distance(tokens) for tokens in (1, 5, 70)]
    Path(sys.argv[1]).write_text(json.dumps({"plans": found, "products": distances}))


if __name__ == "__main__":
    main()
