import pytest
from pydantic import ValidationError

from paddock.model import PRESETS, ModelConfig, preset
from paddock.model.config import indexer_layers, indexer_pattern, window_layers
from tests.model.networks import grouped_config, latent_config

MLA = {"heads": 4, "q_rank": 24, "kv_rank": 16, "nope": 8, "rope": 4, "value": 10}
MOE = {"experts": 6, "active": 2, "inner": 16}
INDEXER = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full",) * 4}

IMPOSSIBLE = {
    "'mlp' has 2 layers": {"mlp": ("dense", "moe")},
    "'mla.rope' 5 must be even": {"mla": MLA | {"rope": 5}},
    "set 'mla.q_rank'": {"mla": {k: v for k, v in MLA.items() if k != "q_rank"}},
    "'indexer.dim' 2 is less than 'mla.rope' 4": {"indexer": INDEXER | {"dim": 2}},
    "'indexer.layers' has 3 entries for 4 layers": {"indexer": INDEXER | {"layers": ("full",) * 3}},
    "must be 'full'": {"indexer": INDEXER | {"layers": ("shared", "full", "full", "full")}},
    "'dsa' layers need 'indexer'": {"indexer": None},
    "latent attention layers need 'mla'": {"mla": None},
    "'moe' layers need 'moe' settings": {"moe": None},
    "not a multiple of 'moe.groups' 4": {"moe": MOE | {"groups": 4}},
    "'moe.groups_kept' 3 exceeds": {"moe": MOE | {"groups": 2, "groups_kept": 3}},
    "'moe.active' 7 exceeds the 6": {"moe": MOE | {"active": 7}},
    "at least two each": {"moe": MOE | {"groups": 6, "groups_kept": 2}},
    "greater than 0": {"hidden": 0},
    "Input should be a valid integer": {"hidden": "32"},
    "Extra inputs are not permitted": {"hiden": 32},
    "'gqa'": {"attention": ("dsa", "dsa", "dsa", "gqa")},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_an_invalid_config_is_rejected_by_name(message):
    with pytest.raises(ValidationError) as error:
        latent_config(**IMPOSSIBLE[message])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gqa": {"heads": 4, "kv_heads": 3, "dim": 8}}, "not a multiple of 'gqa.kv_heads' 3"),
        ({"gqa": {"heads": 4, "kv_heads": 2, "dim": 7}}, "'gqa.dim' 7 must be even"),
        ({"attention": ("swa",), "gqa": {"heads": 4, "kv_heads": 2, "dim": 8}}, "'gqa.window'"),
    ],
)
def test_an_invalid_gqa_config_is_rejected_by_name(changes, message):
    with pytest.raises(ValidationError) as error:
        grouped_config("gqa", **changes)
    assert message in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    assert ModelConfig.model_validate(PRESETS[name].model_dump()) == PRESETS[name]


def test_an_unknown_preset_is_rejected_by_name():
    with pytest.raises(ValueError, match="preset 'glm6' not found; presets: nano, small, glm5"):
        preset("glm6")


def test_glm52_computes_its_indices_in_21_layers():
    kinds = indexer_layers(78, freq=4, offset=3)
    computing = [i + 1 for i, kind in enumerate(kinds) if kind == "full"]
    assert computing == [1, 2, 3, *range(7, 76, 4)]
    assert len(computing) == 21
    assert preset("glm5.2").indexer.layers == kinds


def test_patterns_are_letters():
    assert indexer_pattern("FS") == ("full", "shared")
    with pytest.raises(ValueError, match=r"\['X'\]"):
        indexer_pattern("FX")
    assert window_layers("SSF", 3) == ("swa", "swa", "gqa")
    with pytest.raises(ValueError, match="3 letters"):
        window_layers("SF", 3)
