"""Cases of the indexer's KL loss, in float64 and in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.index_kl_cases FILE

Triton decides when it is imported whether it compiles or interprets, so interpreting needs a
separate process. T queries, S keys, H teacher heads, C row width, G index heads, D index dim,
K kept.
"""

import sys
from dataclasses import dataclass

import torch

from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, fused, reference
from paddock.kernels.spans import Span


@dataclass(frozen=True)
class Case:
    """`spans`, or None and `kept` keys of each of T queries; the first queries keep few."""

    T: int
    S: int
    spans: tuple[Span, ...] = ()
    kept: int = 0
    H: int = 3
    C: int = 20
    G: int = 3
    D: int = 12
    ties: bool = False  # duplicate keys, one zero key, and half of the queries are zero
    gaps: bool = False  # -1 between keys, not only after them
    budget: int = 1 << 30

    def sides(self, dtype=torch.float32, device="cpu"):
        """The same numbers on every device."""
        rng = torch.Generator().manual_seed(0)

        def drawn(*shape):
            return torch.randn(*shape, generator=rng)

        query, key, weight = (
            drawn(self.T, self.G, self.D),
            drawn(self.S, self.D),
            drawn(self.T, self.G),
        )
        if self.ties:
            key[1::2] = key[: self.S - 1 : 2]
            query[::2] = 0.0
            key[3] = 0.0
        # Scaled like real scores, so that neither distribution is uniform or on one key.
        index = IndexerInputs(query, key, weight * (self.G * self.D) ** -0.5)
        attention = drawn(self.T, self.H, self.C), drawn(self.S, self.C)
        query, key, weight, wide_query, row = (x.to(device, dtype) for x in (*index, *attention))
        # Head weights stay float32, as the indexer returns them.
        index = IndexerInputs(query, key, index.weight_TH.to(device))
        return index, IndexerTarget(wide_query, row, 2 * self.C**-0.5)

    def choice(self, device="cpu"):
        rng = torch.Generator().manual_seed(1)
        index = torch.full((self.T, self.kept), -1, dtype=torch.int32)
        lengths = (1, 0, 5, self.kept - 1)
        for t in range(self.T):
            count = min(lengths[t] if t < len(lengths) else self.kept, self.kept)
            index[t, :count] = torch.randperm(self.S, generator=rng)[:count].sort().values.int()
        if self.gaps:
            index[4:][torch.rand(index[4:].shape, generator=rng) < 0.2] = -1
        return index.to(device)


def packed(*documents: tuple[int, int]) -> tuple[Span, ...]:
    """Spans of packed documents, each given as (past, new tokens)."""
    spans, query, key = [], 0, 0
    for past, queries in documents:
        spans.append(Span(query, queries, key, past + queries))
        query, key = query + queries, key + past + queries
    return tuple(spans)


CASES = {
    "documents of many lengths": Case(
        T=178, S=241, spans=packed((0, 70), (0, 1), (3, 6), (60, 101))
    ),
    "one head of each": Case(T=20, S=20, spans=packed((0, 20)), H=1, G=1, D=5, C=3),
    "wide rows of eight heads": Case(T=30, S=300, spans=packed((270, 30)), H=8, C=150, G=8, D=40),
    "ties": Case(T=40, S=40, spans=packed((0, 40)), ties=True),
    "rows about a thousand keys long": Case(T=70, S=1060, spans=packed((990, 70))),
    "blocks of few queries": Case(T=260, S=260, spans=packed((0, 130), (0, 130)), budget=90_000),
    "queries and keys in no span": Case(T=30, S=50, spans=(Span(4, 10, 7, 12), Span(20, 9, 30, 9))),
    "documents that share keys": Case(T=30, S=20, spans=(Span(0, 12, 0, 20), Span(12, 18, 0, 18))),
    "kept": Case(T=9, S=90, kept=17),
    "kept of one head": Case(T=6, S=40, kept=5, H=1, G=1, D=5, C=3),
    "kept with gaps over tiles": Case(T=7, S=400, kept=300, H=5, C=70, G=5, D=20, gaps=True),
    "kept ties": Case(T=8, S=60, kept=30, ties=True),
    "one key is kept": Case(T=5, S=8, kept=1),
    "kept in chunks": Case(T=11, S=200, kept=130, budget=8_000),
}


def found(case: Case, dtype=torch.float32, device="cpu"):
    """Loss and gradients of the kernel for an upstream gradient of 3."""
    index, attention = case.sides(dtype, device)
    leaves = IndexerInputs(*(x.requires_grad_() for x in index))
    teacher = IndexerTarget(*(x.requires_grad_() for x in attention[:2]), attention.scale)
    if case.spans:
        loss = fused.index_kl(leaves, teacher, case.spans)
    else:
        loss = fused.index_kl_topk(leaves, teacher, case.choice(device))
    (3 * loss).backward()
    assert attention.query_THC.grad is None and attention.row_SC.grad is None
    return [loss.detach(), *(x.grad for x in leaves)]


def exact(case: Case, dtype=torch.float32, device="cpu"):
    """The same by the reference in float64, which needs a kept key for every query."""
    index, attention = case.sides(dtype, device)
    leaves = IndexerInputs(*(x.double().requires_grad_() for x in index))
    teacher = IndexerTarget(*(x.double() for x in attention[:2]), attention.scale)
    if case.spans:
        loss = reference.index_kl(leaves, teacher, case.spans)
    else:
        kept_TK = case.choice(device)
        some = (kept_TK >= 0).any(1)
        nonempty = IndexerInputs(leaves.query_THD[some], leaves.key_SD, leaves.weight_TH[some])
        teacher = teacher._replace(query_THC=teacher.query_THC[some])
        loss = reference.index_kl_topk(nonempty, teacher, kept_TK[some])
    (3 * loss).backward()
    return [loss.detach(), *(x.grad for x in leaves)]


def poisoned(rows, width, like, make=fused._rectangles):
    """NaN-filled scratch: nothing may be read before it is written."""
    return tuple(x.fill_(float("nan")) for x in make(rows, width, like))


def main(file: str) -> None:
    fused._rectangles = poisoned
    results = {}
    for name, case in CASES.items():
        fused.scratch_bytes = lambda _, case=case: case.budget
        results[name] = found(case)
    fused.scratch_bytes = lambda _: 1 << 30
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    results["whole numbers"] = found(CASES["kept with gaps over tiles"])
    with torch.no_grad():
        given = CASES["kept"].sides()
        results["no gradient"] = [fused.index_kl_topk(*given, CASES["kept"].choice())]
    torch.save(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
