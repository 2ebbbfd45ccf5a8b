"""Shapes and random tensors of one layer, for benchmark cases.

T tokens, S keys, K selected keys or experts, E experts, Q queries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer, sized for the kind of device."""

    tokens: int
    hidden: int
    heads: int
    latent: int
    rope: int
    keep: int
    experts: int
    inner: int
    vocab: int
    sequences: int = 8
    page: int = 64
    active: int = 4  # experts of a token

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens, width {self.hidden:,}, {self.heads} heads, rows of "
            f"{self.latent} + {self.rope}, {self.keep:,} keys selected, {self.experts} experts of "
            f"{self.inner}"
        )


SIZES = {
    "accelerator": LayerShape(
        tokens=8192, hidden=2048, heads=16, latent=512, rope=64, keep=1024, experts=64, inner=768,
        vocab=32_768,
    ),
    "cpu": LayerShape(
        tokens=256, hidden=64, heads=4, latent=32, rope=8, keep=64, experts=8, inner=32, vocab=960,
    ),
}  # fmt: skip


def layer_shape(device: "torch.device") -> LayerShape:
    return SIZES["cpu" if device.type == "cpu" else "accelerator"]


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """Random inputs of one layer: bfloat16 on an accelerator, float32 on the CPU."""

    device: "torch.device"
    size: LayerShape

    def random(self, *shape: int, wide: bool = False) -> "Tensor":
        import torch

        half = self.device.type != "cpu" and not wide
        dtype = torch.bfloat16 if half else torch.float32
        return torch.randn(shape, device=self.device, dtype=dtype)

    def randint(self, limit: int, *shape: int) -> "Tensor":
        import torch

        return torch.randint(0, limit, shape, device=self.device)

    def random_routing(self, tokens: int) -> "tuple[Tensor, Tensor]":
        """Different experts for each token, and their weights."""
        import torch

        size = self.size
        score_TE = torch.rand(tokens, size.experts, device=self.device)
        weight_TK, expert_TK = score_TE.topk(size.active)
        return expert_TK.sort().values, weight_TK

    def random_topk_indices(self, queries: int, keys: int) -> "Tensor":
        """Different keys per query, ascending; padded with -1 where a query sees fewer."""
        import torch

        k = min(self.size.keep, keys)
        position_Q = torch.arange(keys - queries, keys, device=self.device)
        score_QS = torch.rand(queries, keys, device=self.device)
        score_QS.masked_fill_(torch.arange(keys, device=self.device) > position_Q[:, None], -1.0)
        best_QK, index_QK = score_QS.topk(k)
        found_QK = index_QK.masked_fill(best_QK < 0, keys).sort().values
        return found_QK.masked_fill(found_QK == keys, -1).int()
