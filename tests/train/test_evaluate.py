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
from tests.model.networks import build_network, latent_config, tokens
from tests.train.tiny import network_folder, run_in, settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network trained briefly on chained sums, its corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("evaluate")
    chosen = settings(
        network_folder(folder / "init"),
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


def test_training_beats_the_unigram_entropy(trained):
    network, corpus, tokenizer = trained
    found = validation_loss(network, corpus, dense=True, context=32, tokens=2000)
    loss = found.loss
    assert min(found.by_source.values()) <= loss <= max(found.by_source.values())
    entropy = unigram_entropy(corpus, tokenizer.vocab_size)
    assert loss < entropy < math.log(tokenizer.vocab_size)
    untrained = build_network(network.config)
    assert validation_loss(untrained, corpus, dense=True, context=32, tokens=2000).loss > entropy


def test_few_validation_tokens_cover_every_source(tmp_path):
    """Not only the first source, however large it is."""
    families = ("chains", "records", "lookups", "facts")
    chosen = settings(
        network_folder(tmp_path / "init"),
        steps=2,
        corpus={
            "sources": tuple(
                ReasoningSource(name=name, family=name, count=400 * (4 - position))
                for position, name in enumerate(families)
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
    assert [*read] == ["chains", "records", "lookups"]  # facts have no held-out part
    assert all(200 <= tokens < 400 for tokens in read.values())
    found = validation_loss(network, corpus, dense=True, context=32, tokens=600)
    events = [event for event, _ in follow(run.folder / "events.jsonl")]
    (logged,) = [e["loss"] for e in events if e["kind"] == "validation" and e["step"] == 2]
    assert logged == pytest.approx(found.by_source)


@torch.no_grad()
def test_a_draft_is_accepted_if_it_and_all_before_it_match_greedy_decoding(trained):
    network, corpus, _ = trained
    tries, hits = [0, 0, 0], [0, 0, 0]
    for _, batch in iter_validation_batches(corpus, network, context=32, tokens=300):
        for span in batch.attn_metadata.spans:
            ids = batch.token_T[span.query_slice]
            layout = AttentionMetadata.packed([len(ids)])
            aux_request = AuxRequest(dense=True)
            hidden = network(ids, layout, aux=aux_request).hidden_TD
            predicted = network.head(hidden).argmax(-1)
            ahead = network.mtp_forward(
                hidden, ids, network.make_context(layout, aux=aux_request), 3
            )
            drafts = [network.head(state).argmax(-1) for state, _ in ahead]
            for t in range(len(ids) - 1):
                depth = 0
                while depth < 3 and t + depth + 1 < len(ids):
                    if predicted[t + depth] != ids[t + depth + 1]:
                        break  # the text differs from greedy decoding
                    tries[depth] += 1
                    if drafts[depth][t] != predicted[t + depth + 1]:
                        break
                    hits[depth] += 1
                    depth += 1
    rates = measure_mtp_acceptance(network, corpus, depths=3, context=32, tokens=300)
    assert tries[0] > 20
    assert rates == [hit / max(1, tried) for hit, tried in zip(hits, tries, strict=True)]


@torch.no_grad()
def greedy_tokens(network, ids, count, *, dense):
    """The next `count` tokens, one document and one token at a time."""
    ids = list(ids)
    for _ in range(count):
        layout = AttentionMetadata.packed([len(ids)])
        hidden = network(torch.tensor(ids), layout, aux=AuxRequest(dense=dense)).hidden_TD
        ids.append(int(network.head(hidden[-1]).argmax()))
    return ids[-count:]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("gap", [" ", "\n"])
def test_needle_recall_counts_exactly_the_greedy_answers(trained, dense, gap):
    """The greedy token after a question is the right answer of one task and the wrong answer of
    another, so the expected recall is known."""
    network, _, tokenizer = trained
    begin = [tokenizer.token_to_id("[gMASK]"), tokenizer.token_to_id("<sop>")]
    tasks, right = [], 0
    for number in range(30):
        text = " ".join(f"{number + i} add {i} is {(number + 2 * i) % 10} ." for i in range(8))
        prompt = tokenizer.encode(f"{text}{gap}3 add{gap.strip(' ')}", specials=False)
        [predicted] = greedy_tokens(network, begin + prompt, 1, dense=dense)
        word = tokenizer.decode([predicted]).strip()
        for answer in (word, "is" if word != "is" else "add"):
            answer = answer if gap == " " else f" {answer}"  # its words include a space
            tasks.append(
                LongContextExample(text=text, question="3 add", answers=(answer,), separator=gap)
            )
        whole = tokenizer.encode(tasks[-2].to_text(), specials=False)
        right += whole == [*prompt, predicted]  # the answer is exactly the predicted token
    assert right > 10
    found = needle_recall(network, tokenizer, tasks, begin=begin, dense=dense)
    assert found == right / len(tasks)


def test_needle_recall_counts_each_answer(trained):
    network, _, tokenizer = trained
    text, question = "look oak . is 3 .", "3 add 4 is 7 , 5 add"
    prompt = tokenizer.encode(f"{text} {question}", specials=False)
    [predicted] = greedy_tokens(network, prompt, 1, dense=True)
    word = tokenizer.decode([predicted]).strip()
    second = greedy_tokens(
        network,
        tokenizer.encode(f"{text} {question} {word} ,", specials=False),
        1,
        dense=True,
    )
    wrong = "is" if tokenizer.decode(second).strip() != "is" else "add"
    task = LongContextExample(text=text, question=question, answers=(word, wrong), separator=" ")
    assert needle_recall(network, tokenizer, [task], begin=[], dense=True) == 0.5


def test_indexer_recall_grows_with_topk():
    token_T = tokens(40)
    trained_T = torch.ones(40, dtype=torch.bool)
    batch = MicroBatch(token_T, trained_T, AttentionMetadata.packed([40]))
    few = measure_indexer_recall(build_network(latent_config()), batch)
    assert [found.layer for found in few] == [0, 1, 2, 3]
    assert all(0.1 < found.mass < 0.95 for found in few)
    nearly = latent_config(indexer={"heads": 2, "dim": 8, "topk": 39, "layers": ("full",) * 4})
    assert all(found.mass > 0.9 for found in measure_indexer_recall(build_network(nearly), batch))
