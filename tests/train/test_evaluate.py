import math
from collections import Counter

import pytest
import torch

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.data import Corpus, LongContextExample, Tokenizer, corpus_key
from paddock.data.reasoning import ReasoningSource
from paddock.journal import follow
from paddock.model import AttentionMetadata, AuxRequest
from paddock.train import train
from paddock.train.evaluate import (
    iter_validation_batches,
    measure_indexer_recall,
    measure_mtp_acceptance,
    needle_recall,
    unigram_entropy,
    validation_loss,
)
from paddock.train.micro_batch import MicroBatch
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
            "held_out_fraction": 0.2,
        },
        optim={"lr": 1e-2, "warmup_ratio": 0.05},
        checkpoint={"every": 80},
    )
    run = run_in(folder / "run", chosen)
    train(run, log=lambda _: None, on_update=lambda _: None)
    tokenizer = Tokenizer.load(run.folder / "tokenizer")
    corpus = Corpus(run.corpora_dir / corpus_key(chosen.corpus, tokenizer), tokenizer=tokenizer)
    return load_pretrained(latest_model(run.folder)), corpus, tokenizer


def test_training_beats_knowing_how_frequent_each_token_is(raised):
    network, corpus, tokenizer = raised
    found = validation_loss(network, corpus, dense=True, context=32, tokens=2000)
    loss = found.loss
    assert min(found.by_source.values()) <= loss <= max(found.by_source.values())
    entropy = unigram_entropy(corpus, tokenizer.vocab_size)
    assert loss < entropy < math.log(tokenizer.vocab_size)
    newborn = born(network.config)
    assert validation_loss(newborn, corpus, dense=True, context=32, tokens=2000).loss > entropy


def test_a_little_held_out_text_is_a_little_of_every_source(tmp_path):
    """And not the first source alone, however much there is of it."""
    families = ("chains", "records", "lookups", "facts")
    chosen = settings(
        network_folder(tmp_path / "born"),
        steps=2,
        corpus={
            "sources": tuple(
                ReasoningSource(name=name, family=name, count=400 * (4 - place))
                for place, name in enumerate(families)
            ),
            "held_out_fraction": 0.2,
        },
        validation={"every": 1, "tokens": 600},
    )
    run = run_in(tmp_path / "run", chosen)
    train(run, log=lambda _: None, on_update=lambda _: None)
    tokenizer = Tokenizer.load(run.folder / "tokenizer")
    corpus = Corpus(run.corpora_dir / corpus_key(chosen.corpus, tokenizer), tokenizer=tokenizer)
    network = load_pretrained(latest_model(run.folder))
    read = Counter()
    for name, batch in iter_validation_batches(corpus, network, context=32, tokens=600):
        read[name] += len(batch.token_T)
    assert [*read] == ["chains", "records", "lookups"]  # of facts nothing can be held out
    assert all(200 <= tokens < 400 for tokens in read.values())
    found = validation_loss(network, corpus, dense=True, context=32, tokens=600)
    events = [event for event, _ in follow(run.folder / "events.jsonl")]
    (told,) = [e["loss"] for e in events if e["kind"] == "validation" and e["step"] == 2]
    assert told == pytest.approx(found.by_source)


@torch.no_grad()
def test_a_draft_is_kept_if_the_network_would_have_said_it_and_all_before_it_were(raised):
    network, corpus, _ = raised
    tries, hits = [0, 0, 0], [0, 0, 0]
    for _, batch in iter_validation_batches(corpus, network, context=32, tokens=300):
        for span in batch.attn_metadata.spans:
            ids = batch.token_T[span.query_slice]
            layout = AttentionMetadata.packed([len(ids)])
            ask = AuxRequest(dense=True)
            hidden = network(ids, layout, aux=ask).hidden_TD
            said = network.head(hidden).argmax(-1)
            ahead = network.mtp_forward(hidden, ids, network.make_context(layout, aux=ask), 3)
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
    rates = measure_mtp_acceptance(network, corpus, depths=3, context=32, tokens=300)
    assert tries[0] > 20
    assert rates == [hit / max(1, tried) for hit, tried in zip(hits, tries, strict=True)]


@torch.no_grad()
def says(network, ids, count, *, dense):
    """The next `count` tokens, one document and one token at a time."""
    ids = list(ids)
    for _ in range(count):
        layout = AttentionMetadata.packed([len(ids)])
        hidden = network(torch.tensor(ids), layout, aux=AuxRequest(dense=dense)).hidden_TD
        ids.append(int(network.head(hidden[-1]).argmax()))
    return ids[-count:]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("gap", [" ", "\n"])
def test_a_needle_counts_if_and_only_if_the_network_says_it_next(raised, dense, gap):
    """Whatever the network says behind a question is made the right answer of one task and the
    wrong answer of another, so the share found is known beforehand."""
    network, _, tokenizer = raised
    begin = [tokenizer.token_to_id("[gMASK]"), tokenizer.token_to_id("<sop>")]
    tasks, right = [], 0
    for number in range(30):
        text = " ".join(f"{number + i} add {i} is {(number + 2 * i) % 10} ." for i in range(8))
        prompt = tokenizer.encode(f"{text}{gap}3 add{gap.strip(' ')}", specials=False)
        [said] = says(network, begin + prompt, 1, dense=dense)
        word = tokenizer.decode([said]).strip()
        for answer in (word, "is" if word != "is" else "add"):
            answer = answer if gap == " " else f" {answer}"  # its words carry a space
            tasks.append(
                LongContextExample(text=text, question="3 add", answers=(answer,), separator=gap)
            )
        whole = tokenizer.encode(tasks[-2].to_text(), specials=False)
        right += whole == [*prompt, said]  # the answer is the very token that was said
    assert right > 10
    found = needle_recall(network, tokenizer, tasks, begin=begin, dense=dense)
    assert found == right / len(tasks)


def test_of_several_answers_each_counts(raised):
    network, _, tokenizer = raised
    text, question = "look oak . is 3 .", "3 add 4 is 7 , 5 add"
    prompt = tokenizer.encode(f"{text} {question}", specials=False)
    [said] = says(network, prompt, 1, dense=True)
    word = tokenizer.decode([said]).strip()
    second = says(
        network,
        tokenizer.encode(f"{text} {question} {word} ,", specials=False),
        1,
        dense=True,
    )
    wrong = "is" if tokenizer.decode(second).strip() != "is" else "add"
    task = LongContextExample(text=text, question=question, answers=(word, wrong), separator=" ")
    assert needle_recall(network, tokenizer, [task], begin=[], dense=True) == 0.5


def test_keeping_every_key_keeps_all_the_mass_and_few_keep_less():
    token_T = tokens(40)
    trained_T = torch.ones(40, dtype=torch.bool)
    batch = MicroBatch(token_T, trained_T, AttentionMetadata.packed([40]))
    few = measure_indexer_recall(born(latent_config()), batch)
    assert [found.layer for found in few] == [0, 1, 2, 3]
    assert all(0.1 < found.mass < 0.95 for found in few)
    nearly = latent_config(indexer={"heads": 2, "dim": 8, "topk": 39, "layers": ("full",) * 4})
    assert all(found.mass > 0.9 for found in measure_indexer_recall(born(nearly), batch))
