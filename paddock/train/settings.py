"""What a training run is made of. A recipe is a TOML file that says where it differs."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings
from paddock.data import CorpusSettings, DataLoaderSettings, TokenizerSettings
from paddock.model import config

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeWeight = Annotated[float, Field(ge=0)]


class ModelInitSettings(BaseSettings):
    """Where the network comes from, and what is changed about it before the first step."""

    preset: str | None = None  # born anew from the run's seed
    checkpoint: str | None = None  # a checkpoint, or a run folder (its newest checkpoint)
    like: str | None = None  # the preset that folder came from: a plan before it exists
    rope_theta: PositiveFloat | None = None  # a higher base for a longer context
    context: PositiveInt | None = None
    indexer: config.IndexerSettings | None = None  # given to a dense latent network that has none

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.preset is None) == (self.checkpoint is None):
            raise ValueError("name either a 'preset' or a 'folder' to start from")
        if self.like is not None and self.checkpoint is None:
            raise ValueError("'like' says what a 'folder' will hold; there is none")
        return self


class OptimSettings(BaseSettings):
    type: Literal["muon", "adamw"] = "muon"
    muon_split: Literal["none", "heads", "all"] = (
        "all"  # Muon Split: attention heads; gate and up too
    )
    muon_split_rope: bool = False
    lr: PositiveFloat = 2e-4
    weight_decay: NonNegativeWeight = 0.1
    momentum: Fraction = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.01  # of the steps
    stable_ratio: Fraction = 0.0  # of the steps, before a linear schedule descends
    min_lr_ratio: Fraction = 0.2  # of the peak, at the end

    @model_validator(mode="after")
    def _fits_the_run(self) -> Self:
        if self.schedule == "linear" and self.warmup_ratio + self.stable_ratio > 1 + 1e-9:
            raise ValueError(
                f"'warmup' {self.warmup_ratio:g} and 'flat' {self.stable_ratio:g} are more than the whole run"
            )
        return self


class AuxLossSettings(BaseSettings):
    mtp_coef: NonNegativeWeight = 0.3
    mtp_coef_final: NonNegativeWeight = 0.1  # once `mtp_switch` of the run is over
    mtp_coef_switch: Fraction = 0.55
    mtp_depths: PositiveInt = 3
    balance_coef: NonNegativeWeight = 1e-4
    router_bias_rate: NonNegativeWeight = 1e-3  # of the routers' loss-free balancing
    router_bias_until: Fraction = 0.55  # of the run; zero from there on
    indexer_coef: NonNegativeWeight = 1.0


class ComputeSettings(BaseSettings):
    """How a step is computed; changes nothing about what is learnt but rounding."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of the products; state is float32
    device: str | None = None  # None: the accelerator, or the CPU where there is none
    micro_batch_tokens: PositiveInt | None = None  # tokens a forward pass; None: the whole batch
    activation_checkpointing: bool = False
    activation_offload: bool = False  # what the backward needs waits in host memory
    threads: PositiveInt | None = None  # of one operation on the CPU; None: one a core


class ParallelSettings(BaseSettings):
    """How many processes share a run, in each way; their product is what torchrun must start. Says
    nothing about what is learnt: a run may go on with other sizes."""

    data: PositiveInt = 1  # read different documents
    expert: PositiveInt = 1  # also that, and hold different experts
    context: PositiveInt = 1  # hold pieces of the same row of documents

    @property
    def ranks(self) -> int:
        return self.data * self.expert * self.context


class CheckpointSettings(BaseSettings):
    every: PositiveInt = 500  # steps between checkpoints
    keep_last: PositiveInt = 2  # newest checkpoints kept
    keep_every: PositiveInt | None = None  # multiples of this many steps are never pruned
    save_final_optimizer: bool = True  # its state at the last step too, from which no run goes on


class ValidationSettings(BaseSettings):
    every: PositiveInt = 500
    tokens: PositiveInt = 100_000  # of held-out text, at most


StageName = Literal["pretrain", "midtrain", "warmup", "sparse", "sft"]


class TrainSettings(BaseSettings):
    """One stage of raising a model."""

    stage: StageName = "pretrain"
    steps: PositiveInt
    seed: int = 0
    init: ModelInitSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    corpus: CorpusSettings = CorpusSettings()
    dataloader: DataLoaderSettings = DataLoaderSettings()
    batch_warmup_from: PositiveInt | None = (
        None  # tokens of the first batches, rising to the full size
    )
    batch_warmup: Fraction = 0.0  # of the run over which they rise
    optim: OptimSettings = OptimSettings()
    loss: AuxLossSettings = AuxLossSettings()
    freeze_indexer: bool = False  # it keeps choosing as it does, and its loss is not computed
    # Weights as a quantizer would have them while they are learnt: module:function, a FakeQuant.
    fake_quant: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    compute: ComputeSettings = ComputeSettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    validation: ValidationSettings = ValidationSettings()

    @model_validator(mode="after")
    def _the_stage_makes_sense(self) -> Self:
        if self.stage == "sft" and not self.corpus.has_dialogues:
            raise ValueError("stage 'sft' needs a source of dialogues or demonstrations")
        if self.stage == "warmup" and self.freeze_indexer:
            raise ValueError("'freeze_indexer': the warm-up trains nothing but the indexer")
        if self.fake_quant is not None and self.parallel.ranks > 1:
            raise ValueError("'fake_quant' needs a run of one process")
        return self
