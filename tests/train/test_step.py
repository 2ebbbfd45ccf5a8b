import numpy as np
import pytest
import torch

from paddock.train.objective import LanguageModelObjective
from paddock.train.settings import AuxLossSettings, ComputeSettings
from paddock.train.stages import STAGES
from paddock.train.trainer import Trainer, TrainingError
from tests.model.networks import build_network, latent_config
from tests.train.test_micro_batch import batch_of
from tests.train.tiny import settings


def trainer_of(tmp_path, network=None, **changes):
    chosen = settings(tmp_path, **changes)
    stage = STAGES[chosen.stage]
    network = network or build_network(latent_config())
    stage.freeze(network)
    objective = LanguageModelObjective(stage, AuxLossSettings())
    return Trainer(network, objective, chosen, tmp_path / "evidence" / "batch.npz")


def step(trainer, batch=None, lr=1e-3):
    return trainer.step(batch or batch_of(14, 5, 9), lr=lr, bias_rate=1e-3, progress=0.0)


def test_a_repeated_batch_is_overfitted(tmp_path):
    trainer = trainer_of(tmp_path)
    first = step(trainer).losses["loss"]
    for _ in range(30):
        last = step(trainer, lr=1e-2).losses["loss"]
    assert last < 0.3 * first


def test_a_non_finite_loss_stops_the_run_and_saves_the_batch(tmp_path):
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        trainer.network.embed.weight[20] = float("nan")
    before = trainer.network.head.weight.clone()
    with pytest.raises(TrainingError, match=r"loss 'loss' is not finite.*batch\.npz"):
        step(trainer)
    saved = np.load(tmp_path / "evidence" / "batch.npz")
    assert saved["token_T"].tolist() == batch_of(14, 5, 9).token_T.tolist()
    assert torch.equal(trainer.network.head.weight, before)


@pytest.mark.parametrize(
    "options",
    [{"activation_checkpointing": True}, {"activation_offload": True}, {"micro_batch_tokens": 10}],
)
def test_compute_options_do_not_change_a_step(tmp_path, options):
    plain = trainer_of(tmp_path)
    other = trainer_of(tmp_path, compute=ComputeSettings(**options))
    for _ in range(3):
        one, two = step(plain), step(other)
    assert two.losses["loss"] == pytest.approx(one.losses["loss"], rel=1e-4)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)


def test_small_steps_are_not_lost_to_bfloat16(tmp_path):
    network = build_network(latent_config())
    exact = network.head.weight.detach().clone()
    trainer = trainer_of(tmp_path, network, compute=ComputeSettings(dtype="bfloat16"))
    assert torch.equal(trainer.weights.master["head.weight"], exact)  # not rounded at the start
    for _ in range(5):
        step(trainer, lr=1e-6)
    moved = (trainer.weights.master["head.weight"].detach() - exact).abs().max()
    assert 0 < float(moved) < 1e-4
    rounded = trainer.weights.master["head.weight"].detach().bfloat16()
    assert torch.equal(network.head.weight.detach(), rounded)
    assert trainer.weights.master_model().head.weight.dtype == torch.float32


def test_bfloat16_learns_like_float32(tmp_path):
    exact = trainer_of(tmp_path)
    half = trainer_of(tmp_path, compute=ComputeSettings(dtype="bfloat16"))
    for _ in range(10):
        one, two = step(exact), step(half)
    assert two.losses["loss"] == pytest.approx(one.losses["loss"], rel=0.03)


def test_the_router_bias_is_updated_and_the_imbalance_reported(tmp_path):
    trainer = trainer_of(tmp_path)
    before = trainer.network.layers[1].mlp.router.bias.clone()
    report = step(trainer)
    moved = trainer.network.layers[1].mlp.router.bias - before
    assert bool(moved.any())
    torch.testing.assert_close(moved.abs()[moved != 0], torch.full_like(moved[moved != 0], 1e-3))
    assert report.expert_imbalance > 1
