import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paddock.model.config import RopeScaling, RopeSettings
from paddock.model.rope import attention_scaling, inv_freq, softmax_scale

SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_context=256),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_context=256),
    "yarn with mscale": RopeScaling(
        kind="yarn", factor=40.0, original_context=128, mscale=1.0, mscale_all_dim=0.7
    ),
    "yarn with attention factor": RopeScaling(
        kind="yarn", factor=4.0, original_context=256, attention_factor=1.3
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_match_transformers(name):
    scaling = SCALINGS[name]
    fields = scaling.model_dump(exclude_none=True)
    kind = fields.pop("kind")
    fields["original_max_position_embeddings"] = fields.pop("original_context", 256)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": kind, "rope_theta": 500.0} | fields,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    rope = RopeSettings(theta=500.0, layout="halves", scaling=scaling)
    torch.testing.assert_close(inv_freq(rope, 32), expected)
    assert attention_scaling(scaling) == pytest.approx(factor)


def test_plain_softmax_scale_is_that_of_the_expanded_head():
    assert softmax_scale(RopeSettings(), 256) == 1 / 16
