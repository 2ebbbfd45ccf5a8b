"""Dialogues shared out over processes are learnt as by one, marks and weights included."""

import json

import pytest

from paddock.data import CorpusSettings, DataLoaderSettings, TokenizerSettings, dialogue_to_json
from paddock.data.dialogue_sources import DemonstrationSource, DialogueSource
from paddock.train.settings import AuxLossSettings, ComputeSettings, ParallelSettings
from tests.parallel.ranks import all_on_ranks, curve, raise_network
from tests.train.tiny import network_folder, run_in, settings


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A network, and dialogues of which every other counts a quarter."""
    folder = tmp_path_factory.mktemp("ranks")
    shown = DemonstrationSource(
        name="s",
        env="nano-chain",
        count=40,
        mistake_rate=0.5,
        tasks_per_dialogue=(1, 2),
        thinking={"preserved": 1.0},
    )
    with (folder / "talk.jsonl").open("w") as file:
        for i, dialogue in enumerate(shown.dialogues()):
            weight = {"weight": 1.0 if i % 2 else 0.25}
            file.write(json.dumps(dialogue_to_json(dialogue) | weight) + "\n")
    network_folder(folder / "born", vocab=700)
    return folder


def to_learn(home, name, dtype, **sizes):
    talk = DialogueSource(name="talk", path=str(home / "talk.jsonl"))
    chosen = settings(
        home / "born",
        stage="sft",
        steps=2,
        tokenizer=TokenizerSettings(vocab_size=700, pre_tokenizer="words"),
        corpus=CorpusSettings(sources=(talk,), held_out_fraction=0.1),
        dataloader=DataLoaderSettings(
            packing="best_fit", seq_len=128, batch_tokens=256, drop_overlong=True
        ),
        loss=AuxLossSettings(mtp_depths=1),
        compute=ComputeSettings(dtype=dtype),
        parallel=ParallelSettings(**sizes),
    )
    return run_in(home / f"{name}-{dtype}", chosen)


def learnt(runs):
    """One after the other in the same processes."""
    all_on_ranks(runs[0].settings.parallel.ranks, [(raise_network, run) for run in runs])
    return runs


def test_two_ranks_have_the_curve_of_one(home):
    apart = {"float32": 1e-5, "bfloat16": 0.05}
    alone = learnt([to_learn(home, "one", dtype) for dtype in apart])
    ways = {"context": {"context": 2}, "data": {"data": 2}}
    shared = [(name, dtype) for name in ways for dtype in apart]
    together = learnt([to_learn(home, name, dtype, **ways[name]) for name, dtype in shared])
    ones = dict(zip(apart, alone, strict=True))
    for (name, dtype), many in zip(shared, together, strict=True):
        for part in ("loss", "mtp_loss", "grad_norm"):
            one = pytest.approx(curve(ones[dtype], part), abs=apart[dtype])
            assert curve(many, part) == one, (name, dtype, part)
