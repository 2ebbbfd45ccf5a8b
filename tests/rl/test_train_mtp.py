"""MTP during RL: it follows the policy if asked to, and never changes the policy."""

import shutil

import pytest
import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.cli.rl import run_rl
from paddock.model import Transformer
from paddock.model.config import MTPSettings
from paddock.rl.learner import LearnerError
from tests.rl.learners import learner, policy_samples
from tests.rl.nets import engine_for, network, prompts, rolled
from tests.rl.vault_runs import numbers, recipe_in


def samples(made, seed=0):
    with engine_for(made.trainer.network) as engine:
        return policy_samples(rolled(engine, prompts(4, seed=seed), seed=seed), made.settings)


def weights(made):
    return {name: p.detach().clone() for name, p in made.trainer.network.named_parameters()}


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e-3])  # below: every gradient is clipped
def test_the_policy_is_the_same_with_and_without(tmp_path, max_grad_norm):
    optim = {"max_grad_norm": max_grad_norm}
    frozen = learner(tmp_path / "a", network(), optim=optim)
    trained = learner(tmp_path / "b", network(), optim=optim, train_mtp=True, mtp_coef=5.0)
    groups, before = samples(frozen), weights(frozen)
    for made in (frozen, trained):
        for _ in range(3):
            made.train(groups)
    without, found = weights(frozen), weights(trained)
    mtp = {name for name in found if name.startswith("mtp.") and "indexer" not in name}
    assert len(mtp) > 10
    for name in found:
        if name in mtp:
            assert torch.equal(without[name], before[name])
            assert not torch.equal(found[name], before[name]), name
        else:
            assert torch.equal(found[name], without[name]), name


def test_drafts_of_a_trained_layer_are_accepted_more_often(tmp_path):
    made = learner(tmp_path, network(), train_mtp=True, optim={"lr": 3e-2})
    groups = samples(made)
    losses, lengths = [], [made.accept_length(groups)]
    for _ in range(30):
        losses.append(made.train(groups).mean("mtp_loss"))
    lengths.append(made.accept_length(groups))
    assert losses[-1] < 0.5 * losses[0]
    assert 1 <= lengths[0] < 1.2 and lengths[1] > lengths[0] + 0.3


def test_it_needs_an_mtp_layer(tmp_path):
    with pytest.raises(LearnerError, match="needs a model with an MTP layer"):
        learner(tmp_path, network(mtp=None), train_mtp=True)
    assert learner(tmp_path / "b", network(mtp=None)).accept_length([]) is None


def test_a_run_reports_the_acceptance_before_and_after(tmp_path, start):
    """The vault network has no MTP layer; this one starts with an untrained one."""
    plain = load_pretrained(start)
    config = plain.config.model_copy(update={"mtp": MTPSettings(depths=2)})
    with_mtp = Transformer.from_config(config, seed=1)
    with_mtp.load_state_dict(plain.state_dict(), strict=False)
    folder = tmp_path / "start"
    shutil.copytree(start, folder)
    save_pretrained(with_mtp, folder)
    sets = ["train_mtp=true", "optim.lr=1e-2", "steps=6", "checkpoint.every=3"]
    run_rl(recipe_in(tmp_path, folder), tmp_path / "run", sets)
    rows = numbers(tmp_path / "run")
    lengths = {s: row["accept_length"] for s, row in rows.items() if "accept_length" in row}
    assert sorted(lengths) == [1, 3, 6]
    assert lengths[1] < 1.3 and lengths[6] > lengths[1] + 0.2
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"{lengths[1]:.2f} \N{RIGHTWARDS ARROW} {lengths[6]:.2f}" in report
