"""Dialogues shared out over processes are learnt as by one, marks and weights included."""

import json

import pytest

from paddock.data import (
    CorpusSettings,
    DemonstrationSource,
    DialogueSource,
    StreamSettings,
    TokenizerSettings,
    dialogue_json,
)
from paddock.train.settings import LossSettings, ParallelSettings
from tests.parallel.ranks import curve, on_ranks, raise_network
from tests.train.tiny import network_folder, run_in, settings


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A network, and dialogues of which every other counts a quarter."""
    folder = tmp_path_factory.mktemp("ranks")
    shown = DemonstrationSource(
        name="s", world="nano-chain", count=40, slips=0.5, tasks=(1, 2), thinking={"preserved": 1.0}
    )
    with (folder / "talk.jsonl").open("w") as file:
        for i, dialogue in enumerate(shown.dialogues()):
            weight = {"weight": 1.0 if i % 2 else 0.25}
            file.write(json.dumps(dialogue_json(dialogue) | weight) + "\n")
    network_folder(folder / "born", vocab=700)
    return folder


def learnt(home, name, **sizes):
    talk = DialogueSource(name="talk", path=str(home / "talk.jsonl"))
    chosen = settings(
        home / "born",
        stage="sft",
        steps=2,
        tokenizer=TokenizerSettings(vocab=700, splitting="words"),
        corpus=CorpusSettings(sources=(talk,), held_out=0.1),
        stream=StreamSettings(mode="best_fit", context=128, batch_tokens=256, whole=True),
        loss=LossSettings(mtp_depths=1),
        parallel=ParallelSettings(**sizes),
    )
    run = run_in(home / name, chosen)
    on_ranks(chosen.parallel.ranks, raise_network, run)
    return run


def test_two_ranks_have_the_curve_of_one(home):
    one = learnt(home, "one")
    for name, sizes in (("context", {"context": 2}), ("data", {"data": 2})):
        many = learnt(home, name, **sizes)
        for part in ("loss", "mtp", "grad_norm"):
            assert curve(many, part) == pytest.approx(curve(one, part), abs=1e-5), (name, part)
