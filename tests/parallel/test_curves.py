"""However a run is shared out, it learns what one process learns."""

from itertools import count

import pytest

from paddock.data import CorpusSettings, ReasoningSource, StreamSettings
from paddock.model.config import ExpertSettings
from paddock.train.settings import (
    EvalSettings,
    MachineSettings,
    OptimSettings,
    ParallelSettings,
)
from tests.parallel.ranks import curve, lines, on_ranks, raise_network
from tests.train.tiny import network_folder, run_in, settings

# Documents several times longer than the eight keys that sparse attention keeps, as many tokens in
# all as no number of ranks divides.
CHAINS = CorpusSettings(
    sources=(ReasoningSource(name="chains", family="chains", count=200),), held_out=0.05
)
BASE = {
    "steps": 3,
    "corpus": CHAINS,
    "optim": OptimSettings(lr=3e-3, warmup=0.1),
    "evaluate": EvalSettings(every=2, tokens=500),
}
VARIANTS = {
    "sparse": {"stage": "sparse"},
    "adamw": {"optim": OptimSettings(kind="adamw", lr=3e-3, warmup=0.1)},
    "warmup": {"stage": "warmup"},
    # Ranks run out of micro-batches at different times; layers gather twice.
    "lean": {
        "steps": 2,
        "stage": "sparse",
        "machine": MachineSettings(micro_tokens=100, recompute=True),
    },
}


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Trains a variant on a mesh and returns its run; a single process does each only once."""
    folder = tmp_path_factory.mktemp("curves")
    start = network_folder(folder / "born", moe=ExpertSettings(experts=8, active=2, inner=16))
    stream = StreamSettings(mode="rows", context=64, batch_tokens=320)
    numbers, alone = count(), {}

    def one_run(variant, sizes):
        chosen = {**BASE, "stream": stream, **VARIANTS[variant]}
        chosen = settings(start, parallel=ParallelSettings(**sizes), **chosen)
        run = run_in(folder / f"run-{next(numbers)}", chosen)
        ranks = chosen.parallel.data * chosen.parallel.expert * chosen.parallel.context
        on_ranks(ranks, raise_network, run)
        return run

    def train(variant, sizes):
        if variant not in alone:
            alone[variant] = one_run(variant, {})
        return alone[variant], one_run(variant, sizes)

    return train


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("sparse", {"data": 2}),
        ("sparse", {"expert": 2}),
        ("sparse", {"context": 2}),
        ("sparse", {"data": 2, "expert": 2}),
        ("sparse", {"data": 2, "context": 2}),
        ("adamw", {"expert": 2}),
        ("warmup", {"context": 2}),
        ("lean", {"expert": 2, "context": 2}),
    ],
)
def test_many_processes_have_the_curve_of_one(raised, variant, sizes):
    one, many = raised(variant, sizes)
    parts = ["indexer"] if variant == "warmup" else ["loss", "mtp", "balance"]
    for part in (*parts, "grad_norm", "imbalance", "tokens"):
        assert curve(many, part) == pytest.approx(curve(one, part), abs=1e-5), part
    assert held_out(many) == pytest.approx(held_out(one), abs=1e-5)


def held_out(run):
    return [line["held_out"] for line in lines(run) if "held_out" in line]
