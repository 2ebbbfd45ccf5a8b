"""Settings of a training run; a recipe is a TOML file that overrides these defaults."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings, NonNegativeWeight
from paddock.data import CorpusSettings, DataLoaderSettings, TokenizerSettings
from paddock.model import config

Fraction = Annotated[float, Field(ge=0, le=1)]


class ModelInitSettings(BaseSettings):
    """Initial model: a preset or a checkpoint, and changes made before the first step."""

    preset: str | None = None  # initialised from the run's seed
    checkpoint: str | None = None  # a checkpoint, or a run folder (its newest checkpoint)
    like: str | None = None  # preset of the checkpoint, for an estimate before it exists
    rope_theta: PositiveFloat | None = None  # a higher base for a longer context
    context: PositiveInt | None = None
    indexer: config.IndexerSettings | None = None  # added to a dense MLA model that has none

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.preset is None) == (self.checkpoint is None):
            raise ValueError("set either 'preset' or 'checkpoint'")
        if self.like is not None and self.checkpoint is None:
            raise ValueError("'like' describes a 'checkpoint', which is not set")
        return self


class OptimSettings(BaseSettings):
    """Optimizer and learning-rate schedule."""

    type: Literal["muon", "adamw"] = "muon"
    # Muon Split: orthogonalize attention heads separately, or also gate and up projections.
    muon_split: Literal["none", "heads", "all"] = "all"
    muon_split_rope: bool = False  # also separate the rows of a query head that RoPE rotates
    lr: PositiveFloat = 2e-4
    weight_decay: NonNegativeWeight = 0.1
    momentum: Fraction = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.01  # of the steps
    stable_ratio: Fraction = 0.0  # of the steps, before a linear schedule decays
    min_lr_ratio: Fraction = 0.2  # of the peak, at the end

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        if self.schedule == "linear" and self.warmup_ratio + self.stable_ratio > 1 + 1e-9:
            raise ValueError(
                f"'warmup_ratio' ({self.warmup_ratio:g}) and 'stable_ratio' "
                f"({self.stable_ratio:g}) must not add up to more than 1"
            )
        return self


class AuxLossSettings(BaseSettings):
    """Coefficients of the MTP, load-balancing and indexer losses."""

    mtp_coef: NonNegativeWeight = 0.3
    mtp_coef_final: NonNegativeWeight = 0.1  # after `mtp_coef_switch` of the run
    mtp_coef_switch: Fraction = 0.55
    mtp_depths: PositiveInt = 3
    balance_coef: NonNegativeWeight = 1e-4
    router_bias_rate: NonNegativeWeight = 1e-3  # of auxiliary-loss-free load balancing
    router_bias_until: Fraction = 0.55  # of the run; the rate is 0 afterwards
    indexer_coef: NonNegativeWeight = 1.0


class ComputeSettings(BaseSettings):
    """How a step is computed; changes the result by rounding only."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; state is float32
    device: str | None = None  # None: the accelerator, or the CPU without one
    micro_batch_tokens: PositiveInt | None = None  # per forward pass; None: the whole batch
    activation_checkpointing: bool = False
    activation_offload: bool = False  # keep saved activations in host memory
    threads: PositiveInt | None = None  # of one CPU operation; None: one per core


class ParallelSettings(BaseSettings):
    """Parallel degrees; torchrun must start their product.

    They do not change the result: a run may be resumed with others.
    """

    data: PositiveInt = 1  # ranks with different documents
    expert: PositiveInt = 1  # ranks with different documents and different experts
    context: PositiveInt = 1  # ranks with shards of the same row of documents

    @property
    def ranks(self) -> int:
        return self.data * self.expert * self.context


class CheckpointSettings(BaseSettings):
    """How often checkpoints are written, and which are kept."""

    every: PositiveInt = 500  # steps between checkpoints
    keep_last: PositiveInt = 2  # newest checkpoints kept
    keep_every: PositiveInt | None = None  # multiples of this many steps are never pruned
    save_final_optimizer: bool = True  # optimizer state at the last step, which is never resumed


class ValidationSettings(BaseSettings):
    """When and on how many tokens the validation loss is measured."""

    every: PositiveInt = 500  # steps
    tokens: PositiveInt = 100_000  # of the validation split, at most


StageName = Literal["pretrain", "midtrain", "warmup", "sparse", "sft"]


class TrainSettings(BaseSettings):
    """Settings of one training stage."""

    stage: StageName = "pretrain"
    steps: PositiveInt
    seed: int = 0
    init: ModelInitSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    corpus: CorpusSettings = CorpusSettings()
    dataloader: DataLoaderSettings = DataLoaderSettings()
    batch_warmup_from: PositiveInt | None = None  # tokens of the first batch
    batch_warmup: Fraction = 0.0  # of the run, until the full batch size is reached
    optim: OptimSettings = OptimSettings()
    loss: AuxLossSettings = AuxLossSettings()
    freeze_indexer: bool = False  # the indexer is not trained and its loss not computed
    # Quantization-aware training: a FakeQuant as "module:function".
    fake_quant: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    compute: ComputeSettings = ComputeSettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    validation: ValidationSettings = ValidationSettings()

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if self.stage == "sft" and not self.corpus.has_dialogues:
            raise ValueError("stage 'sft' needs a corpus source of dialogues or demonstrations")
        if self.stage == "warmup" and self.freeze_indexer:
            raise ValueError(
                "'freeze_indexer' must be false: stage 'warmup' trains only the indexer"
            )
        if self.fake_quant is not None and self.parallel.ranks > 1:
            raise ValueError("'fake_quant' needs a run of a single process")
        return self
