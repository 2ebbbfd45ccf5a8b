"""Cases of sparse MLA, and the kernels' results without a GPU.

    TRITON_INTERPRET=1 python -m tests.kernels.sparse_mla_cases FILE

Triton decides when it is imported whether it compiles or interprets, so interpreting needs a
separate process. T queries, S rows, H heads, V value columns, R the columns after them, K slots.
"""

import sys
from dataclasses import dataclass

import torch

from paddock.kernels.sparse_mla.problem import Attended, Problem

# Numbers of keys of the first queries; the others fill all slots.
LENGTHS = (1, 0, 5, 63, 64, 65, 127, 128, 129, 150)
SCALE = 0.11


@dataclass(frozen=True)
class Case:
    T: int
    S: int
    H: int
    V: int
    R: int
    K: int
    shared: float = 0.0  # fraction of a query's rows that its neighbour selects too
    gaps: bool = False  # -1 between keys, not only after them

    def index(self, rng: torch.Generator) -> torch.Tensor:
        index = torch.full((self.T, self.K), -1, dtype=torch.int32)
        common = torch.randperm(self.S, generator=rng)[: int(self.shared * self.K)]
        for t in range(self.T):
            own = torch.randperm(self.S, generator=rng)
            own = own[~torch.isin(own, common)]
            kept = torch.cat((common, own))[: self.K].sort().values
            kept = kept[: LENGTHS[t] if t < len(LENGTHS) else self.K]
            index[t, : len(kept)] = kept
        if self.gaps:
            index[torch.rand(index.shape, generator=rng) < 0.2] = -1
        return index

    def problem(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Problem:
        """The same numbers on every device."""
        rng = torch.Generator().manual_seed(0)
        query = torch.randn(self.T, self.H, self.V + self.R, generator=rng)
        row = torch.randn(self.S, self.V + self.R, generator=rng)
        index = self.index(rng).to(device)
        return Problem(query.to(device, dtype), row.to(device, dtype), index, SCALE, self.V)

    def grad(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        rng = torch.Generator().manual_seed(1)
        return torch.randn(self.T, self.H, self.V, generator=rng).to(device, dtype)


PLAIN = {
    "one head": Case(3, 40, 1, 16, 16, 20),
    "widths that fill no tile": Case(12, 60, 3, 48, 12, 40),
    "every column a value": Case(4, 30, 5, 32, 0, 17),
    "heads of several programs": Case(3, 90, 70, 32, 16, 70),
    "gaps": Case(11, 200, 16, 64, 16, 150, gaps=True),
}
HOPPER = {
    "64 heads": Case(11, 400, 64, 128, 16, 300),
    "64 heads, gaps": Case(5, 300, 64, 128, 16, 250, gaps=True),
    "96 heads": Case(1, 200, 96, 128, 32, 130),
    "20 heads": Case(3, 200, 20, 128, 16, 192),
    "16 heads": Case(14, 300, 16, 128, 16, 200, shared=0.9),
    "8 heads": Case(11, 250, 8, 128, 16, 130, shared=0.5),
    "3 heads, gaps": Case(9, 250, 3, 128, 16, 160, gaps=True),
    "shared memory for two tiles only": Case(6, 400, 64, 512, 64, 330),
}
# Deterministic sums or not, and whether neighbouring queries share a list of rows.
ARMS = [
    (name, deterministic, united)
    for name, case in HOPPER.items()
    for deterministic in (False, True)
    for united in ([False] if case.H > 32 else [False, True] if case.H == 16 else [True])
]


def exact(case: Case, problem: Problem) -> tuple[Attended, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and gradients in float64, on the problem's device."""
    query, row = (x.double().requires_grad_() for x in (problem.query_THC, problem.row_SC))
    gathered = row[problem.index_TK.clamp(min=0).long()]
    score = torch.einsum("thc,tkc->thk", query, gathered) * problem.scale
    missing = (problem.index_TK < 0).unsqueeze(1)
    score = score.masked_fill(missing, float("-inf"))
    lse = score.logsumexp(-1)
    empty = missing.all(-1)
    prob = torch.exp(score - torch.where(empty, 0.0, lse).unsqueeze(-1))
    out = torch.einsum("thk,tkv->thv", prob, gathered[..., : case.V])
    grad = case.grad(problem.query_THC.dtype, problem.query_THC.device.type).double()
    dquery, drow = torch.autograd.grad(out, (query, row), grad)
    lse = torch.where(empty, float("inf"), lse)
    return Attended(out.detach(), lse.detach()), dquery, drow


def main(file: str) -> None:
    from paddock.kernels.sparse_mla import gluon, gluon_backward, gluon_tiles, triton
    from tests.kernels.gluon_on_host import on_host

    _, forward_kernels, backward_kernels = on_host(gluon_tiles, gluon, gluon_backward)
    found = {}
    for name, case in PLAIN.items():
        problem, grad = case.problem(), case.grad()
        attended = triton.forward(problem)
        for fixed in (False, True):
            grads = triton.backward(problem, attended, grad, deterministic=fixed)
            found[name, fixed] = (attended.out_THV, attended.lse_TH, *grads)
    for name, deterministic, united in ARMS:
        problem, grad = HOPPER[name].problem(), HOPPER[name].grad()
        attended = forward_kernels.forward(problem, united=united)
        options = {"deterministic": deterministic, "united": united}
        grads = backward_kernels.backward(problem, attended, grad, **options)
        found[name, deterministic, united] = (attended.out_THV, attended.lse_TH, *grads)
    for neighbours in (2, 8):
        index = PLAIN["gaps"].problem().index_TK
        found["union", neighbours] = (index, *triton.unions(index, 200, neighbours))
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
