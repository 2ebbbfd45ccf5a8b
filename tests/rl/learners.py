"""Settings and learners of tiny RL runs."""

from paddock.checkpoint import save_pretrained
from paddock.rl.credit import assign_credit
from paddock.rl.learner import open_learner
from paddock.rl.settings import RLSettings
from paddock.train.policy import PolicySample


def settings(start, **changes):
    """A synchronous run of a task whose environment is never used."""
    defaults = {
        "stage": "reasoning",
        "steps": 100,
        "init": {"checkpoint": str(start)},
        "tasks": {"even": {"env": "even", "group_size": 2}},
        "rollout": {"groups_per_batch": 4, "pipeline_depth": 0, "max_staleness": 0},
        "optim": {
            "lr": 3e-3,
            "schedule": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "type": "muon",
        },
        "compute": {"device": "cpu"},
        "checkpoint": {"every": 2},
    }
    return RLSettings.model_validate_json(_json(_merged(defaults, changes)))


def _merged(below, above):
    both = {
        k: _merged(below[k], v) if isinstance(v, dict) and k in below else v
        for k, v in above.items()
    }
    return {**below, **both}


def _json(value):
    import json

    return json.dumps(value)


def learner(folder, net, **changes):
    save_pretrained(net, folder / "start")
    return open_learner(settings(folder / "start", **changes), folder / "not-finite.npz")


def policy_samples(groups, made):
    """Policy samples of groups of rollouts, with credit assigned as in a run."""
    rule, temperature = made.credit, made.sampling.temperature
    found = [
        [
            PolicySample(sample=s, weight=0.0, temperature=temperature)
            for s in assign_credit(g, len(g), rule).samples
        ]
        for g in groups
    ]
    return [each for each in found if each]
