"""Estimated cost of a run on one rank and on many."""

from pathlib import Path

import pytest

from paddock.config import load_recipe, resolve
from paddock.model import Transformer, preset
from paddock.train import TrainSettings
from paddock.train.estimate import estimate_training, gathered_parameters, tokens_per_rank
from paddock.train.run import load_init_config
from paddock.train.settings import OptimSettings

RECIPES = Path(__file__).parents[2] / "recipes"


def settings(recipe: str, *sets: str) -> TrainSettings:
    return resolve(TrainSettings, load_recipe(RECIPES / recipe, list(sets)))


def test_a_single_rank_holds_everything() -> None:
    made = settings("nano/pretrain.toml")
    planned = estimate_training(made, preset("nano"))
    count = sum(p.numel() for p in Transformer.from_config(preset("nano"), 0).parameters())
    biases = 8 * 4  # router biases are buffers but count as checkpoint parameters
    assert planned.parameters == count + biases
    assert planned.ranks == 1
    assert planned.weight_bytes == 4 * planned.parameters
    assert planned.state_bytes == 8 * planned.parameters  # gradients and momentum


def test_many_ranks_share_the_state_and_gather_a_layer_at_a_time() -> None:
    config = preset("small")
    alone = estimate_training(settings("small/pretrain.toml"), config)
    made = settings("small/pretrain.toml", "parallel.data=4", "parallel.expert=2")
    shared = estimate_training(made, config)
    assert shared.ranks == 8
    assert shared.state_bytes == alone.state_bytes // 8
    assert shared.tokens == alone.tokens
    layers = [sum(p.numel() for p in block.parameters()) for block in Transformer(config).layers]
    tables = 2 * config.vocab * config.hidden
    assert gathered_parameters(config, settings("small/pretrain.toml")) == pytest.approx(
        tables + 2 * max(layers), rel=1e-4
    )
    assert gathered_parameters(config, made) < gathered_parameters(
        config, settings("small/pretrain.toml")
    )


def test_a_document_longer_than_a_micro_batch_is_only_split_by_context_ranks() -> None:
    made = settings("glm5/midtrain_128k.toml")
    assert made.compute.micro_batch_tokens is not None
    assert made.compute.micro_batch_tokens < made.dataloader.seq_len
    assert tokens_per_rank(made) == 131_072 // made.parallel.context


STAGES = load_recipe(RECIPES / "glm5/pipeline.toml", []).values["stages"]


@pytest.mark.parametrize("recipe", [s["recipe"] for s in STAGES if "command" not in s])
def test_stages_can_be_estimated_before_their_checkpoints_exist(recipe: str) -> None:
    made = settings(f"glm5/{recipe}")
    planned = estimate_training(made, load_init_config(made))
    assert planned.parameters == pytest.approx(753.86e9, rel=1e-4)
    assert planned.rank_bytes < 141e9  # an H200


def test_an_existing_folder_is_read(tmp_path: Path) -> None:
    made = settings("glm5/warmup.toml", f"init.checkpoint={tmp_path}")
    with pytest.raises(ValueError, match="neither a checkpoint nor a run with checkpoints"):
        load_init_config(made)


def test_like_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="which is not set"):
        settings("nano/pretrain.toml", "init.like=nano")


def test_a_schedule_longer_than_the_run_is_rejected_first() -> None:
    with pytest.raises(
        ValueError, match=r"'warmup_ratio' \(0\.5\) and 'stable_ratio' \(0\.9\) must not add up"
    ):
        OptimSettings(schedule="linear", warmup_ratio=0.5, stable_ratio=0.9)
    assert OptimSettings(schedule="linear", warmup_ratio=0.1, stable_ratio=0.9).stable_ratio == 0.9
