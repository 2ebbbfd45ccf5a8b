"""Evaluation of a base model: validation loss, MTP acceptance, needle recall, indexer recall.

T tokens, A tokens of an answer, S keys, Q sparse queries, K selected keys, E experts, H heads,
D width.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from paddock.data import Corpus, LongContextExample, PackedBatch, Tokenizer, iterate_once
from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.model import AttentionMetadata, AuxRequest, DecoderLayer, TopKSelection, Transformer
from paddock.model import attention as model_attention
from paddock.train.micro_batch import MicroBatch, iter_micro_batches


def iter_validation_batches(
    corpus: Corpus, network: Transformer, *, context: int, tokens: int
) -> Iterator[tuple[str, MicroBatch]]:
    """Yield (source, micro batch) of about `tokens` of the validation split.

    Each source contributes the same number of tokens, or all it has.
    """
    sources = {name: split for name, split in corpus.split("held_out").items() if len(split)}
    device = network.embed.weight.device
    for name, documents in sources.items():
        remaining = tokens // len(sources)
        size = max(context, min(remaining, 8192))
        for batch in iterate_once({name: documents}, context=context, batch_tokens=size):
            for part in iter_micro_batches(batch, device):
                yield name, part
            remaining -= len(batch.token_T)
            if remaining <= 0:
                break


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Validation loss in nats/token, overall and by source."""

    loss: float
    by_source: dict[str, float]


@torch.no_grad()
def validation_loss(
    network: Transformer, corpus: Corpus, *, dense: bool, context: int, tokens: int
) -> ValidationLoss | None:
    """Loss over about `tokens` of the validation split; None if it is empty."""
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


def unigram_entropy(corpus: Corpus, vocab: int, *, max_tokens: int = 20_000_000) -> float:
    """Entropy of the token frequencies in nats/token: the loss of a unigram model.

    Counts about `max_tokens` of each source at most.
    """
    count_V = torch.zeros(vocab, dtype=torch.float64)
    for documents in corpus.split("train").values():
        seen = 0
        for number in range(len(documents)):
            ids = torch.from_numpy(
                documents.token_ids(number, 0, documents.length(number)).astype("int64")
            )
            count_V += ids.bincount(minlength=vocab)
            seen += len(ids)
            if seen >= max_tokens:
                break
    probability_V = count_V[count_V > 0] / count_V.sum()
    return float(-(probability_V * probability_V.log()).sum())


@torch.no_grad()
def measure_mtp_acceptance(
    network: Transformer, corpus: Corpus, *, depths: int, context: int, tokens: int
) -> list[float]:
    """MTP acceptance rate at depth 1, 2, ... on the validation split, with greedy decoding.

    A draft is accepted if it is the token the model itself would decode there. As in speculative
    decoding, a draft counts only where all drafts at smaller depths were accepted: the rate at
    depth d is conditional on acceptance at depth d - 1.
    """
    batches = iter_validation_batches(corpus, network, context=context, tokens=tokens)
    return mtp_acceptance_rates(network, (batch for _, batch in batches), depths)


@torch.no_grad()
def mtp_acceptance_rates(
    network: Transformer, batches: Iterable[MicroBatch], depths: int, *, dense: bool = True
) -> list[float]:
    """As `measure_mtp_acceptance`, over the targets of given micro batches."""
    accepted, drafted = [0] * depths, [0] * depths
    for batch in batches:
        step = network.make_context(batch.attn_metadata, aux=AuxRequest(dense=dense))
        hidden_TD = network(
            batch.token_T, batch.attn_metadata, aux=AuxRequest(dense=dense)
        ).hidden_TD
        decoded_T = network.head(hidden_TD).argmax(-1)
        # Only where the text is what the model would have decoded: elsewhere its later predictions
        # are conditioned on another token than the draft.
        alive_T = decoded_T == batch.targets(1)
        ahead = network.mtp_forward(hidden_TD, batch.token_T, step, depths)
        for depth, (state_TD, _) in enumerate(ahead, start=1):
            wanted_T = _shifted(decoded_T, batch.attn_metadata, depth)
            alive_T = alive_T & (wanted_T >= 0)
            right_T = alive_T & (network.head(state_TD).argmax(-1) == wanted_T)
            drafted[depth - 1] += int(alive_T.sum())
            accepted[depth - 1] += int(right_T.sum())
            alive_T = right_T & (wanted_T == batch.targets(depth + 1))
    return [hits / max(1, tries) for hits, tries in zip(accepted, drafted, strict=True)]


def accept_length(
    network: Transformer, batch: PackedBatch, *, micro_tokens: int | None = None
) -> float | None:
    """Tokens per decode step with a draft at every depth of the MTP layer, on the targets of a
    batch with greedy decoding; None without an MTP layer."""
    if network.config.mtp is None:
        return None
    micro_batches = iter_micro_batches(batch, network.embed.weight.device, micro_tokens)
    rates = mtp_acceptance_rates(network, micro_batches, network.config.mtp.depths, dense=False)
    return 1 + sum(accumulate(rates, mul))


def _shifted(value_T: Tensor, metadata: AttentionMetadata, ahead: int) -> Tensor:
    """The value `ahead` positions later in the same document; -1 behind its end."""
    shifted_T = torch.full_like(value_T, -1)
    for span in metadata.spans:
        start, stop = span.query, span.query + span.queries
        if span.queries > ahead:
            shifted_T[start : stop - ahead] = value_T[start + ahead : stop]
    return shifted_T


