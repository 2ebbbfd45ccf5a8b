"""The verb that writes down where a network looks: keys that indexers keep, how busy experts are.

Q sparse queries, T tokens.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paddock.cli.errors import UserError

if TYPE_CHECKING:
    from paddock.model import Transformer
    from paddock.text import Tokenizer
    from paddock.train import evaluate

LEAST, MOST = 256, 8192  # tokens of the row
QUERIES, LAYERS = 128, 16  # shown of a layer, of a network
GROUPS, BATCHES = 64, 16  # among which the longest attempt, or document, is sought


def look(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")],
    text: Annotated[
        Path | None, typer.Option(help="What to read. Default: an attempt, or held-out text.")
    ] = None,
) -> None:
    """Read one text and write down which tokens each indexer picked and how busy each expert was.

    `paddock dash` shows it on the network page. Runs by reinforcement do this when they end.
    """
    from paddock.checkpoint import latest_model, load_pretrained
    from paddock.journal import Journal
    from paddock.text import Tokenizer

    folder = latest_model(run)
    tokenizer = Tokenizer.load(folder)
    ids: Sequence[int]
    if text is not None:
        try:
            ids = tokenizer.encode(text.read_text("utf-8"), specials=False)
        except UnicodeDecodeError as error:
            raise UserError(f"{text}: no text in UTF-8: {error.reason}") from None
    else:
        ids = longest_rollout(run) or held_out_document(run, tokenizer)
    if len(ids) < 2:
        raise UserError(f"{text or run}: nothing to read")
    name = folder.parent.name.rpartition("-")[2]
    with Journal(run) as journal:
        row = inspect_network(load_pretrained(folder), ids, tokenizer)
        journal.log_row("network", step=int(name) if name.isdigit() else 0, **row)
    typer.echo(
        f"{len(row['pieces'])} tokens, {len(row['indexer'])} layers with an indexer of their own, "
        f"{len(row['experts'])} with experts: {run / 'network.jsonl'}"
    )


def inspect_network(
    network: "Transformer", ids: Sequence[int], tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """What the network page shows of one document."""
    import torch

    from paddock.cli.dash import TokenizerText
    from paddock.model import AttentionMetadata
    from paddock.train import MicroBatch, evaluate

    widest = max(
        (layer.topk for layer in evaluate.trace_layers(network, _row(network, ids[:2]))), default=0
    )
    token_T = _row(network, ids[: min(MOST, max(LEAST, 4 * widest))])
    layers = evaluate.trace_layers(network, token_T)
    picked = [layer for layer in layers if layer.selection is not None]
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
            found for layer in _some(picked, LAYERS) if (found := _picks(layer, len(token_T)))
        ],
        "experts": [
            {"layer": layer.layer, "load": layer.load_E.tolist()}
            for layer in _some(routed, LAYERS)
            if layer.load_E is not None
        ],
        "acceptance": drafts,
    }


def _row(network: "Transformer", ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(ids), device=network.embed.weight.device)


def _picks(layer: "evaluate.LayerTrace", tokens: int) -> dict[str, Any] | None:
    """A bit for each query and key, row by row; None where every query sees all."""
    import base64

    import numpy as np

    assert layer.selection is not None
    every = layer.selection.query_Q.tolist()
    rows = _some(range(len(every)), QUERIES)
    if not rows:
        return None
    kept_QT = np.zeros((len(rows), tokens), bool)
    for place, row in enumerate(rows):
        keys = layer.selection.index_QK[row].tolist()
        kept_QT[place, [key for key in keys if key >= 0]] = True
    return {
        "layer": layer.layer,
        "topk": layer.topk,
        "queries": [every[row] for row in rows],
        "picks": base64.b64encode(np.packbits(kept_QT).tobytes()).decode(),
    }


def _some(every: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly spread, the last among them.

    >>> _some(range(10), 4), _some("ab", 4)
    ([1, 4, 6, 9], ['a', 'b'])
    """
    if len(every) <= most:
        return list(every)
    return [every[(i + 1) * len(every) // most - 1] for i in range(most)]


def longest_rollout(run: Path) -> tuple[int, ...]:
    """The tokens of the longest of the newest attempts in a run's ledger; none without one."""
    from paddock.journal import LEDGER_FILE, LedgerView

    if not (run / LEDGER_FILE).is_file():
        return ()
    with LedgerView(run / LEDGER_FILE) as ledger:
        ended = ledger.rollout_summaries([entry.ordinal for entry in ledger.list_groups(GROUPS)])
        for attempt in sorted(ended, key=lambda each: -each.tokens):
            for branch in ledger.trajectories(attempt.ordinal, attempt.member)[:1]:
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
        raise UserError(f"{folder}: the corpus is gone; give the text with --text FILE")
    documents = Corpus(folder, tokenizer=tokenizer).split("held_out")
    found: list[int] = []
    for batch in islice(iterate_once(documents, context=MOST, batch_tokens=MOST), BATCHES):
        longest = max(range(len(batch.lengths)), key=batch.lengths.__getitem__)
        start, length = sum(batch.lengths[:longest]), batch.lengths[longest]
        if length > len(found):
            found = batch.token_T[start : start + length].tolist()
    if not found:
        raise UserError(f"{folder} holds nothing out; give the text with --text FILE")
    return found
