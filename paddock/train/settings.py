"""What a training run is made of. A recipe is a TOML file that says where it differs."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings
from paddock.data import CorpusSettings, DataLoaderSettings, TokenizerSettings
from paddock.model.config import IndexerSettings

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]


class StartSettings(BaseSettings):
    """Where the network comes from, and what is changed about it before the first step."""

    preset: str | None = None  # born anew from the run's seed
    folder: str | None = None  # a checkpoint, or a run folder (its newest checkpoint)
    like: str | None = None  # the preset that folder came from: a plan before it exists
    rope_theta: PositiveFloat | None = None  # a higher base for a longer context
    context: PositiveInt | None = None
    indexer: IndexerSettings | None = None  # given to a dense latent network that has none

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.preset is None) == (self.folder is None):
            raise ValueError("name either a 'preset' or a 'folder' to start from")
        if self.like is not None and self.folder is None:
            raise ValueError("'like' says what a 'folder' will hold; there is none")
        return self


class OptimSettings(BaseSettings):
    kind: Literal["muon", "adamw"] = "muon"
    split: Literal["none", "heads", "all"] = "all"  # Muon Split: attention heads; gate and up too
    split_rope_rows: bool = False
    lr: PositiveFloat = 2e-4
    weight_decay: Weight = 0.1
    momentum: Share = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: PositiveFloat = 1.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Share = 0.01  # of the steps
    flat: Share = 0.0  # of the steps, before a linear schedule descends
    final: Share = 0.2  # of the peak, at the end

    @model_validator(mode="after")
    def _fits_the_run(self) -> Self:
        if self.schedule == "linear" and self.warmup + self.flat > 1 + 1e-9:
            raise ValueError(
                f"'warmup' {self.warmup:g} and 'flat' {self.flat:g} are more than the whole run"
            )
        return self


class LossSettings(BaseSettings):
    mtp: Weight = 0.3
    mtp_later: Weight = 0.1  # once `mtp_switch` of the run is over
    mtp_switch: Share = 0.55
    mtp_depths: PositiveInt = 3
    balance: Weight = 1e-4
    bias_rate: Weight = 1e-3  # of the routers' loss-free balancing
    bias_until: Share = 0.55  # of the run; zero from there on
    indexer: Weight = 1.0


class MachineSettings(BaseSettings):
    """How a step is computed; changes nothing about what is learnt but rounding."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of the products; state is float32
    device: str | None = None  # None: the accelerator, or the CPU where there is none
    micro_tokens: PositiveInt | None = None  # tokens a forward pass; None: the whole batch
    recompute: bool = False
    offload: bool = False  # what the backward needs waits in host memory
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


class KeepSettings(BaseSettings):
    every: PositiveInt = 500  # steps between checkpoints
    last: PositiveInt = 2  # newest checkpoints kept
    forever: PositiveInt | None = None  # multiples of this many steps are never pruned
    final_optimizer: bool = True  # its state at the last step too, from which no run goes on


class EvalSettings(BaseSettings):
    every: PositiveInt = 500
    tokens: PositiveInt = 100_000  # of held-out text, at most


Stage = Literal["pretrain", "midtrain", "warmup", "sparse", "sft"]


class TrainSettings(BaseSettings):
    """One stage of raising a model."""

    stage: Stage = "pretrain"
    steps: PositiveInt
    seed: int = 0
    start: StartSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    corpus: CorpusSettings = CorpusSettings()
    stream: DataLoaderSettings = DataLoaderSettings()
    batch_from: PositiveInt | None = None  # tokens of the first batches, rising to the full size
    batch_rise: Share = 0.0  # of the run over which they rise
    optim: OptimSettings = OptimSettings()
    loss: LossSettings = LossSettings()
    freeze_indexer: bool = False  # it keeps choosing as it does, and its loss is not computed
    # Weights as a quantizer would have them while they are learnt: module:function, a FakeQuant.
    fake_quant: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    machine: MachineSettings = MachineSettings()
    parallel: ParallelSettings = ParallelSettings()
    keep: KeepSettings = KeepSettings()
    evaluate: EvalSettings = EvalSettings()

    @model_validator(mode="after")
    def _the_stage_makes_sense(self) -> Self:
        if self.stage == "sft" and not self.corpus.has_dialogues:
            raise ValueError("stage 'sft' needs a source of dialogues or demonstrations")
        if self.stage == "warmup" and self.freeze_indexer:
            raise ValueError("'freeze_indexer': the warm-up trains nothing but the indexer")
        if self.fake_quant is not None and self.parallel.ranks > 1:
            raise ValueError("'fake_quant' needs a run of one process")
        return self
