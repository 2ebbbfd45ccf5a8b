"""Quantize a checkpoint layer by layer, resumable; the source is not modified.

One layer's weights and one batch of activations are in memory at a time. T tokens, D hidden.
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

LAYER_ERROR_BATCHES = 2  # batches on which the error of a single layer is measured


@dataclass(frozen=True, slots=True)
class QuantizationProgress:
    """Finished steps, their total, and the current step."""

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
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Write `target`, the checkpoint `source` with integer weights, and return its report.

    `passages` are tokenized texts for "calibration" and for evaluating both networks ("validation",
    "needles"). An interrupted run resumes when called again, with a bitwise identical result. For a
    finished target the call returns its report.
    """
    settings = settings or QuantSettings()
    run = _QuantizationRun(Path(source), Path(target), settings, torch.device(device))
    return run.run(make_batches(passages, settings.batch_tokens), on_progress)


def check_not_quantized(source: Path) -> None:
    """Raise QuantError if the checkpoint is quantized."""
    if quant_method(source) is not None:
        raise QuantError(f"{source}: is already quantized")


class _QuantizationRun:
    """One run: checks up front, then embedding, layers and head in order."""

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
        self.rotations = (
            Rotations.from_config(self.config, settings.seed) if settings.rotate else None
        )
        # A rotated head differs from the embedding, so it is untied.
        tied = self.config.tied and self.rotations is None
        self.target_config = self.config.model_copy(update={"tied": tied})
        if not settings.quantize_linears and "moe" not in self.config.mlp:
            raise QuantError(f"{source}: has no experts, and the recipe quantizes nothing else")
        if self.config.family == "paddock" and "moe" in self.config.mlp:
            raise QuantError(
                f"{source}: the family 'paddock' stores a layer's experts as one tensor, but "
                "quantized experts are stored one by one; save it as a released family first"
            )
        check_attention_kinds(self.config.attention, settings)
        check_group_sizes(self.network.layers, settings)
        self.dtype = _stored_dtype(self.tensors, self.plan)
        self.folder = QuantizationFolder(target, self.config.layers + 2)

    def run(self, batches: list[CalibrationBatch], on_progress: ProgressCallback) -> dict[str, Any]:
        self._check_text(batches)
        plan = {
            "weights": fingerprint(self.source, self.tensors),
            "settings": self.settings.model_dump(mode="json"),
            "text": text_digest(batches),
            "device": self.device.type,
        }
        report = self.folder.finished_report(plan)
        if report is not None:
            return report
        with self.folder.lock(), self.folder.streams.background_writes():
            return self._run(plan, batches, on_progress)

    def _run(
        self, plan: dict[str, Any], batches: list[CalibrationBatch], on_progress: ProgressCallback
    ) -> dict[str, Any]:
        progress = self.folder.resume(plan)
        report = self.folder.complete_report(plan)
        if report is not None:  # killed during finalize: activations may be deleted already
            self.folder.finalize()
            return report
        layers = self.config.layers
        if progress["layers"] is None:
            self._embed(batches)
            progress["layers"] = 0
            self.folder.save_progress(progress)
        for layer in range(progress["layers"], layers):
            progress["found"].append(self._quantize_layer(layer, batches, on_progress))
            progress["layers"] = layer + 1
            self.folder.save_progress(progress)
            self.folder.streams.delete(layer)
        on_progress(QuantizationProgress(layers, layers + 1, "head"))
        return self._finish(plan, batches, progress["found"])

    def _check_text(self, batches: list[CalibrationBatch]) -> None:
        if self.settings.needs_calibration and not any(b.purpose == "calibration" for b in batches):
            raise QuantError("this recipe needs calibration text for smoothing; none was given")
        vocab = self.config.vocab
        for batch in batches:
            if int(batch.token_T.max()) >= vocab or int(batch.token_T.min()) < 0:
                raise QuantError(f"token ids of the text must be in [0, {vocab})")

    @torch.no_grad()
    def _embed(self, batches: list[CalibrationBatch]) -> None:
        """Write the embedding, rotated, and the activations before the first layer."""
        embed = nn.Embedding(self.config.vocab, self.config.hidden, device=self.device)
        self._load("embed", embed)
        if self.rotations is not None:
            rotate_columns((embed.weight,), self.rotations.residual.to(self.device))
        for i, batch in enumerate(batches):
            state = LayerActivations(embed(batch.token_T.to(self.device)))
            self.folder.streams.write(0, i, "exact", state)
            self.folder.streams.write(0, i, "quantized", state)
        stored = to_compressed_tensors(
            "embed.weight", embed.weight.detach(), self.target_config, self.dtype
        )
        self.folder.write_shard(1, stored)

    @torch.no_grad()
    def _quantize_layer(
        self, layer: int, batches: list[CalibrationBatch], on_progress: ProgressCallback
    ) -> dict[str, Any]:
        def report_progress(what: str) -> None:
            total = self.config.layers + 1
            on_progress(QuantizationProgress(layer, total, f"layer {layer}: {what}"))

        report_progress("loading weights")
        block = self._block(layer)
        if self.rotations is not None:
            fuse_norms(block)
            rotate_layer(block, self.rotations)
        report_progress("exact forward pass")
        observer = self._exact_pass(layer, block, batches)
        report_progress("smoothing")
        smoothing = smooth(block, observer, self.settings)
        report_progress("quantizing")
        quantized = quantize_layer(block, self.settings, observer)
        self.folder.write_shard(layer + 2, self._layer_tensors(layer, block, quantized))
        replace_with_quantized(block, quantized)
        report_progress("quantized forward pass")
        errors = self._quantized_pass(layer, block, batches)
        uncalibrated = _uncalibrated_experts(block, observer)
        return {"layer": layer, **errors, **uncalibrated, **_summary(smoothing)}

    def _block(self, layer: int) -> DecoderLayer:
        """A decoder layer with its weights in float32."""
        with torch.device("meta"):
            block = DecoderLayer(self.config, layer)
        block = block.float().to_empty(device=self.device)
        self._load(f"layers.{layer}", block)
        return block.eval()

    def _exact_pass(
        self, layer: int, block: DecoderLayer, batches: list[CalibrationBatch]
    ) -> ActivationObserver:
        num_calibration = sum(1 for batch in batches if batch.purpose == "calibration")
        observer = ActivationObserver(block, self.settings, num_calibration)
        for i, batch in enumerate(batches):
            state = self.folder.streams.read(layer, i, "exact", self.device)
            with observer.observe(batch.purpose == "calibration"):
                output = self._forward(layer, block, batch, state)
            self.folder.streams.write(layer + 1, i, "exact", output)
        return observer

    def _quantized_pass(
        self, layer: int, block: DecoderLayer, batches: list[CalibrationBatch]
    ) -> dict[str, float]:
        """Relative errors: of the layer's own contribution given exact inputs, and of the hidden
        states after it, with the errors of all layers so far."""
        streams, layer_sums, cumulative_sums = self.folder.streams, [0.0, 0.0], [0.0, 0.0]
        for i, batch in enumerate(batches):
            exact_TD = streams.read(layer + 1, i, "exact", self.device).hidden_TD
            state = streams.read(layer, i, "quantized", self.device)
            output = self._forward(layer, block, batch, state)
            streams.write(layer + 1, i, "quantized", output)
            _add_error(cumulative_sums, output.hidden_TD, exact_TD, base_TD=exact_TD)
            if i < LAYER_ERROR_BATCHES:
                exact = streams.read(layer, i, "exact", self.device)
                layer_output_TD = self._forward(layer, block, batch, exact).hidden_TD
                _add_error(
                    layer_sums, layer_output_TD, exact_TD, base_TD=exact_TD - exact.hidden_TD
                )
        return {"layer_error": _root(layer_sums), "cumulative_error": _root(cumulative_sums)}

    def _forward(
        self, layer: int, block: DecoderLayer, batch: CalibrationBatch, state: LayerActivations
    ) -> LayerActivations:
        ctx = self.network.make_context(batch.layout(self.device))
        hidden_TD, selection, _ = block(state.hidden_TD, ctx, state.selection)
        shares_selection = (
            self.config.indexer is not None
            and layer + 1 < self.config.layers
            and not self.config.has_indexer(layer + 1)
        )
        return LayerActivations(hidden_TD, selection if shares_selection else None)

    def _layer_tensors(
        self, layer: int, block: DecoderLayer, quantized: dict[str, QuantizedTensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in block.state_dict().items():
            value: Tensor | QuantizedTensor = quantized.get(name, tensor)
            full_name = f"layers.{layer}.{name}"
            dtype = None if full_name in self.fp32_names else self.dtype
            yield from to_compressed_tensors(full_name, value, self.target_config, dtype)

    @torch.no_grad()
    def _finish(
        self, plan: dict[str, Any], batches: list[CalibrationBatch], layers: list[dict[str, Any]]
    ) -> dict[str, Any]:
        norm, head = self._write_head()
        stats = QuantEvalStats()
        sides: tuple[ActivationSide, ActivationSide] = ("exact", "quantized")
        for i, batch in enumerate(batches):
            if batch.purpose != "calibration":
                states = [
                    self.folder.streams.read(self.config.layers, i, side, self.device).hidden_TD
                    for side in sides
                ]
                update_stats(batch, norm(states[0]), norm(states[1]), head, stats)
        report = {
            **plan,
            "bytes": [weights_size_bytes(self.source), self.folder.size_bytes()],
            "layers": layers,
            **stats.summary(),
        }
        config = config_to_json(self.target_config)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        tensor_plan = plan_tensors(
            self.network, self.target_config, self.folder.open_shards().names
        )
        config["quantization_config"] = quantization_config(self.settings, tensor_plan)
        self.folder.finish(
            config,
            report,
            safetensors_folder.list_extra_files(self.source),
            dump_toml(self.settings),
        )
        return report

    def _write_head(self) -> tuple[RMSNorm, nn.Linear]:
        """Write the final norm, the head (rotated if the network is) and the MTP layer."""
        config = self.config
        norm = RMSNorm(config.hidden, config.norm_eps).to(self.device)
        self._load("norm", norm)
        head = nn.Linear(config.hidden, config.vocab, bias=False, device=self.device)
        self._load("embed" if config.tied else "head", head)
        mtp = [piece for piece in self.plan if piece.model_name.startswith("mtp.")]
        extra = [(piece.released_name, t.clone()) for piece, t in read_tensors(self.tensors, mtp)]
        if self.rotations is not None:
            rotation = self.rotations.residual
            if config.mtp is not None:
                vectors = (rotation.sign_N, norm.weight.detach().cpu().clone())
                extra += zip(rotation_tensor_names(self.target_config), vectors, strict=True)
            head.weight.copy_(rotate_head(head.weight, norm.weight, rotation))
            norm.weight.fill_(1.0)
        own = [("norm.weight", norm.weight.detach())]
        if not self.target_config.tied:
            own.append(("head.weight", head.weight.detach()))
        stored = [
            pair
            for name, tensor in own
            for pair in to_compressed_tensors(name, tensor, self.target_config, self.dtype)
        ]
        self.folder.write_shard(config.layers + 2, [*stored, *extra])
        return norm, head

    @torch.no_grad()
    def _load(self, prefix: str, module: nn.Module) -> None:
        """Load the tensors of a module."""
        state = module.state_dict()
        for piece in self.plan:
            if piece.model_name.startswith(f"{prefix}."):
                tensor = self.tensors.read_tensor(piece.released_name).to(self.device)
                safetensors_folder.check_finite(tensor, piece.released_name, self.source)
                tensor_names.slice_tensor(
                    state[piece.model_name.removeprefix(f"{prefix}.")], piece
                ).copy_(tensor)


def _stored_dtype(
    tensors: safetensors_folder.SafetensorsFolder, plan: list[tensor_names.TensorMapping]
) -> torch.dtype:
    """Dtype of tensors that are not quantized: that of the embedding; bfloat16 for float8."""
    dtype = tensors.read_stored(plan[0].released_name).dtype
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def _add_error(sums: list[float], output_TD: Tensor, exact_TD: Tensor, *, base_TD: Tensor) -> None:
    """Add the squared difference and the squared reference to the sums."""
    sums[0] += float((output_TD - exact_TD).double().square().sum())
    sums[1] += float(base_TD.double().square().sum())


def _root(sums: list[float]) -> float:
    return (sums[0] / sums[1]) ** 0.5 if sums[1] else 0.0


def _uncalibrated_experts(block: DecoderLayer, observer: ActivationObserver) -> dict[str, int]:
    """Number of experts that no calibration token was routed to."""
    if not isinstance(block.mlp, MoE) or not observer.linears:
        return {}
    calibrated = sum(1 for expert in observer.experts.values() if expert.count)
    return {"uncalibrated_experts": len(block.mlp.router.weight) - calibrated}


def _summary(smoothing: list[SmoothingResult]) -> dict[str, Any]:
    """How much smoothing reduced the error, over all candidates."""
    if not smoothing:
        return {}
    gains = [1 - choice.error / choice.before for choice in smoothing if choice.before]
    return {
        "smoothed": sum(1 for choice in smoothing if choice.alpha is not None),
        "smoothing_candidates": len(smoothing),
        "smoothing_gain": sum(gains) / max(1, len(gains)),
    }
