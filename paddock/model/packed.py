"""Packed serving network: weights laid out once for the CPU's vector units, in place of plain ones.

`pack_weights` replaces linear layers, gated MLPs, experts and a tied embedding by modules that
compute the same. Names stay: `state_dict` holds unpacked copies, and `load_state_dict` packs what
it is given. `packed_tensors` are the places to write new weights to, one by one. A packed network
has no gradients.

T tokens, D inputs or hidden, F outputs or inner, E experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paddock.kernels import cpu
from paddock.kernels.packed_linear import (
    PANEL,
    PackedExpertWeights,
    PrepackedWeight,
    empty_panels,
    is_packable,
    packed_experts,
    packed_gate_up,
    packed_linear,
    packed_stack,
    unpack,
    unpack_rows,
    write,
)
from paddock.model.attention.gqa import GQA, SlidingWindowAttention
from paddock.model.attention.mla import MLA
from paddock.model.decoder_layer import DecoderLayer
from paddock.model.forward_context import ForwardContext
from paddock.model.linear import Linear
from paddock.model.moe import GatedMLP, GroupedExperts, Routing
from paddock.model.packed_layer import fuse_layers

if TYPE_CHECKING:
    from paddock.model.transformer import Transformer


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A weight, or a stack of weights of experts, made of packed matrices.

    `parts[e]` are the matrices of expert e whose outputs follow one another.
    """

    parts: tuple[tuple[PrepackedWeight, ...], ...]
    stacked: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that are written and read."""
        stored = self.parts[0][0].panels.dtype
        return torch.float32 if stored == torch.int8 else stored

    @property
    def shape(self) -> tuple[int, ...]:
        outputs = sum(weight.outputs for weight in self.parts[0])
        matrix = (outputs, self.parts[0][0].inputs)
        return (len(self.parts), *matrix) if self.stacked else matrix

    def copy_(self, new: Tensor) -> None:
        """Pack the values of `new`, of the shape of `read()`."""
        for weights, matrix_FD in zip(self.parts, new if self.stacked else (new,), strict=True):
            outputs = [weight.outputs for weight in weights]
            for weight, rows_FD in zip(weights, matrix_FD.split(outputs), strict=True):
                write(weight, rows_FD)

    def read(self) -> Tensor:
        """An unpacked copy."""
        matrices = [torch.cat([unpack(weight) for weight in weights]) for weights in self.parts]
        return torch.stack(matrices) if self.stacked else matrices[0]

    def piece(self, expert: int | None, rows: tuple[int, int] | None) -> "PackedTensor":
        """The part of one expert, or of a range of its rows that is one matrix."""
        if expert is None:
            return self
        weights = self.parts[expert]
        if rows is None:
            return PackedTensor((weights,))
        start, found = 0, []
        for weight in weights:
            if (start, start + weight.outputs) == tuple(rows):
                found.append(weight)
            start += weight.outputs
        assert len(found) == 1, rows
        return PackedTensor((tuple(found),))


class PackedModule(nn.Module):
    """Base class: packed tensors by name, in and out of state dicts."""

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.packed_tensors().items():
            destination[prefix + name] = tensor.read()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        taken = {prefix + name: tensor for name, tensor in self.packed_tensors().items()}
        for name, tensor in taken.items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
        others = {name: x for name, x in state_dict.items() if name not in taken}
        super()._load_from_state_dict(others, prefix, *rest)


class PackedLinear(PackedModule):
    """A linear layer whose weight is stored as panels."""

    bias: Tensor | None

    def __init__(
        self, linear: nn.Linear, dtype: torch.dtype | None = None, panels: Tensor | None = None
    ) -> None:
        """With `panels` the weight is written there."""
        super().__init__()
        weight = linear.weight.detach()
        if panels is None:
            panels = empty_panels(weight.shape, dtype or weight.dtype)
        self.packed = PrepackedWeight(panels, *weight.shape)
        write(self.packed, weight)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x_TD: Tensor) -> Tensor:
        return packed_linear(x_TD, self.packed, self.bias)

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        return {"weight": PackedTensor(((self.packed,),))}

    @property
    def weight(self) -> Tensor:
        """A copy of the [F, D] matrix."""
        return unpack(self.packed)


class PackedEmbedding(PackedModule):
    """The embedding of a tied network: rows of the output head."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = (head,)  # not a submodule: the weights belong to the head
        self.dtype = dtype

    def forward(self, token_T: Tensor) -> Tensor:
        return unpack_rows(self._head[0].packed, token_T).to(self.dtype)

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        return self._head[0].packed_tensors()


