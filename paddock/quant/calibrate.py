"""Activation smoothing (AWQ, SmoothQuant): moves outlier channels from activations into weights.

Between a layer that writes x and layers W that read it, x / s and W s compute the same. Candidate
scales s are tried with the actual quantizer: calibration rows are rounded, weights are quantized,
and the candidate with the smallest output error wins, s = 1 included.

    routed experts      up -> down      s = mean|x|^a                   (Flex-AWQ-SSZ)
    attention, dense    norm -> linear, s = max|x|^a / max|W|^(1 - a)   (flexible SmoothQuant)
    and shared parts    value -> o, up -> down

T tokens, N sampled rows, D channels, F outputs or inner, E experts, R rows sorted by expert, X
nothing or the experts of one search.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from paddock.kernels.grouped_gemm import grouped_gemm
from paddock.kernels.moe_permute import permute, sort_by_expert
from paddock.kernels.swiglu import silu_and_mul
from paddock.kernels.w4a8_gemm import quantize_per_token
from paddock.kernels.workspace import chunks, scratch_bytes
from paddock.model import DecoderLayer, GatedMLP, GroupedExperts, MoE, Routing, config
from paddock.model import attention as model_attention
from paddock.quant.rotate import NormConsumers, norm_consumers
from paddock.quant.settings import QuantSettings, quantizable_linears
from paddock.quant.w4a8 import QuantError, QuantizationArgs, quantize

ScaleTying = Callable[[Tensor], Tensor]
EXPERTS = "mlp.experts"
SMOOTHABLE = ("mla", "dsa", "gqa", "swa", "simple_gdn")  # values reach o through weighted sums only


class ActivationStats:
    """Inputs of a linear layer: channel magnitudes, and a sample of rows."""

    def __init__(self, max_rows: int, max_rows_per_batch: int) -> None:
        self._max_rows, self._max_rows_per_batch = max_rows, max_rows_per_batch
        self._rows: list[Tensor] = []
        self._num_rows = 0
        self._sum_D: Tensor | None = None
        self.max_abs_D: Tensor = torch.zeros(())
        self.count = 0

    def add(self, x_TD: Tensor) -> None:
        if not len(x_TD):
            return
        x_TD = x_TD.detach().float()
        sum_D, peak_D = x_TD.abs().sum(0), x_TD.abs().amax(0)
        self._sum_D = sum_D if self._sum_D is None else self._sum_D + sum_D
        self.max_abs_D = torch.maximum(self.max_abs_D.to(peak_D), peak_D)
        self.count += len(x_TD)
        num_rows = min(self._max_rows - self._num_rows, self._max_rows_per_batch, len(x_TD))
        if num_rows > 0:  # spread over the whole batch, which holds several texts
            index_N = torch.linspace(0, len(x_TD) - 1, num_rows, device=x_TD.device).long()
            self._rows.append(x_TD[index_N])
            self._num_rows += num_rows

    @property
    def mean_D(self) -> Tensor:
        assert self._sum_D is not None
        return self._sum_D / self.count

    @property
    def rows_ND(self) -> Tensor:
        return torch.cat(self._rows)

    @property
    def quantized_rows_ND(self) -> Tensor:
        """The sampled rows after int8 rounding."""
        return _fake_quantize_rows(self.rows_ND)

    def apply_smoothing(self, scale_D: Tensor) -> None:
        """Divide the sampled rows by the smoothing scales."""
        self._rows = [rows_ND / scale_D for rows_ND in self._rows]


@dataclass(frozen=True, slots=True)
class SmoothingResult:
    """Search result for one layer: alpha (None: not smoothed) and the relative squared output error
    before and after."""

    place: str
    alpha: float | None
    before: float
    error: float


class ActivationObserver:
    """Records the inputs of a decoder layer's linear layers and experts during calibration."""

    def __init__(self, block: DecoderLayer, settings: QuantSettings, batches: int) -> None:
        self._block, self._settings = block, settings
        self._max_rows_per_batch = -(-settings.calibration_rows // max(1, batches))
        self.linears: dict[str, ActivationStats] = {}
        self.experts: dict[int, ActivationStats] = {}  # inputs of their down projection
        self.inputs: dict[int, ActivationStats] = {}  # inputs of their gate and up projection

    @contextmanager
    def observe(self, enabled: bool = True) -> Iterator[None]:
        """Record inputs of forward passes within the block, if `enabled`."""
        handles = []
        for name, module in self._block.named_modules() if enabled else ():
            if isinstance(module, GroupedExperts):
                handles.append(module.register_forward_pre_hook(self._record_experts))
            elif isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(self._record(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _new_stats(self) -> ActivationStats:
        return ActivationStats(self._settings.calibration_rows, self._max_rows_per_batch)

    def _record(self, name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:  # noqa: ARG001
            self.linears.setdefault(name, self._new_stats()).add(inputs[0])

        return hook

    def _record_experts(self, module: nn.Module, inputs: tuple[Tensor, Routing]) -> None:
        assert isinstance(module, GroupedExperts)
        x_TD, routing = inputs
        order = sort_by_expert(routing.expert_TK, routing.score_TE.shape[1])
        x_RD, counts = permute(x_TD, order), order.counts_E.tolist()
        inner_RF = silu_and_mul(grouped_gemm(x_RD, module.gate_up, order.counts_E))
        for stats_by_expert, rows_R in ((self.inputs, x_RD), (self.experts, inner_RF)):
            for expert, rows_N in enumerate(rows_R.split(counts)):
                stats_by_expert.setdefault(expert, self._new_stats()).add(rows_N)


def check_attention_kinds(kinds: Iterable[config.AttentionKind], settings: QuantSettings) -> None:
    """Raise QuantError if smoothing is on and does not support an attention kind."""
    unsupported = (
        sorted(set(kinds) - set(SMOOTHABLE))
        if settings.smooth and settings.quantize_linears
        else []
    )
    if unsupported:
        raise QuantError(
            f"'{unsupported[0]}' layers cannot be smoothed (only {', '.join(SMOOTHABLE)}); set "
            "'smooth' to false"
        )


@torch.no_grad()
def smooth(
    block: DecoderLayer, observer: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    """Smooth a layer in place: it quantizes better and computes the same function."""
    results: list[SmoothingResult] = []
    if settings.awq and isinstance(block.mlp, MoE):
        results += _smooth_experts(block.mlp.experts, observer, settings)
    if settings.smooth and settings.quantize_linears:
        results += _smooth_norms(block, observer, settings)
        results += _smooth_values(block.attention, observer, settings)
        for name, mlp in block.named_modules():
            if isinstance(mlp, GatedMLP):
                results.append(_smooth_down(name, mlp, observer, settings))
    return results


def _smooth_experts(
    experts: GroupedExperts, observer: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    inner = experts.gate_up.shape[1] // 2
    calibrated = [expert for expert, stats in sorted(observer.experts.items()) if stats.count]
    results = []
    for batch in batch_experts(experts.down, calibrated, settings.calibration_rows):
        batch_stats = [observer.experts[expert] for expert in batch]
        rows_ENF = pad_rows([stats.rows_ND for stats in batch_stats])
        mean_EF = torch.stack([stats.mean_D for stats in batch_stats])
        chosen, scale_EF = _search(
            [f"{EXPERTS}.{expert}.down" for expert in batch],
            _Trial(rows_ENF, [experts.down[batch]], settings.expert_args),
            ((alpha, mean_EF**alpha) for alpha in _alphas(settings)),
        )
        for expert, stats, scale_F in zip(batch, batch_stats, scale_EF, strict=True):
            experts.gate_up[expert, inner:].div_(scale_F.unsqueeze(-1))
            experts.down[expert].mul_(scale_F)
            stats.apply_smoothing(scale_F)
        results += chosen
    return results


def batch_experts(stack_EFD: Tensor, experts: list[int], rows: int) -> Iterator[list[int]]:
    """Batches of experts to search together, as many as fit in scratch memory: on a GPU each
    refinement round is a dozen launches. On a CPU one at a time: a single expert fills the cache,
    and batched products may round differently."""
    _, F, D = stack_EFD.shape
    bytes_per_expert = 4 * F * (6 * D + 5 * rows)  # several copies of weights and outputs
    budget = 0 if stack_EFD.device.type == "cpu" else scratch_bytes(stack_EFD.device)
    for part in chunks(len(experts), bytes_per_expert, budget):
        yield experts[part]


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """[E, N, D] inputs of each expert, padded with zero rows, which add no error."""
    return pad_sequence(list(rows), batch_first=True)


def _smooth_norms(
    block: DecoderLayer, observer: ActivationObserver, settings: QuantSettings
) -> Iterator[SmoothingResult]:
    """Smooth norm -> linear. The MLP norm is skipped: the router reads it too, and experts do not
    share outlier channels."""
    names = {id(module.weight): name for name, module in quantizable_linears(block).items()}
    for consumers in norm_consumers(block):
        quantized = [weight for weight in consumers.weights if id(weight) in names]
        if consumers.norm is block.mlp_norm or not quantized:
            continue
        stats = observer.linears[names[id(quantized[0])]]
        result, scale_D = search_alpha(
            names[id(quantized[0])],
            stats,
            tuple(quantized),
            settings.linear_args,
            _smoothquant_scales(stats, quantized, settings),
        )
        _scale_norm_consumers(consumers, scale_D)
        yield result


def _scale_norm_consumers(consumers: NormConsumers, scale_D: Tensor) -> None:
    consumers.norm.weight.div_(scale_D)
    for weight in consumers.weights:
        weight.mul_(scale_D)


def _smooth_values(
    attention: nn.Module, observer: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    assert isinstance(attention, model_attention.MLA | model_attention.GQA)
    stats, weight = observer.linears["attention.o"], attention.o.weight
    tie: ScaleTying = _independent
    if isinstance(attention, model_attention.GQA):
        gqa = attention.gqa
        tie = _tied_across_heads(gqa.kv_heads, gqa.heads // gqa.kv_heads)
    result, scale_D = search_alpha(
        "attention.o",
        stats,
        (weight,),
        settings.linear_args,
        _smoothquant_scales(stats, [weight], settings, tie),
    )
    weight.mul_(scale_D)
    if isinstance(attention, model_attention.MLA):
        mla = attention.mla
        value_up_HVL = attention.kv_b.weight.unflatten(0, (mla.heads, -1))[:, mla.nope :]
        value_up_HVL.div_(scale_D.view(mla.heads, -1, 1))
    else:
        gqa = attention.gqa
        scale_GD = scale_D.unflatten(0, (gqa.kv_heads, -1, gqa.dim))[:, 0]
        attention.v.weight.div_(scale_GD.reshape(-1, 1))
        if attention.v.bias is not None:
            attention.v.bias.div_(scale_GD.flatten())
    return [result]


def _smooth_down(
    name: str, mlp: GatedMLP, observer: ActivationObserver, settings: QuantSettings
) -> SmoothingResult:
    stats, weight = observer.linears[f"{name}.down"], mlp.down.weight
    candidates = _smoothquant_scales(stats, [weight], settings)
    result, scale_F = search_alpha(
        f"{name}.down", stats, (weight,), settings.linear_args, candidates
    )
    weight.mul_(scale_F)
    mlp.up.weight.div_(scale_F.unsqueeze(-1))
    return result


def search_alpha(
    place: str,
    stats: ActivationStats,
    weights: Sequence[Tensor],
    args: QuantizationArgs,
    candidates: Iterable[tuple[float, Tensor]],
) -> tuple[SmoothingResult, Tensor]:
    """The alpha with the smallest quantized output error, and its scales."""
    (result,), scale_D = _search([place], _Trial(stats.rows_ND, weights, args), candidates)
    return result, scale_D


class _Trial:
    """Calibration rows and the weights applied to them, optionally per expert."""

    def __init__(self, rows_XND: Tensor, weights: Sequence[Tensor], args: QuantizationArgs) -> None:
        self.rows_XND, self._args = rows_XND, args
        self._weights = [weight.float() for weight in weights]
        self._expected = [rows_XND @ weight.mT for weight in self._weights]
        self._norms = [_squared_sum(exact).clamp_min(1e-30) for exact in self._expected]

    def error(self, scale_XD: Tensor) -> Tensor:
        """Squared error relative to the exact outputs, summed over the weights, in float64."""
        scale_X1D = scale_XD.unsqueeze(-2)
        x_XND = _fake_quantize_rows(self.rows_XND / scale_X1D)
        total_X = torch.zeros_like(scale_XD[..., 0], dtype=torch.float64)
        for weight, expected, size_X in zip(
            self._weights, self._expected, self._norms, strict=True
        ):
            out = x_XND @ quantize(weight * scale_X1D, self._args, x_XND).dequantized_XFD.mT
            total_X += _squared_sum(out - expected) / size_X
        return total_X


def _squared_sum(out_XNF: Tensor) -> Tensor:
    return out_XNF.square().sum((-2, -1))


def _fake_quantize_rows(rows_XND: Tensor) -> Tensor:
    """Round rows to int8 and back."""
    quantized = quantize_per_token(rows_XND.flatten(0, -2))
    return (quantized.integer_RD.float() * quantized.scale_R.unsqueeze(-1)).view_as(rows_XND)


def _search(
    names: Sequence[str], trial: _Trial, candidates: Iterable[tuple[float, Tensor]]
) -> tuple[list[SmoothingResult], Tensor]:
    """The best alpha for each name, and its scales."""
    scale_XD = torch.ones_like(trial.rows_XND[..., 0, :])
    before_X = error_X = trial.error(scale_XD)
    alpha_X = torch.full_like(error_X, torch.nan)
    for alpha, raw_XD in candidates:
        trial_XD = _normalize_scales(raw_XD)
        trial_error_X = trial.error(trial_XD)
        closer_X = trial_error_X < error_X
        error_X = torch.where(closer_X, trial_error_X, error_X)
        alpha_X = torch.where(closer_X, alpha, alpha_X)
        scale_XD = torch.where(closer_X.unsqueeze(-1), trial_XD, scale_XD)
    columns = (value_X.reshape(-1).tolist() for value_X in (alpha_X, before_X, error_X))
    chosen = [
        SmoothingResult(place, None if isnan(alpha) else alpha, before, error)
        for place, alpha, before, error in zip(names, *columns, strict=True)
    ]
    return chosen, scale_XD


def _smoothquant_scales(
    stats: ActivationStats,
    weights: Sequence[Tensor],
    settings: QuantSettings,
    tie: ScaleTying | None = None,
) -> Iterator[tuple[float, Tensor]]:
    peak_D = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    log_x_D, log_w_D = _log_magnitude(stats.max_abs_D), _log_magnitude(peak_D)
    for alpha in _alphas(settings):
        yield alpha, (tie or _independent)(alpha * log_x_D - (1 - alpha) * log_w_D).exp()


def _log_magnitude(size_XD: Tensor) -> Tensor:
    """Logarithm of channel magnitudes; zero channels count as the median of the others."""
    active_XD = size_XD > 0
    ranked_XD = torch.where(active_XD, size_XD, torch.inf).sort(-1).values
    middle_X1 = (active_XD.sum(-1, keepdim=True) - 1).clamp_min(0) // 2
    median_X1 = ranked_XD.gather(-1, middle_X1)
    typical_X1 = torch.where(active_XD.any(-1, keepdim=True), median_X1, 1.0)
    return torch.where(active_XD, size_XD, typical_X1).log()


def _normalize_scales(scale_XD: Tensor) -> Tensor:
    """Centre scales around one and clamp them to a range that is safe in half precision."""
    log_XD = _log_magnitude(scale_XD)
    return (log_XD - log_XD.mean(-1, keepdim=True)).clamp(-7.0, 7.0).exp()


def _independent(log_D: Tensor) -> Tensor:
    return log_D


def _tied_across_heads(kv_heads: int, batch_stats: int) -> ScaleTying:
    """One scale per value channel, shared by the query heads of a KV head."""

    def tie(log_D: Tensor) -> Tensor:
        log_GHD = log_D.view(kv_heads, batch_stats, -1)
        return log_GHD.mean(1, keepdim=True).expand_as(log_GHD).flatten()

    return tie


def _alphas(settings: QuantSettings) -> Iterator[float]:
    return (step / settings.n_grid for step in range(settings.n_grid + 1))
