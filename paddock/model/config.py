"""Model configuration: immutable and validated when built.

Names are short because they are grouped: `config.mla.kv_rank` is the released `kv_lora_rank`.
`paddock.checkpoint` translates to and from released config.json files.
"""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings

Family = Literal[
    "glm_moe_dsa", "glm4_moe_lite", "deepseek_v3", "llama", "qwen2", "qwen3", "paddock"
]
AttentionKind = Literal["mla", "dsa", "gqa", "swa", "gdn", "simple_gdn"]
MlpKind = Literal["dense", "moe"]
IndexerKind = Literal["full", "shared"]
RopeLayout = Literal["interleaved", "halves"]

LATENT_ATTENTION: tuple[AttentionKind, ...] = ("mla", "dsa")
LINEAR_ATTENTION: tuple[AttentionKind, ...] = (
    "gdn",
    "simple_gdn",
)  # recurrent state instead of KV entries


class MLASettings(BaseSettings):
    """Multi-head latent attention."""

    heads: PositiveInt
    q_rank: PositiveInt | None = None  # None: queries from the hidden state directly
    kv_rank: PositiveInt
    nope: PositiveInt  # query and key dims per head without rotation
    rope: PositiveInt  # query and key dims per head with rotation
    value: PositiveInt
    norm_eps: PositiveFloat = 1e-5  # of the two latent norms

    @property
    def qk_head_dim(self) -> int:
        return self.nope + self.rope

    @property
    def kv_cache_dim(self) -> int:
        """Width of a latent KV entry: latent and rotated key."""
        return self.kv_rank + self.rope


class IndexerSettings(BaseSettings):
    """The lightning indexer of DeepSeek Sparse Attention."""

    heads: PositiveInt
    dim: PositiveInt  # its first `mla.rope` dims are rotated
    topk: PositiveInt
    layers: tuple[IndexerKind, ...]  # "shared": reuse the selection of the last full layer below
    norm_eps: PositiveFloat = 1e-6
    rope_layout: RopeLayout = "interleaved"


class GQASettings(BaseSettings):
    """Grouped-query attention and its variants (sliding window, Gated DeltaNet)."""

    heads: PositiveInt
    kv_heads: PositiveInt
    dim: PositiveInt
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: bool = False
    window: PositiveInt | None = None  # of "swa" layers
    conv: PositiveInt = 4  # taps of the short convolutions of "gdn" layers


class MoESettings(BaseSettings):
    """Mixture of experts with a sigmoid router."""

    experts: PositiveInt
    active: PositiveInt
    inner: PositiveInt
    shared: NonNegativeInt = 1
    groups: PositiveInt = 1
    groups_kept: PositiveInt = 1
    normalize: bool = True
    scale: PositiveFloat = 2.5


class RopeScaling(BaseSettings):
    """RoPE frequency scaling beyond the trained context length."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: PositiveFloat
    original_context: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0  # llama3
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0  # yarn
    beta_slow: PositiveFloat = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(f"'{self.kind}' scaling needs 'original_context'")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("'low_freq_factor' must be less than 'high_freq_factor'")
        return self


class RopeSettings(BaseSettings):
    theta: PositiveFloat = 1_000_000.0
    layout: RopeLayout = "interleaved"
    scaling: RopeScaling | None = None


class WeightInitSettings(BaseSettings):
    """Standard deviations of initial weights; None: `std`."""

    std: PositiveFloat = 0.02
    embed_std: PositiveFloat | None = None
    head_std: PositiveFloat | None = None
    router_std: PositiveFloat | None = None


class MTPSettings(BaseSettings):
    """Multi-token prediction: one layer, used at several depths."""

    depths: PositiveInt = 3
    share_index: bool = False  # later depths reuse the keys selected at depth 1


class ModelConfig(BaseSettings):
    """Architecture of a network: everything that determines its tensors and their meaning."""

    family: Family
    vocab: PositiveInt
    hidden: PositiveInt
    context: PositiveInt
    attention: tuple[AttentionKind, ...] = Field(min_length=1)  # one entry per layer
    mlp: tuple[MlpKind, ...]
    dense_inner: PositiveInt
    rope: RopeSettings = RopeSettings()
    mla: MLASettings | None = None
    indexer: IndexerSettings | None = None
    gqa: GQASettings | None = None
    moe: MoESettings | None = None
    mtp: MTPSettings | None = None
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False  # the output head is the embedding
    init: WeightInitSettings = WeightInitSettings()
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def mtp_layer(self) -> int:
        """Layer index of the MTP layer in checkpoints and in the KV cache."""
        return self.layers

    def attention_kind(self, layer: int) -> AttentionKind:
        """Attention kind of a layer; the MTP layer has that of the last layer."""
        return self.attention[min(layer, self.layers - 1)]

    def mlp_kind(self, layer: int) -> MlpKind:
        return self.mlp[min(layer, self.layers - 1)]

    def has_indexer(self, layer: int) -> bool:
        """Whether this layer has its own indexer. A DSA network's MTP layer always has."""
        if self.indexer is None or self.attention_kind(layer) != "dsa":
            return False
        return layer >= self.layers or self.indexer.layers[layer] == "full"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self


