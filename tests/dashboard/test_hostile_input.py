"""Out-of-range requests, and runs with symlinks to other files."""

import json
import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from paddock.cli.dash import open_token_text
from paddock.dashboard.app import DashboardApp, build_app
from paddock.dashboard.run_index import RunIndex
from tests.dashboard.ledgers import write_rl_run

PAGES = (
    "/api/runs",
    "/api/curves?metric=reward&run=rl",
    "/api/rollouts?run=rl",
    "/api/failures?run=rl",
    "/api/group?run=rl&ordinal=0",
    "/api/timeline?run=rl",
    "/api/tasks?run=rl",
    "/api/engine?run=rl",
    "/api/network?run=rl",
    "/report?run=rl",
)


def client_of(folder: Path) -> TestClient:
    sight = DashboardApp(run_index=RunIndex([folder]), open_token_text=open_token_text)
    return TestClient(build_app(sight), base_url="http://127.0.0.1:8001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    write_rl_run(found / "rl")
    return found


NUMBERS = [
    ("/api/curves", {"run": "rl", "metric": "reward", "smooth": "?"}),
    ("/api/rollouts", {"run": "rl", "step": "?"}),
    ("/api/rollouts", {"run": "rl", "before": "?"}),
    ("/api/rollouts", {"run": "rl", "low": "?", "high": "?"}),
    ("/api/failures", {"run": "rl", "step": "?"}),
    ("/api/failures", {"run": "rl", "before": "?"}),
    ("/api/group", {"run": "rl", "ordinal": "?"}),
    ("/api/rollout", {"run": "rl", "ordinal": "?", "rollout": 1}),
    ("/api/rollout", {"run": "rl", "ordinal": 0, "rollout": "?"}),
    ("/api/rollout", {"run": "rl", "ordinal": 0, "rollout": 1, "branch": "?"}),
    ("/api/group_id", {"run": "rl", "task": "words", "number": "?"}),
    ("/api/prefix_tree", {"run": "rl", "step": "?"}),
    ("/api/timeline", {"run": "rl", "before": "?"}),
    ("/api/engine", {"run": "rl", "before": "?"}),
]


@pytest.mark.parametrize(("path", "query"), NUMBERS)
@pytest.mark.parametrize("number", ["-1", str(2**63), str(10**30), "-1e999", "nan", "1e999", "x"])
def test_out_of_range_numbers_are_not_server_errors(folder, path, query, number):
    params = {name: number if value == "?" else value for name, value in query.items()}
    assert client_of(folder).get(path, params=params).status_code in (200, 404, 422)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "events.jsonl",
        "recipe.toml",
        "ledger.sqlite",
        "rollouts.jsonl",
        "engine.jsonl",
        "network.jsonl",
        "tokenizer",
        "tokenizer/tokenizer.json",
    ],
)
def test_symlinks_out_of_a_run_are_not_followed(folder, tmp_path, name):
    """A writer of a run must not read other files through the dashboard of another user."""
    run, secret = tmp_path / "runs" / "rl", tmp_path / "elsewhere"
    shutil.copytree(folder / "rl", run)
    (run / name).rename(secret)
    (run / name).symlink_to(secret)
    if name in ("metrics.jsonl", "recipe.toml", "events.jsonl"):
        secret.write_text(secret.read_text().replace("agentic", "SECRET") + '{"SECRET": 1}\n')
    client = client_of(tmp_path / "runs")
    answers = [client.get(path) for path in PAGES]
    assert all(answer.status_code in (200, 404) for answer in answers)
    assert "SECRET" not in "".join(answer.text for answer in answers)


def test_a_stage_must_be_inside_its_pipeline_folder(tmp_path):
    write_rl_run(tmp_path / "elsewhere")
    pipeline = tmp_path / "runs" / "plan"
    pipeline.mkdir(parents=True)
    events = [{"kind": "pipeline_started"}, {"kind": "stage_finished", "stage": "../../elsewhere"}]
    (pipeline / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = client_of(tmp_path / "runs").get("/report", params={"run": "plan"}).text
    assert "elsewhere" in text and "<svg" not in text
