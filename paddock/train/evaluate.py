"""What a base model can do: predict text it never saw, draft tokens ahead, find what it was told.

T tokens, A tokens of an answer, S keys, Q sparse queries, K kept keys, E experts, H heads, D width.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.data import Corpus, LongContextExample, Tokenizer, iterate_once
from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.model import AttentionMetadata, AuxRequest, DecoderLayer, TopKSelection, Transformer
from paddock.model import attention as model_attention
from paddock.train.micro_batch import MicroBatch, iter_micro_batches


def iter_validation_batches(
    corpus: Corpus, network: Transformer, *, context: int, tokens: int
) -> Iterator[tuple[str, MicroBatch]]:
    """About `tokens` of held-out text, as much of each source that has so much, and where it is
    from."""
    sources = {name: found for name, found in corpus.split("held_out").items() if len(found)}
    device = network.embed.weight.device
    for name, documents in sources.items():
        left = tokens // len(sources)
        size = max(context, min(left, 8192))
        for batch in iterate_once({name: documents}, context=context, batch_tokens=size):
            for part in iter_micro_batches(batch, device):
                yield name, part
            left -= len(batch.token_T)
            if left <= 0:
                break


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Nats a token of text that nobody learnt: of all of it, and of each source."""

    loss: float
    by_source: dict[str, float]


@torch.no_grad()
def validation_loss(
    network: Transformer, corpus: Corpus, *, dense: bool, context: int, tokens: int
) -> ValidationLoss | None:
    """Over about `tokens` of held-out text; None if nothing is held out."""
    total: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for name, batch in iter_validation_batches(corpus, network, context=context, tokens=tokens):
        hidden_TD = network(
            batch.token_T, batch.attn_metadata, aux=AuxRequest(dense=dense)
        ).hidden_TD
        target_T = batch.targets(1)
        total[name] += float(linear_cross_entropy(hidden_TD, network.head.weight, target_T).sum())
        count[name] += int((target_T >= 0).sum())
    if not count.total():
        return None
    by_source = {name: total[name] / count[name] for name in count if count[name]}
    return ValidationLoss(sum(total.values()) / count.total(), by_source)


def unigram_entropy(corpus: Corpus, vocab: int, *, most: int = 20_000_000) -> float:
    """Nats a token of knowing nothing but how frequent each token is, in at most about `most`
    tokens of each source."""
    count_V = torch.zeros(vocab, dtype=torch.float64)
    for documents in corpus.split("train").values():
        seen = 0
        for number in range(len(documents)):
            ids = torch.from_numpy(
                documents.token_ids(number, 0, documents.length(number)).astype("int64")
            )
            count_V += ids.bincount(minlength=vocab)
            seen += len(ids)
            if seen >= most:
                break
    share_V = count_V[count_V > 0] / count_V.sum()
    return float(-(share_V * share_V.log()).sum())


@torch.no_grad()
def measure_mtp_acceptance(
    network: Transformer, corpus: Corpus, *, depths: int, context: int, tokens: int
) -> list[float]:
    """How often a draft at depth 1, 2, ... is the token the network itself would say there.

    Greedy on both sides, over held-out text; a draft further ahead counts only where all nearer
    ones were right, as in speculative decoding. Depth d divides by the drafts still alive at d - 1.
    """
    batches = iter_validation_batches(corpus, network, context=context, tokens=tokens)
    return mtp_acceptance_rates(network, (batch for _, batch in batches), depths)


@torch.no_grad()
def mtp_acceptance_rates(
    network: Transformer, batches: Iterable[MicroBatch], depths: int
) -> list[float]:
    """The same, over any text."""
    hits, tries = [0] * depths, [0] * depths
    for batch in batches:
        step = network.make_context(batch.attn_metadata, aux=AuxRequest(dense=True))
        hidden_TD = network(
            batch.token_T, batch.attn_metadata, aux=AuxRequest(dense=True)
        ).hidden_TD
        said_T = network.head(hidden_TD).argmax(-1)
        # The text must have gone the network's own way so far, or its next words say nothing.
        alive_T = said_T == batch.targets(1)
        ahead = network.mtp_forward(hidden_TD, batch.token_T, step, depths)
        for depth, (state_TD, _) in enumerate(ahead, start=1):
            wanted_T = _later(said_T, batch.attn_metadata, depth)
            alive_T = alive_T & (wanted_T >= 0)
            right_T = alive_T & (network.head(state_TD).argmax(-1) == wanted_T)
            tries[depth - 1] += int(alive_T.sum())
            hits[depth - 1] += int(right_T.sum())
            alive_T = right_T & (wanted_T == batch.targets(depth + 1))
    return [hit / max(1, tried) for hit, tried in zip(hits, tries, strict=True)]


def _later(value_T: Tensor, layout: AttentionMetadata, ahead: int) -> Tensor:
    """What stands `ahead` places on in the same document; -1 where it has ended."""
    later_T = torch.full_like(value_T, -1)
    for span in layout.spans:
        start, stop = span.query, span.query + span.queries
        if span.queries > ahead:
            later_T[start : stop - ahead] = value_T[start + ahead : stop]
    return later_T


