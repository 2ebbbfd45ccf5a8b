"""Benchmark case of the MLA prepare kernels: a batch that decodes one token per sequence.

T tokens, Q query latent, C row width, H heads, D dims of a head, P pairs.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paddock.bench.kernel_cases import Call
    from paddock.bench.kernel_inputs import RandomInputs


def mla_prepare(inputs: "RandomInputs") -> "Call":
    """Both launches; returns everything they write."""
    import torch

    from paddock.kernels import mla_prepare as prepare

    size, tokens = inputs.size, inputs.size.sequences
    row = size.latent + size.rope
    angle_TP = inputs.random(tokens, size.rope // 2, wide=True)
    angles = prepare.RotaryCosSin(angle_TP.cos(), angle_TP.sin())
    slot_T = torch.arange(tokens, device=inputs.device)
    latent = prepare.QueryLatentInput(
        inputs.random(tokens, size.hidden), inputs.random(size.hidden), 1e-5
    )
    kept = prepare.KVLatentInput(
        inputs.random(tokens, row),
        inputs.random(size.latent),
        1e-5,
        True,
        inputs.random(tokens, row),
    )
    raw_THD = inputs.random(tokens, size.heads, 2 * size.rope)
    absorbed_THC = inputs.random(tokens, size.heads, row)
    queries = prepare.QueryRopeInput(raw_THD, True, absorbed_THC)

    @torch.no_grad()
    def step() -> "Tensor":
        latent_TQ = prepare.norm_rope_and_cache(latent, kept, None, angles, slot_T)
        prepare.rotate_queries(queries, angles, None)
        return torch.cat([x.flatten() for x in (latent_TQ, kept.stored_SC, absorbed_THC)])

    return step
