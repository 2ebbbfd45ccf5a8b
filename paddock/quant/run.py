"""A folder quantized layer by layer, resumable; the source is only read.

One layer's weights and one batch of text are in memory at a time. T tokens, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paddock.checkpoint import (
    config_to_json,
    drop_missing_mtp,
    match_tensors,
    meta_model,
    open_checkpoint,
    quant_method,
    read_tensors,
    safetensors_folder,
    tensor_names,
)
from paddock.config import dump_toml
from paddock.model import DecoderLayer, MoE, RMSNorm
from paddock.quant.calibrate import (
    ActivationObserver,
    SmoothingResult,
    check_attention_kinds,
    smooth,
)
from paddock.quant.calibration_data import (
    ActivationSide,
    CalibrationBatch,
    CalibrationText,
    LayerActivations,
    make_batches,
)
from paddock.quant.compressed_tensors import (
    plan_tensors,
    quantization_config,
    rotation_tensor_names,
    to_compressed_tensors,
)
from paddock.quant.layer_quantizer import (
    QuantizationFolder,
    fingerprint,
    text_digest,
    weights_size_bytes,
)
from paddock.quant.measure import QuantEvalStats, update_stats
from paddock.quant.quantize_layer import check_group_sizes, quantize_layer, replace_with_quantized
from paddock.quant.rotate import Rotations, fuse_norms, rotate_columns, rotate_head, rotate_layer
from paddock.quant.settings import QuantSettings
from paddock.quant.w4a8 import QuantError, QuantizedTensor

LAYER_ERROR_BATCHES = 2  # of text on which a layer's own error is measured


@dataclass(frozen=True, slots=True)
class QuantizationProgress:
    """What a watcher is told: how much of the work is done, and what comes now."""

    done: int
    of: int
    what: str


ProgressCallback = Callable[[QuantizationProgress], None]


def ignore_progress(_: QuantizationProgress) -> None:
    pass


def quantize_folder(
    source: str | Path,
    target: str | Path,
    settings: QuantSettings | None = None,
    *,
    passages: Sequence[CalibrationText] = (),
    device: str | torch.device = "cpu",
    say: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Write `target`, the network of `source` with integer weights, and return its report.

    `passages` are text: what is to "calibrate" with, and what to measure on ("held_out", "needles")
    as it passes through both networks. Called again after it was stopped, it goes on; the result is
    the same to the bit. Called again when all is done, it says what it said then.
    """
    chosen = settings or QuantSettings()
    work = _Work(Path(source), Path(target), chosen, torch.device(device))
    return work.run(make_batches(passages, chosen.batch_tokens), say)


def check_not_quantized(source: Path) -> None:
    if quant_method(source) is not None:
        raise QuantError(f"{source}: is already quantized")