@torch.no_grad()
def needle_recall(
    network: Transformer,
    tokenizer: Tokenizer,
    tasks: Iterable[LongContextExample],
    *,
    begin: list[int],
    dense: bool,
) -> float:
    """The share of answers the network says, greedy, right behind the question; of several, each
    behind the right ones before it."""
    device = network.embed.weight.device
    score, count = 0.0, 0
    for some in _batched((encode_question(task, tokenizer, begin) for task in tasks), tokens=8192):
        token_T = torch.tensor([token for asked in some for token in asked.ids], device=device)
        layout = AttentionMetadata.packed([len(asked.ids) for asked in some], device)
        hidden_TD = network(token_T, layout, aux=AuxRequest(dense=dense)).hidden_TD
        for asked, span in zip(some, layout.spans, strict=True):
            # What a state says is the token behind it.
            places = [slice(span.query + a.start, span.query + a.stop) for a in asked.answers]
            said = [
                network.head(hidden_TD[place.start - 1 : place.stop - 1]).argmax(-1)
                for place in places
            ]
            right = sum(torch.equal(s_A, token_T[p]) for s_A, p in zip(said, places, strict=True))
            score, count = score + right / len(places), count + 1
    return score / count


@dataclass(frozen=True, slots=True)
class NeedleQuestion:
    """A long document with its question answered, and where the answers lie in it."""

    ids: list[int]
    answers: list[slice]


def encode_question(
    task: LongContextExample, tokenizer: Tokenizer, begin: list[int]
) -> NeedleQuestion:
    """As training saw such documents: a space before the answer belongs to the answer's token, so
    the question cannot be encoded apart from it."""
    ids = tokenizer.encode(task.to_text(), specials=False)

    def reach(text: str) -> int:
        """How many of the document's tokens lie within its beginning `text`."""
        own = tokenizer.encode(text, specials=False)
        apart = (i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b)
        return len(begin) + next(apart, min(len(own), len(ids)))

    before = f"{task.text}{task.separator}{task.question}{task.separator}"
    answers = []
    for answer in task.answers:
        answers.append(slice(reach(before), reach(before + answer)))
        before += f"{answer} , "
    return NeedleQuestion(begin + ids, answers)


def _batched(every: Iterable[NeedleQuestion], *, tokens: int) -> Iterator[list[NeedleQuestion]]:
    """At most `tokens` at a time, or one document that is longer."""
    some: list[NeedleQuestion] = []
    for asked in every:
        if some and sum(len(other.ids) for other in some) + len(asked.ids) > tokens:
            yield some
            some = []
        some.append(asked)
    if some:
        yield some


@dataclass(frozen=True, slots=True)
class IndexerRecall:
    """Of one layer: the share of dense attention's mass that falls on the kept keys."""

    layer: int
    mass: float


@torch.no_grad()
def measure_indexer_recall(network: Transformer, batch: MicroBatch) -> list[IndexerRecall]:
    """How much of where each layer would look, it may still look at; queries that are cut only."""
    step = network.make_context(batch.attn_metadata, aux=AuxRequest(dense=True))
    x_TD = network.embed(batch.token_T)
    selection, found = None, []
    for number, layer in enumerate(network.layers):
        assert isinstance(layer, DecoderLayer)
        attention = layer.attention
        normed_TD = layer.attention_norm(x_TD)
        if isinstance(attention, model_attention.DSA) and attention.indexer is not None:
            projected = attention.project(normed_TD, step)
            index = attention.index_inputs(normed_TD, projected, step)
            assert index is not None
            _, long = model_attention.split_dense_sparse(batch.attn_metadata.spans, attention.topk)
            kept = model_attention.select_topk(index, long, attention.topk)
            if len(kept.query_Q):
                found.append(
                    IndexerRecall(number, _mass(attention, projected, kept, batch.attn_metadata))
                )
        x_TD, selection, _ = layer(x_TD, step, selection)
    return found


def _mass(
    attention: model_attention.DSA,
    projected: model_attention.MLAProjections,
    kept: TopKSelection,
    layout: AttentionMetadata,
) -> float:
    query_QHC = attention.absorb(projected.query_THD[kept.query_Q])
    total = 0.0
    spans = {q: span for span in layout.spans for q in range(span.query, span.query + span.queries)}
    for row, q in enumerate(kept.query_Q.tolist()):
        span = spans[q]
        last = span.key + span.past + (q - span.query) + 1
        score_HS = attention.scale * query_QHC[row] @ projected.row_TC[span.key : last].mT
        mass_S = score_HS.softmax(-1).mean(0)
        total += float(mass_S[kept.index_QK[row].long() - span.key].sum())
    return total / len(kept.query_Q)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrace:
    """What one layer did with a row: the keys its sparse queries kept, where it chose them itself,
    and how many tokens each of its experts received."""

    layer: int
    selection: TopKSelection | None
    topk: int
    load_E: Tensor | None


@torch.no_grad()
def trace_layers(network: Transformer, token_T: Tensor) -> list[LayerTrace]:
    """Where every layer looks in one document, and whom it asks; layers that do neither are left
    out. A layer without an indexer shares the choice of another, and has none of its own."""
    layout = AttentionMetadata.packed([len(token_T)], token_T.device)
    notes = network(token_T, layout, aux=AuxRequest(routing_and_topk=True)).aux
    found = []
    for number, (layer, note) in enumerate(zip(network.layers, notes, strict=True)):
        assert isinstance(layer, DecoderLayer)
        attention = layer.attention
        chooses = isinstance(attention, model_attention.DSA) and attention.indexer is not None
        topk = attention.topk if isinstance(attention, model_attention.DSA) else 0
        selection = note.selection if chooses else None
        if selection is not None or note.load_E is not None:
            found.append(LayerTrace(number, selection, topk, note.expert_load_E))
    return found
