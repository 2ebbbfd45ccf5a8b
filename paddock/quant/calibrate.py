"""Smoothing: what is large in activations moves into weights, as far as the real quantizer likes.

Between a map that writes x and maps W that read it, x / s and W s compute the same. Strengths of s
are tried one by one: rows that text really produced are rounded, weights are quantized, and the one
whose output is closest to the exact one is kept, s = 1 among them.

    routed experts      up -> down      s = mean|x|^a                   (Flex-AWQ-SSZ)
    attention, dense    norm -> linear, s = max|x|^a / max|W|^(1 - a)   (flexible SmoothQuant)
    and shared parts    value -> o, up -> down

T tokens, N kept rows, D channels, F outputs or inner, E experts, R rows sorted by expert, X nothing
or the experts that are searched at once.
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
SMOOTHABLE = ("mla", "dsa", "gqa", "swa", "simple_gdn")  # from values to o there are sums alone


class ActivationStats:
    """What a linear map was given: sizes of its channels, and some of the rows."""

    def __init__(self, keep: int, keep_each: int) -> None:
        self._keep, self._keep_each = keep, keep_each
        self._kept: list[Tensor] = []
        self._held = 0
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
        room = min(self._keep - self._held, self._keep_each, len(x_TD))
        if room > 0:  # evenly from the whole batch, for it holds several texts
            at_N = torch.linspace(0, len(x_TD) - 1, room, device=x_TD.device).long()
            self._kept.append(x_TD[at_N])
            self._held += room

    @property
    def mean_D(self) -> Tensor:
        assert self._sum_D is not None
        return self._sum_D / self.count

    @property
    def rows_ND(self) -> Tensor:
        return torch.cat(self._kept)

    @property
    def quantized_rows_ND(self) -> Tensor:
        """The rows as an integer product will see them."""
        return _rounded(self.rows_ND)

    def apply_smoothing(self, scale_D: Tensor) -> None:
        """The rows after smoothing by these scales."""
        self._kept = [rows_ND / scale_D for rows_ND in self._kept]


@dataclass(frozen=True, slots=True)
class SmoothingResult:
    """What was found for one place: strength (None: left as it was) and relative squared error of
    the output, before and with it."""

    place: str
    alpha: float | None
    before: float
    error: float


class ActivationObserver:
    """Looks on while a layer reads text, and remembers what its linear maps were given."""

    def __init__(self, block: DecoderLayer, settings: QuantSettings, batches: int) -> None:
        self._block, self._settings = block, settings
        self._keep_each = -(-settings.calibration_rows // max(1, batches))
        self.linears: dict[str, ActivationStats] = {}
        self.experts: dict[int, ActivationStats] = {}  # what their down is given
        self.inputs: dict[int, ActivationStats] = {}  # and their gate and up

    @contextmanager
    def observe(self, looks: bool = True) -> Iterator[None]:
        """Everything the layer computes within the block is seen, if anyone looks."""
        handles = []
        for name, module in self._block.named_modules() if looks else ():
            if isinstance(module, GroupedExperts):
                handles.append(module.register_forward_pre_hook(self._see_experts))
            elif isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(self._see(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _new(self) -> ActivationStats:
        return ActivationStats(self._settings.calibration_rows, self._keep_each)

    def _see(self, name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, given: tuple[Tensor]) -> None:  # noqa: ARG001
            self.linears.setdefault(name, self._new()).add(given[0])

        return hook

    def _see_experts(self, module: nn.Module, given: tuple[Tensor, Routing]) -> None:
        assert isinstance(module, GroupedExperts)
        x_TD, routing = given
        order = sort_by_expert(routing.expert_TK, routing.score_TE.shape[1])
        x_RD, counts = permute(x_TD, order), order.counts_E.tolist()
        inner_RF = silu_and_mul(grouped_gemm(x_RD, module.gate_up, order.counts_E))
        for kept, rows_R in ((self.inputs, x_RD), (self.experts, inner_RF)):
            for expert, rows_N in enumerate(rows_R.split(counts)):
                kept.setdefault(expert, self._new()).add(rows_N)


def check_attention_kinds(kinds: Iterable[config.AttentionKind], settings: QuantSettings) -> None:
    """Before any work: what smoothing would change."""
    strange = (
        sorted(set(kinds) - set(SMOOTHABLE))
        if settings.smooth and settings.quantize_linears
        else []
    )
    if strange:
        raise QuantError(
            f"'{strange[0]}' layers cannot be smoothed; these can: {SMOOTHABLE}; set 'smooth' to "
            "false"
        )


@torch.no_grad()
def smooth(
    block: DecoderLayer, watch: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    """Change a layer in place so that it quantizes better and computes the same."""
    found: list[SmoothingResult] = []
    if settings.awq and isinstance(block.mlp, MoE):
        found += _smooth_experts(block.mlp.experts, watch, settings)
    if settings.smooth and settings.quantize_linears:
        found += _smooth_norms(block, watch, settings)
        found += _smooth_values(block.attention, watch, settings)
        for name, mlp in block.named_modules():
            if isinstance(mlp, GatedMLP):
                found.append(_smooth_down(name, mlp, watch, settings))
    return found


def _smooth_experts(
    experts: GroupedExperts, watch: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    inner = experts.gate_up.shape[1] // 2
    met = [expert for expert, seen in sorted(watch.experts.items()) if seen.count]
    found = []
    for some in batch_experts(experts.down, met, settings.calibration_rows):
        each = [watch.experts[expert] for expert in some]
        rows_ENF = pad_rows([seen.rows_ND for seen in each])
        mean_EF = torch.stack([seen.mean_D for seen in each])
        choices, scale_EF = _search(
            [f"{EXPERTS}.{expert}.down" for expert in some],
            _Trial(rows_ENF, [experts.down[some]], settings.expert_args),
            ((alpha, mean_EF**alpha) for alpha in _alphas(settings)),
        )
        for expert, seen, scale_F in zip(some, each, scale_EF, strict=True):
            experts.gate_up[expert, inner:].div_(scale_F.unsqueeze(-1))
            experts.down[expert].mul_(scale_F)
            seen.apply_smoothing(scale_F)
        found += choices
    return found


def batch_experts(stack_EFD: Tensor, experts: list[int], rows: int) -> Iterator[list[int]]:
    """Experts that are searched at once, each with so many rows: as many as scratch memory takes,
    for each round of refining is a dozen launches. A CPU's cache is full with one, and its products
    of many matrices may round otherwise."""
    _, F, D = stack_EFD.shape
    held = 4 * F * (6 * D + 5 * rows)  # bytes: weights and outputs are there several times
    budget = 0 if stack_EFD.device.type == "cpu" else scratch_bytes(stack_EFD.device)
    for part in chunks(len(experts), held, budget):
        yield experts[part]


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """[E, N, D] of what each expert was given. Who was given less has zeros, which never err."""
    return pad_sequence(list(rows), batch_first=True)


def _smooth_norms(
    block: DecoderLayer, watch: ActivationObserver, settings: QuantSettings
) -> Iterator[SmoothingResult]:
    """Norm -> linear, but not before the experts: their norm is the router's too, and all experts
    together have no common large channels."""
    names = {id(module.weight): name for name, module in quantizable_linears(block).items()}
    for read in norm_consumers(block):
        rounded = [weight for weight in read.weights if id(weight) in names]
        if read.norm is block.mlp_norm or not rounded:
            continue
        seen = watch.linears[names[id(rounded[0])]]
        choice, scale_D = search_alpha(
            names[id(rounded[0])],
            seen,
            tuple(rounded),
            settings.linear_args,
            _balanced(seen, rounded, settings),
        )
        _move_into_readers(read, scale_D)
        yield choice


def _move_into_readers(read: NormConsumers, scale_D: Tensor) -> None:
    read.norm.weight.div_(scale_D)
    for weight in read.weights:
        weight.mul_(scale_D)


def _smooth_values(
    attention: nn.Module, watch: ActivationObserver, settings: QuantSettings
) -> list[SmoothingResult]:
    assert isinstance(attention, model_attention.MLA | model_attention.GQA)
    seen, weight = watch.linears["attention.o"], attention.o.weight
    tie: ScaleTying = _untied
    if isinstance(attention, model_attention.GQA):
        gqa = attention.gqa
        tie = _shared_by_heads(gqa.kv_heads, gqa.heads // gqa.kv_heads)
    choice, scale_D = search_alpha(
        "attention.o",
        seen,
        (weight,),
        settings.linear_args,
        _balanced(seen, [weight], settings, tie),
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
    return [choice]


def _smooth_down(
    name: str, mlp: GatedMLP, watch: ActivationObserver, settings: QuantSettings
) -> SmoothingResult:
    seen, weight = watch.linears[f"{name}.down"], mlp.down.weight
    strengths = _balanced(seen, [weight], settings)
    choice, scale_F = search_alpha(f"{name}.down", seen, (weight,), settings.linear_args, strengths)
    weight.mul_(scale_F)
    mlp.up.weight.div_(scale_F.unsqueeze(-1))
    return choice


def search_alpha(
    place: str,
    seen: ActivationStats,
    weights: Sequence[Tensor],
    grid: QuantizationArgs,
    strengths: Iterable[tuple[float, Tensor]],
) -> tuple[SmoothingResult, Tensor]:
    """The strength whose rounded product is closest to the exact one, and its scales."""
    (choice,), scale_D = _search([place], _Trial(seen.rows_ND, weights, grid), strengths)
    return choice, scale_D


class _Trial:
    """Rows and the weights that read them; of several experts each has its own."""

    def __init__(self, rows_XND: Tensor, weights: Sequence[Tensor], grid: QuantizationArgs) -> None:
        self.rows_XND, self._grid = rows_XND, grid
        self._weights = [weight.float() for weight in weights]
        self._exact = [rows_XND @ weight.mT for weight in self._weights]
        self._size = [_energy(exact).clamp_min(1e-30) for exact in self._exact]

    def error(self, scale_XD: Tensor) -> Tensor:
        """Squared, relative to the exact outputs, summed over the weights, in float64."""
        scale_X1D = scale_XD.unsqueeze(-2)
        x_XND = _rounded(self.rows_XND / scale_X1D)
        total_X = torch.zeros_like(scale_XD[..., 0], dtype=torch.float64)
        for weight, wanted, size_X in zip(self._weights, self._exact, self._size, strict=True):
            out = x_XND @ quantize(weight * scale_X1D, self._grid, x_XND).dequantized_XFD.mT
            total_X += _energy(out - wanted) / size_X
        return total_X


def _energy(out_XNF: Tensor) -> Tensor:
    return out_XNF.square().sum((-2, -1))


def _rounded(rows_XND: Tensor) -> Tensor:
    """What int8 makes of rows."""
    rounded = quantize_per_token(rows_XND.flatten(0, -2))
    return (rounded.integer_RD.float() * rounded.scale_R.unsqueeze(-1)).view_as(rows_XND)


def _search(
    places: Sequence[str], trial: _Trial, strengths: Iterable[tuple[float, Tensor]]
) -> tuple[list[SmoothingResult], Tensor]:
    """Of each place the best strength, and its scales."""
    scale_XD = torch.ones_like(trial.rows_XND[..., 0, :])
    before_X = error_X = trial.error(scale_XD)
    alpha_X = torch.full_like(error_X, torch.nan)
    for alpha, raw_XD in strengths:
        tried_XD = _tame(raw_XD)
        here_X = trial.error(tried_XD)
        closer_X = here_X < error_X
        error_X = torch.where(closer_X, here_X, error_X)
        alpha_X = torch.where(closer_X, alpha, alpha_X)
        scale_XD = torch.where(closer_X.unsqueeze(-1), tried_XD, scale_XD)
    columns = (found_X.reshape(-1).tolist() for found_X in (alpha_X, before_X, error_X))
    choices = [
        SmoothingResult(place, None if isnan(alpha) else alpha, before, error)
        for place, alpha, before, error in zip(places, *columns, strict=True)
    ]
    return choices, scale_XD


def _balanced(
    seen: ActivationStats,
    weights: Sequence[Tensor],
    settings: QuantSettings,
    tie: ScaleTying | None = None,
) -> Iterator[tuple[float, Tensor]]:
    peak_D = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    log_x_D, log_w_D = _log(seen.max_abs_D), _log(peak_D)
    for alpha in _alphas(settings):
        yield alpha, (tie or _untied)(alpha * log_x_D - (1 - alpha) * log_w_D).exp()


def _log(size_XD: Tensor) -> Tensor:
    """Of channels' sizes; a silent one counts as the median of the others."""
    loud_XD = size_XD > 0
    ranked_XD = torch.where(loud_XD, size_XD, torch.inf).sort(-1).values
    middle_X1 = (loud_XD.sum(-1, keepdim=True) - 1).clamp_min(0) // 2
    median_X1 = ranked_XD.gather(-1, middle_X1)
    typical_X1 = torch.where(loud_XD.any(-1, keepdim=True), median_X1, 1.0)
    return torch.where(loud_XD, size_XD, typical_X1).log()


def _tame(scale_XD: Tensor) -> Tensor:
    """Around one, and never so far from it that half precision would suffer."""
    log_XD = _log(scale_XD)
    return (log_XD - log_XD.mean(-1, keepdim=True)).clamp(-7.0, 7.0).exp()


def _untied(log_D: Tensor) -> Tensor:
    return log_D


def _shared_by_heads(kv_heads: int, each: int) -> ScaleTying:
    """One scale for a value channel that several heads read."""

    def tie(log_D: Tensor) -> Tensor:
        log_GHD = log_D.view(kv_heads, each, -1)
        return log_GHD.mean(1, keepdim=True).expand_as(log_GHD).flatten()

    return tie


def _alphas(settings: QuantSettings) -> Iterator[float]:
    return (step / settings.n_grid for step in range(settings.n_grid + 1))
