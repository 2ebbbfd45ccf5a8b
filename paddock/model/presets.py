"""Named model configurations, from nano (a laptop) to GLM-5."""

from paddock.model.config import (
    AttentionKind,
    IndexerSettings,
    MLASettings,
    MlpKind,
    ModelConfig,
    MoESettings,
    MTPSettings,
    RopeSettings,
    WeightInitSettings,
    indexer_layers,
)

GLM_EOS = (154820, 154827, 154829)  # <|endoftext|>, <|user|>, <|observation|>


def preset(name: str) -> ModelConfig:
    """The configuration called `name`; raises ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset '{name}' not found; presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def _attention(kind: AttentionKind, layers: int) -> tuple[AttentionKind, ...]:
    return (kind,) * layers


def _mlp(dense: int, layers: int) -> tuple[MlpKind, ...]:
    return tuple("dense" if layer < dense else "moe" for layer in range(layers))


GLM5 = ModelConfig(
    family="glm_moe_dsa",
    vocab=154_880,
    hidden=6144,
    context=202_752,
    attention=_attention("dsa", 78),
    mlp=_mlp(3, 78),
    dense_inner=12_288,
    mla=MLASettings(heads=64, q_rank=2048, kv_rank=512, nope=192, rope=64, value=256),
    indexer=IndexerSettings(heads=32, dim=128, topk=2048, layers=indexer_layers(78)),
    moe=MoESettings(experts=256, active=8, inner=2048, shared=1, scale=2.5),
    mtp=MTPSettings(depths=3),
    eos=GLM_EOS,
    pad=154820,
)

GLM52 = GLM5.model_copy(
    update={
        "context": 1_048_576,
        "rope": RopeSettings(theta=8_000_000.0),
        "indexer": IndexerSettings(
            heads=32, dim=128, topk=2048, layers=indexer_layers(78, freq=4, offset=3)
        ),
        "mtp": MTPSettings(depths=3, share_index=True),
    }
)

# DeepSeek-V3's head geometry at GLM-5's width: 96 heads of 192 cost what 64 heads of 256 do.
GLM5_MLA192 = GLM5.model_copy(
    update={"mla": MLASettings(heads=96, q_rank=2048, kv_rank=512, nope=128, rope=64, value=128)}
)

GLM47_FLASH = ModelConfig(
    family="glm4_moe_lite",
    vocab=154_880,
    hidden=2048,
    context=202_752,
    attention=_attention("mla", 47),
    mlp=_mlp(1, 47),
    dense_inner=10_240,
    mla=MLASettings(heads=20, q_rank=768, kv_rank=512, nope=192, rope=64, value=256),
    moe=MoESettings(experts=64, active=4, inner=1536, shared=1, scale=1.8),
    mtp=MTPSettings(depths=1),
    eos=GLM_EOS,
    pad=154820,
)

# One GPU: 716 M parameters, 231 M of them active. Initialised like nano, scaled to its width: with
# std 0.02 everywhere layer outputs dominate the embeddings and retrieval is hardly learnt.
SMALL = ModelConfig(
    family="glm_moe_dsa",
    vocab=32_768,
    hidden=1024,
    context=131_072,
    attention=_attention("dsa", 12),
    mlp=_mlp(1, 12),
    dense_inner=4096,
    mla=MLASettings(heads=16, q_rank=512, kv_rank=256, nope=64, rope=64, value=128),
    indexer=IndexerSettings(heads=16, dim=64, topk=1024, layers=indexer_layers(12)),
    moe=MoESettings(experts=32, active=4, inner=512, shared=1, scale=2.5),
    mtp=MTPSettings(depths=3),
    rope=RopeSettings(theta=10_000.0),
    init=WeightInitSettings(
        std=0.2 / 1024**0.5, embed_std=0.1, head_std=0.5 / 1024**0.5, router_std=1024**-0.5
    ),
)

# A laptop, minutes: the geometry found to learn on two cores. The low rope base suits short
# contexts; the router's large std keeps bias updates from changing the routing every step.
NANO = ModelConfig(
    family="glm_moe_dsa",
    vocab=960,
    hidden=96,
    context=1024,
    attention=_attention("dsa", 4),
    mlp=_mlp(1, 4),
    dense_inner=192,
    mla=MLASettings(heads=4, q_rank=64, kv_rank=48, nope=12, rope=12, value=24),
    indexer=IndexerSettings(heads=4, dim=16, topk=64, layers=indexer_layers(4)),
    moe=MoESettings(experts=8, active=2, inner=48, shared=1, scale=2.5),
    mtp=MTPSettings(depths=3),
    rope=RopeSettings(theta=200.0),
    init=WeightInitSettings(std=0.02, embed_std=0.1, head_std=0.5 / 96**0.5, router_std=96**-0.5),
)

PRESETS = {
    "nano": NANO,
    "small": SMALL,
    "glm5": GLM5,
    "glm5.2": GLM52,
    "glm5-mla192": GLM5_MLA192,
    "glm4.7-flash": GLM47_FLASH,
}
