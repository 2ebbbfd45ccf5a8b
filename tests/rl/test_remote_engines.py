"""RL runs whose engines and teachers are servers reached over HTTP."""

import pytest

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.weight_sync import weight_digests
from paddock.cli.errors import UserError
from paddock.cli.rl import run_rl
from paddock.engine import EngineWeightUpdater
from tests.rl.vault_runs import SYNCHRONOUS, numbers, recipe_in
from tests.serve.live import serving

DISTILL_RECIPE = """
stage = "distill"
steps = 2
[init]
checkpoint = "{start}"
[teachers.far]
url = "URL"
[tasks.vault]
env = "vault"
teacher = "far"
[rollout]
groups_per_batch = 4
[sampling]
max_new_tokens = 24
[compute]
device = "cpu"
"""


def test_servers_sample_and_receive_every_weight_update(start, tmp_path):
    with (
        serving(start, weights=EngineWeightUpdater) as one,
        serving(start, weights=EngineWeightUpdater) as two,
    ):
        urls = f'engines.urls=["{one.url}", "{two.url}"]'
        run_rl(recipe_in(tmp_path, start), tmp_path / "run", ["steps=3", *SYNCHRONOUS, urls])
        final = load_pretrained(tmp_path / "run" / "checkpoints" / "step-00000003" / "model")
        for server in (one, two):
            (engine,) = server.engines
            assert engine.version == 3
            assert dict(EngineWeightUpdater(engine).checksums()) == weight_digests(final)
            assert engine.stats().counters.finished > 0
    found = numbers(tmp_path / "run")
    assert [line["staleness_max"] for line in found.values()] == [0, 0, 0]
    assert all(line["logprob_diff"] < 1e-5 for line in found.values())


def test_a_server_can_be_the_teacher(start, tmp_path):
    with serving(start) as server:
        text = DISTILL_RECIPE.replace("URL", server.url)
        run_rl(recipe_in(tmp_path, start, text), tmp_path / "run", [])
    # The teacher is the student before its first update.
    assert abs(numbers(tmp_path / "run")[1]["teacher_kl"]) < 1e-5


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 does not respond"),
        ("127.0.0.1:8000", "'127.0.0.1:8000' is not a URL such as http://"),
        ("http://", "is not a URL"),
        ("http://127.0.0.1:99999", "is not a URL"),
    ],
)
def test_an_unreachable_server_is_reported_before_any_rollout(start, tmp_path, url, message):
    record = recipe_in(tmp_path / "taught", start, DISTILL_RECIPE.replace("URL", url))
    with pytest.raises(UserError, match=f"'teachers.far.url': .*{message}"):
        run_rl(record, tmp_path / "run", [])
    with pytest.raises(UserError, match=f"'engines.urls': .*{message}"):
        run_rl(recipe_in(tmp_path, start), tmp_path / "other", [f'engines.urls=["{url}"]'])
