import pytest
import torch

from paddock.model import PRESETS, Transformer, preset
from paddock.model.cost import (
    count_active_parameters,
    count_parameters,
    forward_flops,
    kv_cache_bytes_per_token,
    kv_cache_shapes,
)
from tests.model.networks import grouped_config, latent_config, tokens

CONFIGS = PRESETS | {
    "tiny": latent_config(),
    "shared indexers": latent_config(
        indexer={"heads": 2, "dim": 8, "topk": 8, "layers": ("full", "shared", "full", "shared")}
    ),
    "grouped": grouped_config("gqa", "swa", "gdn", "simple_gdn"),
    "biased and normed": grouped_config(
        "gqa",
        "gdn",
        gqa={"heads": 4, "kv_heads": 2, "dim": 8, "bias": "all", "qk_norm": True},
        tied=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_matches_the_parameters_of_a_network(name):
    with torch.device("meta"):
        network = Transformer(CONFIGS[name])
    counted = sum(p.numel() for p in network.parameters()) + sum(
        b.numel() for b in network.buffers()
    )
    assert count_parameters(CONFIGS[name]).total == counted


def test_glm5_has_the_size_of_the_paper():
    total, active = count_parameters(preset("glm5")), count_active_parameters(preset("glm5"))
    assert round(total.without_mtp / 1e9, 2) == 743.91
    assert round(total.total / 1e9, 2) == 753.86
    assert round(active.without_embeddings / 1e9, 2) == 39.88
    assert kv_cache_bytes_per_token(preset("glm5")).rows == 89_856


def test_small_and_nano_have_their_intended_sizes():
    small, nano = preset("small"), preset("nano")
    assert round(count_parameters(small).without_mtp / 1e6) == 716
    assert count_parameters(nano).total < 1_000_000


def test_mla_256_saves_a_third_of_decode_arithmetic():
    def per_pair(name: str) -> int:
        mla = preset(name).mla
        return 2 * mla.heads * (mla.kv_cache_dim + mla.kv_rank)

    assert per_pair("glm5") * 3 == per_pair("glm5-mla192") * 2


def test_kv_cache_shapes_match_what_the_network_stores():
    config = latent_config()
    seen: dict[tuple[int, str], tuple[int, ...]] = {}

    class Recorder:
        def update(self, layer, stream, rows_T):
            seen[layer, stream] = tuple(rows_T.shape[1:])
            return rows_T

    from paddock.model import AttentionMetadata

    Transformer.from_config(config, 0)(tokens(10), AttentionMetadata.packed([10]), Recorder())
    expected = {
        (layer, stream): shape
        for layer in range(config.layers)
        for stream, shape in kv_cache_shapes(config, layer).items()
    }
    assert seen == expected


def test_sparse_attention_stops_growing_and_the_indexer_grows_slowly():
    config = preset("glm5")
    near, far = forward_flops(config, 4096), forward_flops(config, 131_072)
    assert near.attention == far.attention
    assert far.indexer == 32 * near.indexer
    assert forward_flops(config, 131_072, dense=True).total > 3 * far.total


def test_flops_of_weights_are_two_per_active_weight():
    config = grouped_config("gqa", tied=False)
    matrices = sum(
        p.numel()
        for n, p in Transformer.from_config(config, 0).named_parameters()
        if p.ndim == 2 and n != "embed.weight"
    )
    assert forward_flops(config, 1).weights == 2 * matrices
