"""What a stage changes about the one loop.

pretrain, midtrain   the whole network learns the next tokens, attending to everything
warmup               the indexer alone learns where dense attention looks
sparse               all together: attention to what the indexer chose, which goes on learning
                     from its own loss, its inputs detached
sft                  the same on dialogues, of which only the model's own words are learnt
"""

from dataclasses import dataclass, replace

from torch import nn

from paddock.model import AuxRequest
from paddock.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    language: bool  # the next-token and MTP losses
    indexer: bool  # the indexer's own loss
    dense: bool  # attend to everything
    train_only: str | None = None  # parameters with this in their name learn, the others rest
    frozen: str | None = None  # parameters with this in their name rest

    @property
    def aux_request(self) -> AuxRequest:
        return AuxRequest(dense=self.dense, indexer_loss=self.indexer, balance_loss=self.language)

    def freeze(self, network: nn.Module) -> None:
        for name, parameter in network.named_parameters():
            learns = self.train_only is None or self.train_only in name
            parameter.requires_grad_(learns and (self.frozen is None or self.frozen not in name))


_INDEXER = ".indexer."
_LANGUAGE = StageSpec(language=True, indexer=False, dense=True)
STAGES: dict[str, StageSpec] = {
    "pretrain": _LANGUAGE,
    "midtrain": _LANGUAGE,
    "warmup": StageSpec(language=False, indexer=True, dense=True, train_only=_INDEXER),
    "sparse": StageSpec(language=True, indexer=True, dense=False),
    "sft": StageSpec(language=True, indexer=True, dense=False),
}


def stage_spec(settings: TrainSettings) -> StageSpec:
    """The stage as these settings have it."""
    stage = STAGES[settings.stage]
    return replace(stage, indexer=False, frozen=_INDEXER) if settings.freeze_indexer else stage