class PackedMLP(PackedModule):
    """A gated MLP; panels of `gate` and `up` alternate."""

    def __init__(self, mlp: GatedMLP, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.both = _interleaved(
            mlp.gate.weight.detach(), mlp.up.weight.detach(), dtype
        )
        self.inner = self.gate.outputs
        self.down = PackedLinear(mlp.down, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(packed_gate_up(x_TD, self.both, self.inner))  # type: ignore[no-any-return]

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        pairs = {"gate.weight": self.gate, "up.weight": self.up}
        return {name: PackedTensor(((weight,),)) for name, weight in pairs.items()}


def _interleaved(
    gate: Tensor, up: Tensor, dtype: torch.dtype | None
) -> tuple[PrepackedWeight, PrepackedWeight, PrepackedWeight]:
    """Gate, up, and both as one packed weight whose panels alternate."""
    shape = gate.shape
    panels = -(-shape[0] // PANEL)
    both = empty_panels((2 * panels * PANEL, shape[1]), dtype or gate.dtype)
    parts = [PrepackedWeight(both[i::2], *shape) for i in range(2)]
    for part, weight in zip(parts, (gate, up), strict=True):
        write(part, weight)
    return parts[0], parts[1], PrepackedWeight(both, 2 * panels * PANEL, shape[1])


class PackedExperts(PackedModule):
    """All experts of a layer."""

    def __init__(self, experts: GroupedExperts, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        E, hidden, inner = experts.down.shape
        panels, dtype = -(-inner // PANEL), dtype or experts.down.dtype
        self.stacks = PackedExpertWeights(
            empty_panels((E, 2 * panels * PANEL, hidden), dtype),
            empty_panels((E, hidden, inner), dtype),
            hidden,
            inner,
        )
        for name, tensor in self.packed_tensors().items():
            tensor.copy_(getattr(experts, name).detach())

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return packed_experts(x_TD, routing.expert_TK, routing.weight_TK, self.stacks)

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        experts = [self.stacks.expert(e) for e in range(len(self.stacks.down))]
        return {
            "gate_up": PackedTensor(tuple((gate, up) for gate, up, _ in experts), stacked=True),
            "down": PackedTensor(tuple((down,) for _, _, down in experts), stacked=True),
        }


class PackedKVUp(PackedLinear):
    """MLA's up-projection of the latent: expanded, or absorbed into queries and outputs. Never in
    8 bits: the two forms would be rounded along different dimensions.

    H heads, N nope dims, V value dims, L latent rank.
    """

    def __init__(self, linear: nn.Linear, heads: int, nope: int) -> None:
        super().__init__(linear)
        self.heads, self.nope = heads, nope
        weight, latent = linear.weight.detach(), linear.in_features
        value = linear.out_features // heads - nope
        self.key_up = _empty_stack(heads, (latent, nope), weight.dtype)
        self.value_up = _empty_stack(heads, (value, latent), weight.dtype)
        self._repack(weight)

    def _repack(self, weight: Tensor) -> None:
        """Write each head's key part, inputs and outputs swapped, and its value part."""
        up_HXL = weight.unflatten(0, (self.heads, -1))
        parts = up_HXL[:, : self.nope].mT, up_HXL[:, self.nope :]
        for stack, part_HFD in zip((self.key_up, self.value_up), parts, strict=True):
            for panels, weight_FD in zip(stack.panels, part_HFD, strict=True):
                write(PrepackedWeight(panels, stack.outputs, stack.inputs), weight_FD)

    def absorb(self, nope_THN: Tensor) -> Tensor:
        """Queries in latent space [T, H, L]."""
        return packed_stack(nope_THN, self.key_up)

    def project_values(self, out_THL: Tensor) -> Tensor:
        """Attention outputs as values [T, H, V]."""
        return packed_stack(out_THL, self.value_up)

    def packed_tensors(self) -> Mapping[str, PackedTensor]:
        return {"weight": _PackedKVUpTensor(((self.packed,),), module=self)}


@dataclass(frozen=True, slots=True, eq=False)
class _PackedKVUpTensor(PackedTensor):
    module: PackedKVUp | None = None

    def copy_(self, new: Tensor) -> None:
        PackedTensor.copy_(self, new)
        assert self.module is not None
        self.module._repack(self.read())


class PackedGQA(GQA):
    """Grouped-query attention whose q, k and v run as one product, and whose new keys and values
    go to a paged KV cache in one pass."""

    def __init__(self, attention: GQA, dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.gqa, self.layer, self.window = attention.gqa, attention.layer, attention.window
        self.rotate, self.interleaved = attention.rotate, attention.interleaved
        linears = [attention.q, attention.k, attention.v]
        weights = [linear.weight.detach() for linear in linears]
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        panels = empty_panels((outputs, inputs), dtype or weights[0].dtype)
        self.qkv = PrepackedWeight(panels, outputs, inputs)
        panel = 0
        for name, linear in zip("qkv", linears, strict=True):
            count = len(linear.weight) // PANEL
            part = self.qkv.panels[panel : panel + count]
            self.add_module(name, PackedLinear(linear, dtype, part))
            panel += count
        self.qkv_bias: Tensor | None = None
        if attention.q.bias is not None:
            self.qkv_bias = torch.cat([linear.bias.detach() for linear in linears])
            parts = self.qkv_bias.split([len(weight) for weight in weights])
            for linear, part in zip((self.q, self.k, self.v), parts, strict=True):
                linear.bias = part  # a view: new biases reach the product of all three
        self.add_module("o", PackedLinear(attention.o, dtype))

    @staticmethod
    def suits(attention: GQA) -> bool:
        """Outputs must fill whole panels, and heads must not be normed in between."""
        gqa = attention.gqa
        whole_panels = gqa.dim * gqa.kv_heads % PANEL == gqa.dim * gqa.heads % PANEL == 0
        return whole_panels and not gqa.qk_norm

    def project_and_cache(self, x_TD: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        storage = getattr(ctx.kv_cache, "storage_and_slots", None)  # of a paged cache
        if storage is None or not cpu.suits(x_TD):
            return super().project_and_cache(x_TD, ctx)
        (key_SGD, slot_T), (value_SGD, _) = (storage(self.layer, name) for name in ("key", "value"))
        gqa, (P,) = self.gqa, ctx.cos_TP.shape[1:]
        qkv_TF = packed_linear(x_TD, self.qkv, self.qkv_bias)
        query_THD = x_TD.new_empty(len(x_TD), gqa.heads, gqa.dim)
        cpu.function("rope_and_cache", x_TD.dtype)(
            *(len(x_TD), gqa.heads, gqa.kv_heads, gqa.dim, qkv_TF.data_ptr()),
            *(ctx.cos_TP.data_ptr(), ctx.sin_TP.data_ptr(), P, self.interleaved),
            *(slot_T.data_ptr(), query_THD.data_ptr(), key_SGD.data_ptr(), value_SGD.data_ptr()),
        )
        return query_THD, key_SGD, value_SGD


def _empty_stack(heads: int, shape: tuple[int, int], dtype: torch.dtype) -> PrepackedWeight:
    return PrepackedWeight(empty_panels((heads, *shape), dtype), *shape)


def pack_weights(network: "Transformer", *, int8: bool = False) -> None:
    """Replace what can be packed, in place, one weight after the other; in 8 bits with `int8`."""
    with torch.inference_mode(False), torch.no_grad():  # the weights may be replaced outside of it
        _pack_children(network, torch.int8 if int8 else None)
    head: nn.Module = network.head
    if isinstance(head, PackedLinear) and network.config.tied:
        network.add_module("embed", PackedEmbedding(head, network.dtype))
    layers = [layer for layer in network.layers if isinstance(layer, DecoderLayer)]
    network.layers = nn.ModuleList(fuse_layers(layers))
    if network.mtp is not None:
        (network.mtp.block,) = fuse_layers([network.mtp.block])


def _pack_children(module: nn.Module, dtype: torch.dtype | None) -> None:
    for name, child in list(module.named_children()):
        packed = _packed(module, name, child, dtype)
        if packed is None:
            _pack_children(child, dtype)
        else:
            setattr(module, name, packed)


def _packed(
    module: nn.Module, name: str, child: nn.Module, dtype: torch.dtype | None
) -> nn.Module | None:
    """The packed form of a child, with weights of `dtype` or of its own."""
    if not all(is_packable(p) for p in child.parameters(recurse=True)):
        return None
    if type(child) is GatedMLP:
        return PackedMLP(child, dtype) if _is_plain(child.gate, child.up, child.down) else None
    if isinstance(child, GQA) and type(child) in (GQA, SlidingWindowAttention):
        plain = _is_plain(child.q, child.k, child.v, child.o)
        return PackedGQA(child, dtype) if plain and PackedGQA.suits(child) else None
    if type(child) is GroupedExperts and child.axis.size == 1:
        return PackedExperts(child, dtype)
    if type(child) is not Linear:
        return None
    if isinstance(module, MLA) and name == "kv_b":
        return PackedKVUp(child, module.mla.heads, module.mla.nope)
    return PackedLinear(child, dtype)


def _is_plain(*linears: nn.Module) -> bool:
    """Whether none is quantized already."""
    return all(type(linear) is Linear for linear in linears)


def packed_tensors(network: nn.Module) -> Iterator[tuple[str, PackedTensor]]:
    """The packed weights of a network by name: where new values are written."""
    for path, module in network.named_modules():
        if isinstance(module, PackedModule):
            for name, tensor in module.packed_tensors().items():
                yield f"{path}.{name}", tensor
