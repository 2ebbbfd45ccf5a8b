"""What the preparing of a latent layer is timed on: a batch that decodes one token each.

T tokens, Q query latent, C row width, H heads, D dims of a head, P pairs.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paddock.bench.kernel_cases import Call, RandomInputs


def latent_prepare(made: "RandomInputs") -> "Call":
    """Both launches, and everything they leave behind."""
    import torch

    from paddock.kernels import mla_prepare as prepare

    size, tokens = made.size, made.size.sequences
    row = size.latent + size.rope
    angle_TP = made.random(tokens, size.rope // 2, wide=True)
    angles = prepare.RotaryCosSin(angle_TP.cos(), angle_TP.sin())
    slot_T = torch.arange(tokens, device=made.device)
    latent = prepare.QueryLatentInput(
        made.random(tokens, size.hidden), made.random(size.hidden), 1e-5
    )
    kept = prepare.KVLatentInput(
        made.random(tokens, row), made.random(size.latent), 1e-5, True, made.random(tokens, row)
    )
    raw_THD = made.random(tokens, size.heads, 2 * size.rope)
    absorbed_THC = made.random(tokens, size.heads, row)
    queries = prepare.QueryRopeInput(raw_THD, True, absorbed_THC)

    @torch.no_grad()
    def step() -> "Tensor":
        latent_TQ = prepare.norm_rope_and_cache(latent, kept, None, angles, slot_T)
        prepare.rotate_queries(queries, angles, None)
        return torch.cat([x.flatten() for x in (latent_TQ, kept.stored_SC, absorbed_THC)])

    return step