def _problems(config: ModelConfig) -> list[str]:
    """Messages about settings that contradict each other."""
    latent = any(kind in LATENT_ATTENTION for kind in config.attention)
    grouped = any(kind not in LATENT_ATTENTION for kind in config.attention)
    checks = [
        (
            len(config.mlp) != config.layers,
            f"'mlp' has {len(config.mlp)} layers, 'attention' has {config.layers}",
        ),
        (latent and config.mla is None, "latent attention layers need 'mla'"),
        (grouped and config.gqa is None, "grouped attention layers need 'gqa'"),
        ("moe" in config.mlp and config.moe is None, "'moe' layers need 'moe' settings"),
        ("dsa" in config.attention and config.indexer is None, "'dsa' layers need 'indexer'"),
        (
            "swa" in config.attention and (config.gqa is None or config.gqa.window is None),
            "'swa' layers need 'gqa.window'",
        ),
        (config.mtp is not None and not latent, "'mtp' needs latent attention layers"),
    ]
    problems = [text for failed, text in checks if failed]
    if problems:
        return problems
    if config.mla is not None:
        problems += _latent_problems(config, config.mla)
    if config.gqa is not None:
        problems += _grouped_problems(config.gqa)
    if config.moe is not None:
        problems += _expert_problems(config.moe)
    return problems


def _latent_problems(config: ModelConfig, mla: MLASettings) -> list[str]:
    problems = []
    if mla.rope % 2:
        problems.append(f"'mla.rope' {mla.rope} must be even")
    if config.indexer is not None and "dsa" in config.attention:
        indexer = config.indexer
        if mla.q_rank is None:
            problems.append("the indexer needs the query latent: set 'mla.q_rank'")
        if indexer.dim < mla.rope:
            problems.append(f"'indexer.dim' {indexer.dim} is less than 'mla.rope' {mla.rope}")
        if len(indexer.layers) != config.layers:
            problems.append(
                f"'indexer.layers' has {len(indexer.layers)} entries for {config.layers} layers"
            )
        elif indexer.layers[config.attention.index("dsa")] != "full":
            problems.append(
                "'indexer.layers' must be 'full' for the first 'dsa' layer: no layer below has one"
            )
    return problems


def _grouped_problems(gqa: GQASettings) -> list[str]:
    problems = []
    if gqa.heads % gqa.kv_heads:
        problems.append(
            f"'gqa.heads' {gqa.heads} is not a multiple of 'gqa.kv_heads' {gqa.kv_heads}"
        )
    if gqa.dim % 2:
        problems.append(f"'gqa.dim' {gqa.dim} must be even")
    return problems


def _expert_problems(moe: MoESettings) -> list[str]:
    problems = []
    reachable = moe.experts // moe.groups * moe.groups_kept
    if moe.experts % moe.groups:
        problems.append(
            f"'moe.experts' {moe.experts} is not a multiple of 'moe.groups' {moe.groups}"
        )
    elif moe.groups_kept > moe.groups:
        problems.append(f"'moe.groups_kept' {moe.groups_kept} exceeds 'moe.groups' {moe.groups}")
    elif moe.active > reachable:
        problems.append(
            f"'moe.active' {moe.active} exceeds the {reachable} experts of the selected groups"
        )
    elif moe.groups > 1 and moe.experts // moe.groups < 2:
        problems.append("groups are ranked by their two best experts and need at least two each")
    return problems


def indexer_layers(layers: int, *, freq: int = 1, offset: int = 2) -> tuple[IndexerKind, ...]:
    """Which layers have their own indexer, by the released rule (GLM-5.2: freq 4, offset 3).

    >>> indexer_layers(8, freq=4, offset=3)
    ('full', 'full', 'full', 'shared', 'shared', 'shared', 'full', 'shared')
    """
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))


def indexer_pattern(pattern: str) -> tuple[IndexerKind, ...]:
    """The same from a string of F and S, one letter per layer.

    >>> indexer_pattern("FSF")
    ('full', 'shared', 'full')
    """
    if unknown := set(pattern) - {"F", "S"}:
        raise ValueError(f"an indexer pattern must consist of F and S, got {sorted(unknown)}")
    return tuple("full" if letter == "F" else "shared" for letter in pattern)


def window_layers(pattern: str | None, layers: int) -> tuple[AttentionKind, ...]:
    """Sliding-window layers by a pattern of S (window) and F (full), or every other layer.

    >>> window_layers(None, 4)
    ('swa', 'gqa', 'swa', 'gqa')
    """
    letters = pattern if pattern is not None else ("SF" * layers)[:layers]
    if len(letters) != layers or set(letters) - {"S", "F"}:
        raise ValueError(f"a window pattern must be {layers} letters S or F, got {letters!r}")
    return tuple("swa" if letter == "S" else "gqa" for letter in letters)
