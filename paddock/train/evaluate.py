"""How well a network predicts text it never saw."""

import torch

from paddock.data import Corpus, once
from paddock.kernels.lm_loss import lm_loss
from paddock.model import Ask, Network
from paddock.train.batch import on_device
from paddock.train.stages import Stage


@torch.no_grad()
def held_out_loss(
    network: Network, corpus: Corpus, stage: Stage, *, context: int, tokens: int
) -> float | None:
    """Mean nats a token over at most `tokens` of held-out text; None if nothing is held out."""
    documents = corpus.split("held_out")
    if not documents:
        return None
    device = network.embed.weight.device
    total, count = 0.0, 0
    for batch in once(documents, context=context, batch_tokens=max(context, 8192)):
        for micro in on_device(batch, device):
            hidden_TD = network(micro.token_T, micro.layout, ask=Ask(dense=stage.dense)).hidden_TD
            target_T = micro.targets(1)
            total += float(lm_loss(hidden_TD, network.head.weight, target_T).sum())
            count += int((target_T >= 0).sum())
        if count >= tokens:
            break
    return total / max(1, count)
