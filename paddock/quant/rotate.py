"""QuaRot: norms folded and the network turned, its function unchanged.

A turn is an orthonormal map M. Whoever reads x is given M x instead and has M applied to its rows
(w . x = M w . M x); whoever writes x has it applied to its columns. An RMS norm without weights
commutes with turns, so norms are folded into their readers first. Four things are turned:

    the residual stream    embedding and every o, down; read by q, q_a, kv_a (or q, k, v), gate, up,
                           router, indexer key and head weights, output head
    the query latent       q_a; read by q_b and the indexer's queries
    the key-value latent   the latent rows of kv_a, never its rope rows; read by kv_b
    each head's values     the value rows of kv_b (or v); read by o

The MTP layer keeps its weights and its basis, and `TurnedMTP` turns what it reads back and what it
says forth. Its weights could not absorb that: it norms the trunk's normed state once more, weight
included, and shares a head with it.

N size of a turn, T tokens, D hidden, X any leading dims.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor, nn

from paddock.kernels.hadamard import hadamard, hadamard_inverse, hadamard_matrix
from paddock.model import (
    MTP,
    AuxOutputs,
    DecoderLayer,
    ForwardContext,
    GatedMLP,
    ModelConfig,
    MoE,
    RMSNorm,
    TopKSelection,
    Transformer,
)
from paddock.model import attention as model_attention
from paddock.quant.w4a8 import QuantError

ROTATABLE = ("mla", "dsa", "gqa", "swa")
HADAMARD = (1, 12, 20)  # of these, times a power of two, there is a Hadamard matrix


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """x -> Q (sign * x), Q orthonormal and spreading each number over all.

    Q is the product of a small matrix and Sylvester's Hadamard matrix of a power of two: Hadamard's
    own of 12 or 20 where the size is such a multiple, so that all numbers weigh the same, and else
    a cosine transform of the size's odd part.

    >>> x = torch.randn(3, 56, dtype=torch.float64)
    >>> turn = Rotation.of(56, torch.Generator().manual_seed(0))
    >>> torch.allclose(turn.inverse(turn.apply(x)), x)
    True
    """

    sign_N: Tensor
    small_MM: Tensor

    @classmethod
    def random(cls, size: int, chance: torch.Generator) -> "Rotation":
        return cls.from_signs(torch.randint(0, 2, (size,), generator=chance).to(torch.int8) * 2 - 1)

    @classmethod
    def from_signs(cls, sign_N: Tensor) -> "Rotation":
        """The one with these signs."""
        return cls(sign_N, _small(len(sign_N)).to(sign_N.device))

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.sign_N.to(device), self.small_MM.to(device))

    def apply(self, x_XN: Tensor) -> Tensor:
        x_XMS = hadamard((x_XN * self.sign_N.to(x_XN.dtype)).unflatten(-1, self._factors))
        return (self.small_MM.to(x_XN.dtype) @ x_XMS).flatten(-2)

    def inverse(self, x_XN: Tensor) -> Tensor:
        x_XMS = self.small_MM.to(x_XN.dtype).T @ x_XN.unflatten(-1, self._factors)
        return hadamard_inverse(x_XMS).flatten(-2) * self.sign_N.to(x_XN.dtype)

    @property
    def _factors(self) -> tuple[int, int]:
        return len(self.small_MM), len(self.sign_N) // len(self.small_MM)


def _small(size: int) -> Tensor:
    """What is left of a size beside a power of two, as an orthonormal matrix."""
    for known in HADAMARD:
        if size % known == 0 and (size // known).bit_count() == 1:
            return hadamard_matrix(known, dtype=torch.float64)
    return _cosine(size // (size & -size))


def _cosine(size: int) -> Tensor:
    """The orthonormal cosine transform."""
    row_M, column_M = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size) + 0.5
    matrix_MM = (pi / size * row_M * column_M).cos() * (2 / size) ** 0.5
    matrix_MM[0] /= 2**0.5
    return matrix_MM


@dataclass(frozen=True, slots=True, eq=False)
class Rotations:
    """The same for all layers."""

    residual: Rotation
    query: Rotation | None
    latent: Rotation | None
    value: Rotation | None  # of a head of latent attention
    grouped: Rotation | None  # and of grouped attention: a network may have both

    @classmethod
    def from_config(cls, config: ModelConfig, seed: int) -> "Rotations":
        if strange := sorted(set(config.attention) - set(ROTATABLE)):
            raise QuantError(f"'{strange[0]}' layers cannot be turned; these can: {ROTATABLE}")
        chance = torch.Generator().manual_seed(seed)
        mla, gqa = config.mla, config.gqa
        sizes = (
            None if mla is None else mla.q_rank,
            None if mla is None else mla.kv_rank,
            None if mla is None else mla.value,
            None if gqa is None else gqa.dim,
        )
        residual = Rotation.random(config.hidden, chance)
        return cls(
            residual, *(None if size is None else Rotation.random(size, chance) for size in sizes)
        )

    def to(self, device: torch.device) -> "Rotations":
        others = (self.query, self.latent, self.value, self.grouped)
        moved = (None if turn is None else turn.to(device) for turn in others)
        return Rotations(self.residual.to(device), *moved)


@dataclass(frozen=True, slots=True, eq=False)
class NormConsumers:
    """A norm and the weights whose columns read it."""

    norm: RMSNorm
    weights: tuple[Tensor, ...]


def norm_consumers(block: DecoderLayer) -> Iterator[NormConsumers]:
    """Every norm of a layer that stands before linear maps."""
    yield NormConsumers(block.attention_norm, tuple(_attention_reads(block.attention)))
    yield NormConsumers(block.mlp_norm, tuple(_mlp_reads(block.mlp)))
    attention = block.attention
    if isinstance(attention, model_attention.MLA):
        yield NormConsumers(attention.kv_norm, (attention.kv_b.weight,))
        if attention.mla.q_rank is not None:
            indexer = getattr(attention, "indexer", None)
            further = () if indexer is None else (indexer.query.weight,)
            yield NormConsumers(attention.q_norm, (attention.q_b.weight, *further))


def _attention_reads(attention: nn.Module) -> Iterator[Tensor]:
    if isinstance(attention, model_attention.MLA):
        yield (attention.q if attention.mla.q_rank is None else attention.q_a).weight
        yield attention.kv_a.weight
        indexer = getattr(attention, "indexer", None)
        if indexer is not None:
            yield from (indexer.key.weight, indexer.weights.weight)
    else:
        assert isinstance(attention, model_attention.GQA)
        yield from (attention.q.weight, attention.k.weight, attention.v.weight)


def _mlp_reads(mlp: GatedMLP | MoE) -> Iterator[Tensor]:
    if isinstance(mlp, MoE):
        yield from (mlp.router.weight, mlp.experts.gate_up)
        if mlp.shared is not None:
            yield from _mlp_reads(mlp.shared)
    else:
        yield from (mlp.gate.weight, mlp.up.weight)


def _residual_writers(block: DecoderLayer) -> Iterator[Tensor]:
    yield block.attention.o.weight  # type: ignore[union-attr,misc]
    if isinstance(block.mlp, MoE):
        yield block.mlp.experts.down
        if block.mlp.shared is not None:
            yield block.mlp.shared.down.weight
    else:
        yield block.mlp.down.weight


@torch.no_grad()
def fuse_norms(block: DecoderLayer) -> None:
    """Norm weights into the weights behind them; the norms keep ones."""
    for read in norm_consumers(block):
        for weight in read.weights:
            weight.mul_(read.norm.weight)
        read.norm.weight.fill_(1.0)


@torch.no_grad()
def rotate_layer(block: DecoderLayer, turns: Rotations) -> None:
    """A layer with folded norms, turned in place. Computed in float64."""
    turns = turns.to(block.attention_norm.weight.device)
    for read in (NormConsumers(block.attention_norm, ()), NormConsumers(block.mlp_norm, ())):
        assert bool((read.norm.weight == 1).all()), "norms are folded before they are turned"
    attention = block.attention
    rotate_columns((*_attention_reads(attention), *_mlp_reads(block.mlp)), turns.residual)
    for weight in _residual_writers(block):
        rotate_rows(weight, turns.residual)
    if isinstance(attention, model_attention.MLA):
        _turn_latents(attention, turns)
    else:
        assert isinstance(attention, model_attention.GQA)
        _turn_values(attention, turns)


def _turn_latents(attention: model_attention.MLA, turns: Rotations) -> None:
    mla = attention.mla
    assert turns.latent is not None
    assert turns.value is not None
    rotate_rows(attention.kv_a.weight[: mla.kv_rank], turns.latent)
    rotate_columns((attention.kv_b.weight,), turns.latent)
    if turns.query is not None:
        rotate_rows(attention.q_a.weight, turns.query)
        indexer = getattr(attention, "indexer", None)
        further = () if indexer is None else (indexer.query.weight,)
        rotate_columns((attention.q_b.weight, *further), turns.query)
    value_up_HVL = attention.kv_b.weight.unflatten(0, (mla.heads, -1))[:, mla.nope :]
    rotate_rows(value_up_HVL, turns.value)
    rotate_columns((_by_head(attention.o.weight, mla.heads),), turns.value)


def _turn_values(attention: model_attention.GQA, turns: Rotations) -> None:
    gqa = attention.gqa
    assert turns.grouped is not None
    rotate_rows(attention.v.weight.unflatten(0, (gqa.kv_heads, -1)), turns.grouped)
    if attention.v.bias is not None:
        rotate_columns((attention.v.bias.unflatten(0, (gqa.kv_heads, -1)),), turns.grouped)
    rotate_columns((_by_head(attention.o.weight, gqa.heads),), turns.grouped)
    if attention.o.bias is not None:
        rotate_columns((attention.o.bias,), turns.residual)


def _by_head(weight_DF: Tensor, heads: int) -> Tensor:
    """[H, D, V]: what each head's values are read with."""
    return weight_DF.unflatten(1, (heads, -1)).transpose(0, 1)