class _Work:
    def __init__(
        self, source: Path, target: Path, settings: QuantSettings, device: torch.device
    ) -> None:
        check_not_quantized(source)
        if target.resolve() == source.resolve():
            raise QuantError(f"{target}: source and target are the same")
        self.source, self.settings, self.device = source, settings, device
        config, self.tensors = open_checkpoint(source)
        self.config = drop_missing_mtp(config, self.tensors)
        self.network = meta_model(self.config)
        self.fp32_names = self.network.fp32_tensor_names()
        self.plan = match_tensors(self.network, self.tensors)
        self.turns = Rotations.from_config(self.config, settings.seed) if settings.rotate else None
        # What is written: a turned head is no longer the embedding.
        tied = self.config.tied and self.turns is None
        self.made = self.config.model_copy(update={"tied": tied})
        if not settings.quantize_linears and "moe" not in self.config.mlp:
            raise QuantError(f"{source}: has no experts, and the recipe leaves all else alone")
        if self.config.family == "paddock" and "moe" in self.config.mlp:
            raise QuantError(
                f"{source}: the family 'paddock' stores a layer's experts as one tensor, and "
                "integers are stored matrix by matrix; save it as a released family first"
            )
        check_attention_kinds(self.config.attention, settings)
        check_group_sizes(self.network.layers, settings)
        self.dtype = _stored_dtype(self.tensors, self.plan)
        self.shop = QuantizationFolder(target, self.config.layers + 2)

    def run(self, batches: list[CalibrationBatch], say: ProgressCallback) -> dict[str, Any]:
        self._refuse_text(batches)
        plan = {
            "weights": fingerprint(self.source, self.tensors),
            "settings": self.settings.model_dump(mode="json"),
            "text": text_digest(batches),
            "device": self.device.type,
        }
        made = self.shop.finished_report(plan)
        if made is not None:
            return made
        with self.shop.lock(), self.shop.streams.background_writes():
            return self._run(plan, batches, say)

    def _run(
        self, plan: dict[str, Any], batches: list[CalibrationBatch], say: ProgressCallback
    ) -> dict[str, Any]:
        progress = self.shop.resume(plan)
        whole = self.shop.complete_report(plan)
        if whole is not None:  # it was killed while it tidied up: there may be no states any more
            self.shop.finalize()
            return whole
        layers = self.config.layers
        if progress["layers"] is None:
            self._begin(batches)
            progress["layers"] = 0
            self.shop.save_progress(progress)
        for layer in range(progress["layers"], layers):
            progress["found"].append(self._layer(layer, batches, say))
            progress["layers"] = layer + 1
            self.shop.save_progress(progress)
            self.shop.streams.delete(layer)
        say(QuantizationProgress(layers, layers + 1, "the head"))
        return self._finish(plan, batches, progress["found"])

    def _refuse_text(self, batches: list[CalibrationBatch]) -> None:
        if self.settings.needs_calibration and not any(b.purpose == "calibrate" for b in batches):
            raise QuantError(
                "this recipe smooths, which takes text to calibrate with; there is none"
            )
        vocab = self.config.vocab
        for batch in batches:
            if int(batch.token_T.max()) >= vocab or int(batch.token_T.min()) < 0:
                raise QuantError(f"the text holds token ids that are not in [0, {vocab})")

    @torch.no_grad()
    def _begin(self, batches: list[CalibrationBatch]) -> None:
        """The embedding, turned, and the first states."""
        embed = nn.Embedding(self.config.vocab, self.config.hidden, device=self.device)
        self._fill("embed", embed)
        if self.turns is not None:
            rotate_columns((embed.weight,), self.turns.residual.to(self.device))
        for i, batch in enumerate(batches):
            state = LayerActivations(embed(batch.token_T.to(self.device)))
            self.shop.streams.write(0, i, "exact", state)
            self.shop.streams.write(0, i, "integer", state)
        stored = to_compressed_tensors("embed.weight", embed.weight.detach(), self.made, self.dtype)
        self.shop.write_shard(1, stored)

    @torch.no_grad()
    def _layer(
        self, layer: int, batches: list[CalibrationBatch], say: ProgressCallback
    ) -> dict[str, Any]:
        def now(what: str) -> None:
            say(QuantizationProgress(layer, self.config.layers + 1, f"layer {layer}: {what}"))

        now("reading weights")
        block = self._block(layer)
        if self.turns is not None:
            fuse_norms(block)
            rotate_layer(block, self.turns)
        now("exact pass over the text")
        watch = self._watched_pass(layer, block, batches)
        now("smoothing")
        choices = smooth(block, watch, self.settings)
        now("integers")
        found = quantize_layer(block, self.settings, watch)
        self.shop.write_shard(layer + 2, self._layer_tensors(layer, block, found))
        replace_with_quantized(block, found)
        now("integer pass over the text")
        errors = self._integer_pass(layer, block, batches)
        return {"layer": layer, **errors, **_unseen(block, watch), **_summary(choices)}

    def _block(self, layer: int) -> DecoderLayer:
        """A layer's weights in float32."""
        with torch.device("meta"):
            block = DecoderLayer(self.config, layer)
        block = block.float().to_empty(device=self.device)
        self._fill(f"layers.{layer}", block)
        return block.eval()

    def _watched_pass(
        self, layer: int, block: DecoderLayer, batches: list[CalibrationBatch]
    ) -> ActivationObserver:
        calibrating = sum(1 for batch in batches if batch.purpose == "calibrate")
        watch = ActivationObserver(block, self.settings, calibrating)
        for i, batch in enumerate(batches):
            state = self.shop.streams.read(layer, i, "exact", self.device)
            with watch.observe(batch.purpose == "calibrate"):
                after = self._through(layer, block, batch, state)
            self.shop.streams.write(layer + 1, i, "exact", after)
        return watch

    def _integer_pass(
        self, layer: int, block: DecoderLayer, batches: list[CalibrationBatch]
    ) -> dict[str, float]:
        """Relative errors: of what the layer adds, given exact inputs; of the states behind it,
        with the errors of all layers so far."""
        streams, own, drift = self.shop.streams, [0.0, 0.0], [0.0, 0.0]
        for i, batch in enumerate(batches):
            wanted_TD = streams.read(layer + 1, i, "exact", self.device).hidden_TD
            state = streams.read(layer, i, "integer", self.device)
            after = self._through(layer, block, batch, state)
            streams.write(layer + 1, i, "integer", after)
            _add_error(drift, after.hidden_TD, wanted_TD, base_TD=wanted_TD)
            if i < LAYER_ERROR_BATCHES:
                exact = streams.read(layer, i, "exact", self.device)
                alone_TD = self._through(layer, block, batch, exact).hidden_TD
                _add_error(own, alone_TD, wanted_TD, base_TD=wanted_TD - exact.hidden_TD)
        return {"own_error": _root(own), "drift": _root(drift)}

    def _through(
        self, layer: int, block: DecoderLayer, batch: CalibrationBatch, state: LayerActivations
    ) -> LayerActivations:
        step = self.network.make_context(batch.layout(self.device))
        hidden_TD, selection, _ = block(state.hidden_TD, step, state.selection)
        shares = (
            self.config.indexer is not None
            and layer + 1 < self.config.layers
            and not self.config.has_indexer(layer + 1)
        )
        return LayerActivations(hidden_TD, selection if shares else None)

    def _layer_tensors(
        self, layer: int, block: DecoderLayer, found: dict[str, QuantizedTensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in block.state_dict().items():
            value: Tensor | QuantizedTensor = found.get(name, tensor)
            full_name = f"layers.{layer}.{name}"
            dtype = None if full_name in self.fp32_names else self.dtype
            yield from to_compressed_tensors(full_name, value, self.made, dtype)

    @torch.no_grad()
    def _finish(
        self, plan: dict[str, Any], batches: list[CalibrationBatch], found: list[dict[str, Any]]
    ) -> dict[str, Any]:
        norm, head = self._last()
        tally = QuantEvalStats()
        sides: tuple[ActivationSide, ActivationSide] = ("exact", "integer")
        for i, batch in enumerate(batches):
            if batch.purpose != "calibrate":
                states = [
                    self.shop.streams.read(self.config.layers, i, side, self.device).hidden_TD
                    for side in sides
                ]
                update_stats(batch, norm(states[0]), norm(states[1]), head, tally)
        report = {
            **plan,
            "bytes": [weights_size_bytes(self.source), self.shop.size_bytes()],
            "layers": found,
            **tally.summary(),
        }
        config = config_to_json(self.made)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        fates = plan_tensors(self.network, self.made, self.shop.open_shards().names)
        config["quantization_config"] = quantization_config(self.settings, fates)
        self.shop.finish(
            config,
            report,
            safetensors_folder.list_extra_files(self.source),
            dump_toml(self.settings),
        )
        return report

    def _last(self) -> tuple[RMSNorm, nn.Linear]:
        """The final norm and head, turned if all is; written too, and the MTP layer with them."""
        config = self.config
        norm = RMSNorm(config.hidden, config.norm_eps).to(self.device)
        self._fill("norm", norm)
        head = nn.Linear(config.hidden, config.vocab, bias=False, device=self.device)
        self._fill("embed" if config.tied else "head", head)
        mtp = [piece for piece in self.plan if piece.model_name.startswith("mtp.")]
        further = [(piece.released_name, t.clone()) for piece, t in read_tensors(self.tensors, mtp)]
        if self.turns is not None:
            turn = self.turns.residual
            if config.mtp is not None:
                vectors = (turn.sign_N, norm.weight.detach().cpu().clone())
                further += zip(rotation_tensor_names(self.made), vectors, strict=True)
            head.weight.copy_(rotate_head(head.weight, norm.weight, turn))
            norm.weight.fill_(1.0)
        own = [("norm.weight", norm.weight.detach())]
        if not self.made.tied:
            own.append(("head.weight", head.weight.detach()))
        stored = [
            pair for n, t in own for pair in to_compressed_tensors(n, t, self.made, self.dtype)
        ]
        self.shop.write_shard(config.layers + 2, [*stored, *further])
        return norm, head

    @torch.no_grad()
    def _fill(self, prefix: str, module: nn.Module) -> None:
        """Read a part of the network."""
        places = module.state_dict()
        for piece in self.plan:
            if piece.model_name.startswith(f"{prefix}."):
                tensor = self.tensors.read_tensor(piece.released_name).to(self.device)
                safetensors_folder.check_finite(tensor, piece.released_name, self.source)
                tensor_names.slice_tensor(
                    places[piece.model_name.removeprefix(f"{prefix}.")], piece
                ).copy_(tensor)


def _stored_dtype(
    tensors: safetensors_folder.SafetensorsFolder, plan: list[tensor_names.TensorMapping]
) -> torch.dtype:
    """What stays as it is keeps the type of the embedding; float8 becomes bfloat16."""
    found = tensors.read_stored(plan[0].released_name).dtype
    return found if found.itemsize > 1 else torch.bfloat16


def _add_error(sums: list[float], found_TD: Tensor, wanted_TD: Tensor, *, base_TD: Tensor) -> None:
    """Squares of the difference, and of what it is relative to."""
    sums[0] += float((found_TD - wanted_TD).double().square().sum())
    sums[1] += float(base_TD.double().square().sum())


def _root(sums: list[float]) -> float:
    return (sums[0] / sums[1]) ** 0.5 if sums[1] else 0.0


def _unseen(block: DecoderLayer, watch: ActivationObserver) -> dict[str, int]:
    """Experts that no text came to: they were rounded without being tried."""
    if not isinstance(block.mlp, MoE) or not watch.linears:
        return {}
    seen = sum(1 for expert in watch.experts.values() if expert.count)
    return {"unseen_experts": len(block.mlp.router.weight) - seen}


def _summary(choices: list[SmoothingResult]) -> dict[str, Any]:
    """How much smoothing helped where it was tried."""
    if not choices:
        return {}
    gains = [1 - choice.error / choice.before for choice in choices if choice.before]
    return {
        "smoothed": sum(1 for choice in choices if choice.alpha is not None),
        "tried": len(choices),
        "gain": sum(gains) / max(1, len(gains)),
    }
