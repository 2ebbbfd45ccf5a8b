import math

import pytest
import torch

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training import newest_model
from paddock.data import Corpus, LongTask, ReasoningSource, Tokenizer, corpus_key
from paddock.model import Ask, Layout
from paddock.train import train
from paddock.train.batch import TokenBatch
from paddock.train.evaluate import (
    acceptance,
    found_needles,
    greedy,
    held_out_batches,
    held_out_loss,
    recall,
    unigram_entropy,
)
from tests.model.networks import born, latent_config, tokens
from tests.train.tiny import network_folder, run_in, settings


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """A network that has learnt a little of chained sums, its corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("evaluate")
    chosen = settings(
        network_folder(folder / "born"),
        steps=80,
        corpus={
            "sources": (ReasoningSource(name="chains", family="chains", count=300),),
            "held_out": 0.2,
        },
        optim={"lr": 1e-2, "warmup": 0.05},
        keep={"every": 80},
    )
    run = run_in(folder / "run", chosen)
    train(run, say=lambda _: None, watch=lambda _: None)
    tokenizer = Tokenizer.load(run.folder / "tokenizer")
    corpus = Corpus(run.corpora / corpus_key(chosen.corpus, tokenizer), tokenizer=tokenizer)
    return load_pretrained(newest_model(run.folder)), corpus, tokenizer


def test_training_beats_knowing_how_frequent_each_token_is(raised):
    network, corpus, tokenizer = raised
    loss = held_out_loss(network, corpus, dense=True, context=32, tokens=2000)
    entropy = unigram_entropy(corpus, tokenizer.vocab_size)
    assert loss < entropy < math.log(tokenizer.vocab_size)
    newborn = born(network.config)
    assert held_out_loss(newborn, corpus, dense=True, context=32, tokens=2000) > entropy


@torch.no_grad()
def test_a_draft_is_kept_if_the_network_would_have_said_it_and_all_before_it_were(raised):
    network, corpus, _ = raised
    tries, hits = [0, 0, 0], [0, 0, 0]
    for batch in held_out_batches(corpus, network, context=32, tokens=300):
        for span in batch.layout.spans:
            ids = batch.token_T[span.query_slice]
            layout = Layout.packed([len(ids)])
            ask = Ask(dense=True)
            hidden = network(ids, layout, ask=ask).hidden_TD
            said = network.head(hidden).argmax(-1)
            ahead = network.look_ahead(hidden, ids, network.step(layout, ask=ask), 3)
            drafts = [network.head(state).argmax(-1) for state, _ in ahead]
            for t in range(len(ids) - 1):
                depth = 0
                while depth < 3 and t + depth + 1 < len(ids):
                    if said[t + depth] != ids[t + depth + 1]:
                        break  # the text left the network's way
                    tries[depth] += 1
                    if drafts[depth][t] != said[t + depth + 1]:
                        break
                    hits[depth] += 1
                    depth += 1
    rates = acceptance(network, corpus, depths=3, context=32, tokens=300)
    assert tries[0] > 20
    assert rates == [hit / max(1, tried) for hit, tried in zip(hits, tries, strict=True)]


@torch.no_grad()
def test_greedy_is_the_argmax_of_the_logits_each_time():
    network, ids = born(latent_config()), tokens(20).tolist()
    for _ in range(4):
        expected = int(network.logits(ids)[-1].argmax())
        assert greedy(network, ids, 1, dense=False) == [expected]
        ids.append(expected)
    assert greedy(network, ids[:20], 4, dense=False) == ids[20:]


def test_an_answer_counts_only_if_the_network_says_it(raised):
    network, _, tokenizer = raised
    task = LongTask(text="look oak . is 3 .", question="oak", answers=("3",), gap=" ")
    prompt = tokenizer.encode("look oak . is 3 . oak ", specials=False)
    said = tokenizer.decode(greedy(network, prompt, 2, dense=True))
    found = found_needles(network, tokenizer, [task], begin=[], dense=True)
    assert found == float("3" in said)


def test_keeping_every_key_keeps_all_the_mass_and_few_keep_less():
    token_T = tokens(40)
    trained_T = torch.ones(40, dtype=torch.bool)
    batch = TokenBatch(token_T, trained_T, Layout.packed([40]))
    few = recall(born(latent_config()), batch)
    assert [found.layer for found in few] == [0, 1, 2, 3]
    assert all(0.1 < found.mass < 0.95 for found in few)
    nearly = latent_config(indexer={"heads": 2, "dim": 8, "topk": 39, "layers": ("full",) * 4})
    assert all(found.mass > 0.9 for found in recall(born(nearly), batch))
