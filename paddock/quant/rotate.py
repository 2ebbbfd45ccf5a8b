"""QuaRot rotation: fold norms and rotate activations so that they have no outlier channels.

A rotation is an orthonormal map M; the function of the network does not change. A layer that reads
x gets M x instead and has M applied to its rows (w . x = M w . M x); a layer that writes x has it
applied to its columns. An RMSNorm without weights commutes with rotations, so norm weights are
folded into the layers behind them first. Four activations are rotated:

    the residual stream    embedding and every o, down; read by q, q_a, kv_a (or q, k, v), gate, up,
                           router, indexer key and head weights, output head
    the query latent       q_a; read by q_b and the indexer's queries
    the key-value latent   the latent rows of kv_a, never its rope rows; read by kv_b
    each head's values     the value rows of kv_b (or v); read by o

The MTP layer keeps its weights and its basis; `RotatedMTP` rotates its inputs back and its outputs
forth. Its weights cannot absorb the rotation: it norms the trunk's normed state again, weight
included, and shares the output head.

N size of a rotation, T tokens, D hidden, X any leading dims.
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
HADAMARD = (1, 12, 20)  # Hadamard matrices exist for these sizes times a power of two


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """x -> Q (sign * x) with an orthonormal Q that spreads each channel over all channels.

    Q is the Kronecker product of a small matrix and Sylvester's Hadamard matrix of a power of two:
    the Hadamard matrix of size 1, 12 or 20 where it fits, so that all entries have the same
    magnitude, and otherwise a cosine transform of the odd part of the size.

    >>> x = torch.randn(3, 56, dtype=torch.float64)
    >>> rotation = Rotation.random(56, torch.Generator().manual_seed(0))
    >>> torch.allclose(rotation.inverse(rotation.apply(x)), x)
    True
    """

    sign_N: Tensor
    small_MM: Tensor

    @classmethod
    def random(cls, size: int, rng: torch.Generator) -> "Rotation":
        return cls.from_signs(torch.randint(0, 2, (size,), generator=rng).to(torch.int8) * 2 - 1)

    @classmethod
    def from_signs(cls, sign_N: Tensor) -> "Rotation":
        """The rotation with these signs."""
        return cls(sign_N, _small_factor(len(sign_N)).to(sign_N.device))

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


def _small_factor(size: int) -> Tensor:
    """An orthonormal matrix of the size's factor besides a power of two."""
    for known in HADAMARD:
        if size % known == 0 and (size // known).bit_count() == 1:
            return hadamard_matrix(known, dtype=torch.float64)
    return _cosine_transform(size // (size & -size))


def _cosine_transform(size: int) -> Tensor:
    """The orthonormal cosine transform (DCT)."""
    row_M, column_M = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size) + 0.5
    matrix_MM = (pi / size * row_M * column_M).cos() * (2 / size) ** 0.5
    matrix_MM[0] /= 2**0.5
    return matrix_MM


@dataclass(frozen=True, slots=True, eq=False)
class Rotations:
    """The rotations of a network, the same for all layers."""

    residual: Rotation
    query: Rotation | None
    latent: Rotation | None
    value: Rotation | None  # value head of latent attention
    grouped: Rotation | None  # value head of grouped attention; a network may have both

    @classmethod
    def from_config(cls, config: ModelConfig, seed: int) -> "Rotations":
        if unsupported := sorted(set(config.attention) - set(ROTATABLE)):
            raise QuantError(
                f"'{unsupported[0]}' layers cannot be rotated, only {', '.join(ROTATABLE)}"
            )
        rng = torch.Generator().manual_seed(seed)
        mla, gqa = config.mla, config.gqa
        sizes = (
            None if mla is None else mla.q_rank,
            None if mla is None else mla.kv_rank,
            None if mla is None else mla.value,
            None if gqa is None else gqa.dim,
        )
        residual = Rotation.random(config.hidden, rng)
        return cls(
            residual, *(None if size is None else Rotation.random(size, rng) for size in sizes)
        )

    def to(self, device: torch.device) -> "Rotations":
        others = (self.query, self.latent, self.value, self.grouped)
        moved = (None if rotation is None else rotation.to(device) for rotation in others)
        return Rotations(self.residual.to(device), *moved)


@dataclass(frozen=True, slots=True, eq=False)
class NormConsumers:
    """A norm and the weights that are applied to its output."""

    norm: RMSNorm
    weights: tuple[Tensor, ...]


def norm_consumers(block: DecoderLayer) -> Iterator[NormConsumers]:
    """Every norm of a layer that feeds linear layers."""
    yield NormConsumers(block.attention_norm, tuple(_attention_inputs(block.attention)))
    yield NormConsumers(block.mlp_norm, tuple(_mlp_inputs(block.mlp)))
    attention = block.attention
    if isinstance(attention, model_attention.MLA):
        yield NormConsumers(attention.kv_norm, (attention.kv_b.weight,))
        if attention.mla.q_rank is not None:
            indexer = getattr(attention, "indexer", None)
            extra = () if indexer is None else (indexer.query.weight,)
            yield NormConsumers(attention.q_norm, (attention.q_b.weight, *extra))


def _attention_inputs(attention: nn.Module) -> Iterator[Tensor]:
    if isinstance(attention, model_attention.MLA):
        yield (attention.q if attention.mla.q_rank is None else attention.q_a).weight
        yield attention.kv_a.weight
        indexer = getattr(attention, "indexer", None)
        if indexer is not None:
            yield from (indexer.key.weight, indexer.weights.weight)
    else:
        assert isinstance(attention, model_attention.GQA)
        yield from (attention.q.weight, attention.k.weight, attention.v.weight)


def _mlp_inputs(mlp: GatedMLP | MoE) -> Iterator[Tensor]:
    if isinstance(mlp, MoE):
        yield from (mlp.router.weight, mlp.experts.gate_up)
        if mlp.shared is not None:
            yield from _mlp_inputs(mlp.shared)
    else:
        yield from (mlp.gate.weight, mlp.up.weight)


def _residual_outputs(block: DecoderLayer) -> Iterator[Tensor]:
    yield block.attention.o.weight  # type: ignore[union-attr,misc]
    if isinstance(block.mlp, MoE):
        yield block.mlp.experts.down
        if block.mlp.shared is not None:
            yield block.mlp.shared.down.weight
    else:
        yield block.mlp.down.weight


@torch.no_grad()
def fuse_norms(block: DecoderLayer) -> None:
    """Fold norm weights into the linear weights behind them; norm weights become one."""
    for consumers in norm_consumers(block):
        for weight in consumers.weights:
            weight.mul_(consumers.norm.weight)
        consumers.norm.weight.fill_(1.0)


@torch.no_grad()
def rotate_layer(block: DecoderLayer, rotations: Rotations) -> None:
    """Rotate a layer with folded norms in place, computed in float64."""
    rotations = rotations.to(block.attention_norm.weight.device)
    for consumers in (NormConsumers(block.attention_norm, ()), NormConsumers(block.mlp_norm, ())):
        assert bool((consumers.norm.weight == 1).all()), "fold the norms before rotating"
    attention = block.attention
    rotate_columns((*_attention_inputs(attention), *_mlp_inputs(block.mlp)), rotations.residual)
    for weight in _residual_outputs(block):
        rotate_rows(weight, rotations.residual)
    if isinstance(attention, model_attention.MLA):
        _rotate_mla(attention, rotations)
    else:
        assert isinstance(attention, model_attention.GQA)
        _rotate_gqa(attention, rotations)


def _rotate_mla(attention: model_attention.MLA, rotations: Rotations) -> None:
    mla = attention.mla
    assert rotations.latent is not None
    assert rotations.value is not None
    rotate_rows(attention.kv_a.weight[: mla.kv_rank], rotations.latent)
    rotate_columns((attention.kv_b.weight,), rotations.latent)
    if rotations.query is not None:
        rotate_rows(attention.q_a.weight, rotations.query)
        indexer = getattr(attention, "indexer", None)
        extra = () if indexer is None else (indexer.query.weight,)
        rotate_columns((attention.q_b.weight, *extra), rotations.query)
    value_up_HVL = attention.kv_b.weight.unflatten(0, (mla.heads, -1))[:, mla.nope :]
    rotate_rows(value_up_HVL, rotations.value)
    rotate_columns((_by_head(attention.o.weight, mla.heads),), rotations.value)


def _rotate_gqa(attention: model_attention.GQA, rotations: Rotations) -> None:
    gqa = attention.gqa
    assert rotations.grouped is not None
    rotate_rows(attention.v.weight.unflatten(0, (gqa.kv_heads, -1)), rotations.grouped)
    if attention.v.bias is not None:
        rotate_columns((attention.v.bias.unflatten(0, (gqa.kv_heads, -1)),), rotations.grouped)
    rotate_columns((_by_head(attention.o.weight, gqa.heads),), rotations.grouped)
    if attention.o.bias is not None:
        rotate_columns((attention.o.bias,), rotations.residual)


def _by_head(weight_DF: Tensor, heads: int) -> Tensor:
    """[H, D, V]: the output projection of each head's values."""
    return weight_DF.unflatten(1, (heads, -1)).transpose(0, 1)


@torch.no_grad()
def rotate_columns(weights: Iterable[Tensor], rotation: Rotation) -> None:
    """Rotate the input dimension (the last) of weights in place."""
    for weight in weights:
        for part in (
            weight if weight.ndim == 3 else (weight,)
        ):  # one matrix at a time: a whole stack in float64 is too large
            part.copy_(rotation.apply(part.double()))


@torch.no_grad()
def rotate_rows(weight_XFD: Tensor, rotation: Rotation) -> None:
    """Rotate the output dimension (the rows) of a weight in place."""
    for part_FD in weight_XFD if weight_XFD.ndim == 3 else (weight_XFD,):
        part_FD.copy_(rotation.apply(part_FD.double().mT).mT)


@torch.no_grad()
def rotate_head(head_VD: Tensor, norm_D: Tensor, rotation: Rotation) -> Tensor:
    """The output head with the final norm's weight folded in, for rotated states."""
    rotation = rotation.to(head_VD.device)
    return rotation.apply(head_VD.double() * norm_D.double()).to(head_VD.dtype)


class RotatedMTP(MTP):
    """An MTP layer in its own basis behind a rotated trunk.

    The trunk's state lacks the final norm's weight, which is folded into the rotated head: `scale`
    is that weight. Outputs are divided by it, so that the rotated head and the next depth get what
    they get from the trunk.
    """

    sign: Tensor
    small: Tensor
    scale: Tensor

    def __init__(self, mtp: MTP, sign_D: Tensor, scale_D: Tensor) -> None:
        nn.Module.__init__(self)  # no new weights: take over the submodules of `mtp`
        for name, part in mtp.named_children():
            self.add_module(name, part)
        rotation = Rotation.from_signs(sign_D)
        self.register_buffer("sign", rotation.sign_N.clone(), persistent=False)
        self.register_buffer("small", rotation.small_MM, persistent=False)
        self.register_buffer("scale", scale_D.float(), persistent=False)

    def forward(
        self,
        hidden_TD: Tensor,
        next_embed_TD: Tensor,
        ctx: ForwardContext,
        selection: TopKSelection | None = None,
    ) -> tuple[Tensor, TopKSelection | None, AuxOutputs]:
        rotation, dtype = Rotation(self.sign, self.small), hidden_TD.dtype
        plain_TD = (rotation.inverse(hidden_TD.float()) * self.scale).to(dtype)
        embed_TD = rotation.inverse(next_embed_TD.float()).to(dtype)
        state_TD, new_selection, aux = super().forward(plain_TD, embed_TD, ctx, selection)
        return rotation.apply(state_TD.float() / self._divisor()).to(dtype), new_selection, aux

    def _divisor(self) -> Tensor:
        """The scale, bounded away from zero: dividing by a near-zero scale would swamp the other
        channels with that channel's rounding error."""
        min_scale = 1e-4 * self.scale.abs().max()
        clamped = torch.where(self.scale < 0, -min_scale, min_scale)
        return torch.where(self.scale.abs() < min_scale, clamped, self.scale)


@torch.no_grad()
def rotate(network: Transformer, seed: int = 0) -> Transformer:
    """Rotate a network in place; its function does not change. A tied head is untied."""
    config = network.config
    rotations = Rotations.from_config(config, seed).to(network.embed.weight.device)
    head = rotate_head(network.head.weight, network.norm.weight, rotations.residual)
    scale_D = network.norm.weight.detach().clone()
    network.head.weight = nn.Parameter(head)
    network.config = config.model_copy(update={"tied": False})
    network.norm.weight.fill_(1.0)
    rotate_columns((network.embed.weight,), rotations.residual)
    for block in network.layers:
        assert isinstance(block, DecoderLayer)
        fuse_norms(block)
        rotate_layer(block, rotations)
    if network.mtp is not None:
        network.mtp = RotatedMTP(network.mtp, rotations.residual.sign_N, scale_D)
    return network