@torch.no_grad()
def rotate_columns(weights: Iterable[Tensor], turn: Rotation) -> None:
    """Weights whose last dim reads what is turned, in place."""
    for weight in weights:
        for part in weight if weight.ndim == 3 else (weight,):  # a stack at once is too wide
            part.copy_(turn.apply(part.double()))


@torch.no_grad()
def rotate_rows(weight_XFD: Tensor, turn: Rotation) -> None:
    """A weight whose rows write what is turned, in place."""
    for part_FD in weight_XFD if weight_XFD.ndim == 3 else (weight_XFD,):
        part_FD.copy_(turn.apply(part_FD.double().mT).mT)


@torch.no_grad()
def rotate_head(head_VD: Tensor, norm_D: Tensor, turn: Rotation) -> Tensor:
    """The output head with the final norm's weight folded in, for turned states."""
    turn = turn.to(head_VD.device)
    return turn.apply(head_VD.double() * norm_D.double()).to(head_VD.dtype)


class RotatedMTP(MTP):
    """An MTP layer in its own basis, behind a trunk whose states are turned.

    The trunk's state comes without the final norm's weight, which the turned head holds: `scale` is
    that weight. What goes out is divided by it, so that the head makes of it what the plain one
    would, and the next depth can read it as it reads the trunk's.
    """

    sign: Tensor
    small: Tensor
    scale: Tensor

    def __init__(self, plain: MTP, sign_D: Tensor, scale_D: Tensor) -> None:
        nn.Module.__init__(self)  # nothing is born here: the plain layer's parts move in
        for name, part in plain.named_children():
            self.add_module(name, part)
        turn = Rotation.from_signs(sign_D)
        self.register_buffer("sign", turn.sign_N.clone(), persistent=False)
        self.register_buffer("small", turn.small_MM, persistent=False)
        self.register_buffer("scale", scale_D.float(), persistent=False)

    def forward(
        self,
        hidden_TD: Tensor,
        next_embed_TD: Tensor,
        step: ForwardContext,
        selection: TopKSelection | None = None,
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        turn, dtype = Rotation(self.sign, self.small), hidden_TD.dtype
        plain_TD = (turn.inverse(hidden_TD.float()) * self.scale).to(dtype)
        embed_TD = turn.inverse(next_embed_TD.float()).to(dtype)
        state_TD, kept, notes = super().forward(plain_TD, embed_TD, step, selection)
        return turn.apply(state_TD.float() / self._divisor()).to(dtype), kept, notes

    def _divisor(self) -> Tensor:
        """A channel that the final norm all but silences is silent in drafts too: dividing by next
        to nothing would drown the others in its rounding."""
        least = 1e-4 * self.scale.abs().max()
        away = torch.where(self.scale < 0, -least, least)
        return torch.where(self.scale.abs() < least, away, self.scale)


@torch.no_grad()
def rotate(network: Transformer, seed: int = 0) -> Transformer:
    """The same function with no outstanding channels; in place. A tied head is untied."""
    config = network.config
    turns = Rotations.from_config(config, seed).to(network.embed.weight.device)
    head = rotate_head(network.head.weight, network.norm.weight, turns.residual)
    scale_D = network.norm.weight.detach().clone()
    network.head.weight = nn.Parameter(head)
    network.config = config.model_copy(update={"tied": False})
    network.norm.weight.fill_(1.0)
    rotate_columns((network.embed.weight,), turns.residual)
    for block in network.layers:
        assert isinstance(block, DecoderLayer)
        fuse_norms(block)
        rotate_layer(block, turns)
    if network.mtp is not None:
        network.mtp = RotatedMTP(network.mtp, turns.residual.sign_N, scale_D)
    return network
