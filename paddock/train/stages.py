"""Training stages: losses, attention and trainable parameters of each.

pretrain, midtrain   language-model loss on all parameters, dense attention
warmup               indexer loss on the indexer alone, dense attention
sparse               language-model loss with sparse attention; the indexer is trained by its own
                     loss, on detached inputs
sft                  as sparse, on dialogues, with loss on assistant tokens only
"""

from dataclasses import dataclass, replace

from paddock.model import AuxRequest, Transformer
from paddock.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What a stage computes and trains."""

    language: bool  # next-token and MTP losses
    indexer: bool  # indexer loss
    dense: bool  # dense attention, ignoring the indexer
    train_only: frozenset[str] | None = None  # parts of the model (`ParameterRole.part`); None: all
    frozen: frozenset[str] = frozenset()  # parts of the model that are not trained

    @property
    def aux_request(self) -> AuxRequest:
        """Auxiliary outputs that the model must compute in this stage."""
        return AuxRequest(dense=self.dense, indexer_loss=self.indexer, balance_loss=self.language)

    def freeze(self, network: Transformer) -> None:
        """Set `requires_grad` of every parameter as the stage trains it."""
        for _, parameter, role in network.parameter_roles():
            selected = self.train_only is None or role.part in self.train_only
            parameter.requires_grad_(selected and role.part not in self.frozen)


INDEXERS = frozenset({"indexer", "mtp_indexer"})
_LANGUAGE = StageSpec(language=True, indexer=False, dense=True)
STAGES: dict[str, StageSpec] = {
    "pretrain": _LANGUAGE,
    "midtrain": _LANGUAGE,
    "warmup": StageSpec(language=False, indexer=True, dense=True, train_only=INDEXERS),
    "sparse": StageSpec(language=True, indexer=True, dense=False),
    "sft": StageSpec(language=True, indexer=True, dense=False),
}


def stage_spec(settings: TrainSettings) -> StageSpec:
    """The stage of these settings, with a frozen indexer if they request it."""
    stage = STAGES[settings.stage]
    return replace(stage, indexer=False, frozen=INDEXERS) if settings.freeze_indexer else stage
