"""Tokens that each indexer selects and the load of each expert, traced on one text.

Q sparse queries, T tokens.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath
from paddock.launch.token_text import TokenizerText

if TYPE_CHECKING:
    from paddock.model import Transformer
    from paddock.text import Tokenizer
    from paddock.train import evaluate

MIN_TOKENS, MAX_TOKENS = 256, 8192  # of the text that is traced
QUERIES, LAYERS = 128, 16  # logged per layer, per network
GROUPS, BATCHES = 64, 16  # searched for the longest rollout, or document


def inspect_run(run: StrPath, text: StrPath | None = None) -> dict[str, Any]:
    """Trace a run's newest checkpoint on one text, and log the row to the run's network.jsonl.

    The text is that of the file `text`, else the run's longest recent rollout, else held-out text
    of its corpus. Returns the row.
    """
    from paddock.checkpoint import latest_model, load_pretrained
    from paddock.journal import Journal
    from paddock.text import Tokenizer

    run_dir = Path(run)
    folder = latest_model(run_dir)
    tokenizer = Tokenizer.load(folder)
    ids: Sequence[int]
    if text is not None:
        try:
            ids = tokenizer.encode(Path(text).read_text("utf-8"), specials=False)
        except UnicodeDecodeError as error:
            raise UserError(f"{text}: not UTF-8 text: {error.reason}") from None
    else:
        ids = longest_rollout(run_dir) or held_out_document(run_dir, tokenizer)
    if len(ids) < 2:
        raise UserError(f"{text or run}: fewer than two tokens")
    step = folder.parent.name.rpartition("-")[2]
    with Journal(run_dir) as journal:
        row = inspect_network(load_pretrained(folder), ids, tokenizer)
        journal.log_row("network", step=int(step) if step.isdigit() else 0, **row)
    return row


def inspect_network(
    network: "Transformer", ids: Sequence[int], tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """The row of network.jsonl for one text: token pieces, index selections, expert loads, MTP
    acceptance rates."""
    import torch

    from paddock.model import AttentionMetadata
    from paddock.train import MicroBatch, evaluate

    max_topk = max(
        (layer.topk for layer in evaluate.trace_layers(network, _row(network, ids[:2]))), default=0
    )
    token_T = _row(network, ids[: min(MAX_TOKENS, max(MIN_TOKENS, 4 * max_topk))])
    layers = evaluate.trace_layers(network, token_T)
    with_index = [layer for layer in layers if layer.selection is not None]
    routed = [layer for layer in layers if layer.load_E is not None]
    drafts: list[float] = []
    if network.mtp is not None:
        layout = AttentionMetadata.packed([len(token_T)], token_T.device)
        every_T = torch.ones_like(token_T, dtype=torch.bool)
        drafts = evaluate.mtp_acceptance_rates(
            network, [MicroBatch(token_T, every_T, layout)], depths=3
        )
    return {
        "pieces": TokenizerText(tokenizer).pieces(token_T.tolist()),
        "indexer": [
            found
            for layer in _evenly_spaced(with_index, LAYERS)
            if (found := _selected_keys(layer, len(token_T)))
        ],
        "experts": [
            {"layer": layer.layer, "load": layer.load_E.tolist()}
            for layer in _evenly_spaced(routed, LAYERS)
            if layer.load_E is not None
        ],
        "acceptance": drafts,
    }


def _row(network: "Transformer", ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(ids), device=network.embed.weight.device)


def _selected_keys(layer: "evaluate.LayerTrace", tokens: int) -> dict[str, Any] | None:
    """Selected keys as one bit per query and key; None if every query attends to all keys."""
    import base64

    import numpy as np

    assert layer.selection is not None
    queries = layer.selection.query_Q.tolist()
    rows = _evenly_spaced(range(len(queries)), QUERIES)
    if not rows:
        return None
    selected_QT = np.zeros((len(rows), tokens), bool)
    for i, row in enumerate(rows):
        keys = layer.selection.index_QK[row].tolist()
        selected_QT[i, [key for key in keys if key >= 0]] = True
    return {
        "layer": layer.layer,
        "topk": layer.topk,
        "queries": [queries[row] for row in rows],
        "picks": base64.b64encode(np.packbits(selected_QT).tobytes()).decode(),
    }


def _evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, evenly spaced, the last among them.

    >>> _evenly_spaced(range(10), 4), _evenly_spaced("ab", 4)
    ([1, 4, 6, 9], ['a', 'b'])
    """
    if len(items) <= count:
        return list(items)
    return [items[(i + 1) * len(items) // count - 1] for i in range(count)]


def longest_rollout(run: Path) -> tuple[int, ...]:
    """Tokens of the longest of the newest rollouts in a run's ledger; empty without a ledger."""
    from paddock.journal import LEDGER_FILE, LedgerView

    if not (run / LEDGER_FILE).is_file():
        return ()
    with LedgerView(run / LEDGER_FILE) as ledger:
        ended = ledger.rollout_summaries([entry.ordinal for entry in ledger.list_groups(GROUPS)])
        for rollout in sorted(ended, key=lambda each: -each.tokens):
            for branch in ledger.trajectories(rollout.ordinal, rollout.member)[:1]:
                return branch.token_ids
    return ()


def held_out_document(run: Path, tokenizer: "Tokenizer") -> list[int]:
    """The longest of the first documents that the run's corpus holds out."""
    from paddock.config import load_recipe, resolve
    from paddock.data import Corpus, corpus_key, iterate_once
    from paddock.train import TrainSettings

    settings = resolve(TrainSettings, load_recipe(run / "recipe.toml"))
    folder = run.parent / "corpora" / corpus_key(settings.corpus, tokenizer)
    if not folder.is_dir():
        raise UserError(f"{folder}: corpus not found; pass a text with --text FILE")
    documents = Corpus(folder, tokenizer=tokenizer).split("held_out")
    found: list[int] = []
    for batch in islice(
        iterate_once(documents, context=MAX_TOKENS, batch_tokens=MAX_TOKENS), BATCHES
    ):
        longest = max(range(len(batch.lengths)), key=batch.lengths.__getitem__)
        start, length = sum(batch.lengths[:longest]), batch.lengths[longest]
        if length > len(found):
            found = batch.token_T[start : start + length].tolist()
    if not found:
        raise UserError(f"{folder} has no held-out documents; pass a text with --text FILE")
    return found