@torch.no_grad()
def needle_recall(
    network: Transformer,
    tokenizer: Tokenizer,
    tasks: Iterable[LongContextExample],
    *,
    begin: list[int],
    dense: bool,
) -> float:
    """Fraction of answers that greedy decoding reproduces after the question (RULER NIAH).

    With several answers, each is decoded behind the correct previous ones. `begin` are the token
    ids that start a document.
    """
    device = network.embed.weight.device
    score, count = 0.0, 0
    questions = (encode_question(task, tokenizer, begin) for task in tasks)
    for batch in _batched(questions, tokens=8192):
        token_T = torch.tensor(
            [token for question in batch for token in question.ids], device=device
        )
        metadata = AttentionMetadata.packed([len(question.ids) for question in batch], device)
        hidden_TD = network(token_T, metadata, aux=AuxRequest(dense=dense)).hidden_TD
        for question, span in zip(batch, metadata.spans, strict=True):
            answers = [slice(span.query + a.start, span.query + a.stop) for a in question.answers]
            # The hidden state at a position predicts the token behind it.
            decoded = [
                network.head(hidden_TD[answer.start - 1 : answer.stop - 1]).argmax(-1)
                for answer in answers
            ]
            correct = sum(
                torch.equal(decoded_A, token_T[answer])
                for decoded_A, answer in zip(decoded, answers, strict=True)
            )
            score, count = score + correct / len(answers), count + 1
    return score / count


@dataclass(frozen=True, slots=True)
class NeedleQuestion:
    """Token ids of a long document with question and answers, and where the answers are."""

    ids: list[int]
    answers: list[slice]


def encode_question(
    task: LongContextExample, tokenizer: Tokenizer, begin: list[int]
) -> NeedleQuestion:
    """Encode a task with its answers as one text, as the training data does."""
    # A space before an answer belongs to the answer's first token, so question and answer cannot be
    # encoded separately.
    ids = tokenizer.encode(task.to_text(), specials=False)

    def prefix_tokens(text: str) -> int:
        """How many tokens of the document lie within its prefix `text`."""
        own = tokenizer.encode(text, specials=False)
        differing = (i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b)
        return len(begin) + next(differing, min(len(own), len(ids)))

    before = f"{task.text}{task.separator}{task.question}{task.separator}"
    answers = []
    for answer in task.answers:
        answers.append(slice(prefix_tokens(before), prefix_tokens(before + answer)))
        before += f"{answer} , "
    return NeedleQuestion(begin + ids, answers)


def _batched(questions: Iterable[NeedleQuestion], *, tokens: int) -> Iterator[list[NeedleQuestion]]:
    """Batches of at most `tokens`; a longer document is a batch of its own."""
    batch: list[NeedleQuestion] = []
    for question in questions:
        if batch and sum(len(other.ids) for other in batch) + len(question.ids) > tokens:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class IndexerRecall:
    """Fraction of one layer's dense attention mass that falls on the selected (top-k) keys."""

    layer: int
    mass: float


@torch.no_grad()
def measure_indexer_recall(network: Transformer, batch: MicroBatch) -> list[IndexerRecall]:
    """Recall of every indexer, over queries with more keys than `topk`."""
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
            topk = model_attention.select_topk(index, long, attention.topk)
            if len(topk.query_Q):
                found.append(
                    IndexerRecall(number, _mass(attention, projected, topk, batch.attn_metadata))
                )
        x_TD, selection, _ = layer(x_TD, step, selection)
    return found


def _mass(
    attention: model_attention.DSA,
    projected: model_attention.MLAProjections,
    topk: TopKSelection,
    metadata: AttentionMetadata,
) -> float:
    """Mean attention mass on the selected keys, over queries and heads."""
    query_QHC = attention.absorb(projected.query_THD[topk.query_Q])
    total = 0.0
    spans = {
        q: span for span in metadata.spans for q in range(span.query, span.query + span.queries)
    }
    for row, q in enumerate(topk.query_Q.tolist()):
        span = spans[q]
        last = span.key + span.past + (q - span.query) + 1
        score_HS = attention.scale * query_QHC[row] @ projected.row_TC[span.key : last].mT
        mass_S = score_HS.softmax(-1).mean(0)
        total += float(mass_S[topk.index_QK[row].long() - span.key].sum())
    return total / len(topk.query_Q)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrace:
    """Top-k selection and expert load of one layer for one document.

    `selection` is None in layers without an indexer of their own, `load_E` in layers without
    experts.
    """

    layer: int
    selection: TopKSelection | None
    topk: int
    load_E: Tensor | None


@torch.no_grad()
def trace_layers(network: Transformer, token_T: Tensor) -> list[LayerTrace]:
    """Selected tokens and expert load of every layer that has an indexer or experts.

    A layer that reuses another layer's selection has none of its own.
    """
    metadata = AttentionMetadata.packed([len(token_T)], token_T.device)
    outputs = network(token_T, metadata, aux=AuxRequest(routing_and_topk=True)).aux
    found = []
    for number, (layer, aux) in enumerate(zip(network.layers, outputs, strict=True)):
        assert isinstance(layer, DecoderLayer)
        attention = layer.attention
        has_indexer = isinstance(attention, model_attention.DSA) and attention.indexer is not None
        topk = attention.topk if isinstance(attention, model_attention.DSA) else 0
        selection = aux.selection if has_indexer else None
        if selection is not None or aux.expert_load_E is not None:
            found.append(LayerTrace(number, selection, topk, aux.expert_load_E))
    return found
