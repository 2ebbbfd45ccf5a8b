"""Dashboard app: access checks, API responses, read-only access to runs."""

import hashlib
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from paddock.cli.dash import open_token_text
from paddock.dashboard import app
from paddock.dashboard.app import DashboardApp, DashboardError, build_app, plotly_script
from paddock.dashboard.demo import write_demo_runs
from paddock.dashboard.run_index import RunIndex
from tests.dashboard.ledgers import HOSTILE, write_large, write_rl_run
from tests.dashboard.runs import write_run

REQUESTS = (
    ("/", {}),
    ("/api/runs", {}),
    ("/api/curves", {"run": "rl", "metric": "reward"}),
    ("/api/rollouts", {"run": "rl"}),
    ("/api/failures", {"run": "rl"}),
    ("/api/group", {"run": "rl", "ordinal": 0}),
    ("/api/rollout", {"run": "rl", "ordinal": 0, "rollout": 1}),
    ("/api/timeline", {"run": "rl"}),
    ("/api/tasks", {"run": "rl"}),
    ("/api/engine", {"run": "rl"}),
    ("/api/network", {"run": "rl"}),
    ("/api/prefix_tree", {"run": "rl"}),
    ("/report", {"run": "rl"}),
)


def client_of(folder: Path, **changes) -> TestClient:
    sight = DashboardApp(run_index=RunIndex([folder]), open_token_text=open_token_text, **changes)
    return TestClient(build_app(sight), base_url="http://127.0.0.1:8001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    write_rl_run(found / "rl")
    return found


@pytest.fixture(scope="module")
def get_json(folder):
    client = client_of(folder)

    def get(path, code=200, **query):
        answer = client.get(path, params=query)
        assert answer.status_code == code, answer.text
        return answer.json()

    return get


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(folder)): (
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            file.stat().st_mtime_ns,
        )
        for file in [folder, *sorted(folder.rglob("*"))]
    }


# --- access ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8001", 200),
        ("localhost:9", 200),
        ("[::1]:8001", 200),
        ("192.168.0.7", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8001", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_foreign_host_name_is_rejected(folder, host, status):
    assert client_of(folder).get("/api/runs", headers={"host": host}).status_code == status


def test_the_configured_host_name_is_accepted(folder):
    client = client_of(folder, host="box.lan")
    assert client.get("/", headers={"host": "box.lan:8001"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_allowed(folder, method):
    assert client_of(folder).request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/pages/../server.py",
        "/pages/%2e%2e/server.py",
        "/pages/..%2fserver.py",
        "/pages/nothing.js",
        "/etc/passwd",
        "/api/group?run=../rl&ordinal=0",
        "/api/group?run=/etc&ordinal=0",
        "/report?run=..",
        "/docs",
        "/openapi.json",
    ],
)
def test_no_request_reads_outside_the_runs(folder, path):
    answer = client_of(folder).get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text and "def build_app" not in answer.text


@pytest.mark.parametrize(("path", "query"), REQUESTS)
def test_the_content_security_policy_allows_only_our_scripts(folder, path, query):
    policy = client_of(folder).get(path, params=query).headers["content-security-policy"]
    scripts = re.search(r"script-src ([^;]*)", policy)[1]
    assert scripts == "'self'" or re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", scripts)
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_pages_load_nothing_from_other_hosts():
    for file in files("paddock.dashboard").joinpath("pages").iterdir():
        text = file.read_text()
        assert "http://" not in text and "https://" not in text, file.name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, file.name


def test_without_plotly_the_error_names_the_package(folder, monkeypatch):
    monkeypatch.setattr(app, "find_spec", lambda _: None)
    with pytest.raises(DashboardError, match=re.escape("pip install 'paddock[dash]'")):
        client_of(folder)


def test_plotly_is_served_from_its_package_without_importing_it(folder):
    answer = client_of(folder).get("/plotly.js")
    assert answer.content == plotly_script().read_bytes()
    assert "plotly" not in sys.modules


# --- responses ------------------------------------------------------------------------------------


def test_the_list_of_runs(get_json):
    (run,) = get_json("/api/runs")["runs"]
    assert (run["run"], run["stage"], run["status"]) == ("rl", "agentic", "finished")
    assert (run["step"], run["of"], run["metric"], run["value"]) == (2, 2, "reward", 0.75)
    assert run["ledger"] is True


def test_curves_of_runs_that_have_the_metric(folder, get_json):
    found = get_json("/api/curves", run="rl", metric="reward")
    assert found["rl"]["y"] == [0.5, 0.75]
    assert found["rl"]["tokens"] == [90, 185]
    assert get_json("/api/curves", run="rl", metric="loss") == {}
    assert "not found" in get_json("/api/curves", 404, run="x", metric="loss")["error"]


def test_reward_histogram_and_its_groups(get_json):
    found = get_json("/api/rollouts", run="rl")
    assert found["counts"] == {
        "issued": 4,
        "trained": 1,
        "filtered": 1,
        "failed": 1,
        "in_flight": 1,
    }
    assert sum(found["histogram"]["counts"]["words"]) == 8
    assert found["histogram"]["counts"]["words"][0] == 2
    assert found["histogram"]["counts"]["words"][-1] == 6
    assert [group["ordinal"] for group in found["groups"]] == [3, 2, 1, 0]
    assert found["groups"][3]["rewards"] == [0.0, 1.0, 0.0, 1.0]
    zero = get_json("/api/rollouts", run="rl", low=0.0, high=0.05)
    assert [group["ordinal"] for group in zero["groups"]] == [0]
    assert [
        g["ordinal"] for g in get_json("/api/rollouts", run="rl", status="filtered")["groups"]
    ] == [1]
    assert get_json("/api/rollouts", run="rl", before=1)["window"] == 1


def test_failures_by_reason(get_json):
    found = get_json("/api/failures", run="rl")
    (lost,) = found["rollouts"]
    assert (lost["kind"], lost["where"], lost["count"]) == ("environment", "start", 4)
    assert lost["message"] == f"disk full {HOSTILE}"
    assert found["by_step"] == {"step": [1, 2], "kinds": {"environment": [4, 0]}}
    reasons = {(one["status"], one["reason"]): one["count"] for one in found["groups"]}
    assert reasons["filtered", "zero variance"] == 1
    assert reasons["failed", "4 of 4 attempts: world at start"] == 1


def test_rollouts_of_a_group_with_reasoning_and_calls_separated(get_json):
    found = get_json("/api/group", run="rl", ordinal=0)
    assert [rollout["reward"] for rollout in found["rollouts"]] == [0.0, 1.0, 0.0, 1.0]
    shown = [
        (
            message["role"],
            message["sampled"],
            [(part["kind"], part["text"]) for part in message["parts"]],
        )
        for message in found["rollouts"][1]["messages"]
    ]
    assert shown == [
        ("user", False, [("text", f"Say {HOSTILE} twice.")]),
        (
            "assistant",
            True,
            [("reasoning", "It wants a look."), ("call", f"look\nkey = {HOSTILE}")],
        ),
        ("tool", False, [("result", "seen <b>it</b>")]),
        (
            "assistant",
            True,
            [("reasoning", "Done."), ("text", f"The word is {HOSTILE}1.")],
        ),
    ]


def test_one_rollout_token_by_token(get_json):
    found = get_json("/api/rollout", run="rl", ordinal=0, rollout=1)
    count = len(found["ids"])
    columns = ("pieces", "special", "sampled", "trained", "logprob", "version", "turn")
    columns += ("log_ratio", "advantage", "kept")
    assert {len(found[name]) for name in columns} == {count}
    assert "".join(found["pieces"]).startswith("[gMASK]<sop><|user|>Say ")
    sampled = [i for i, flag in enumerate(found["sampled"]) if flag]
    read = [i for i, flag in enumerate(found["sampled"]) if not flag]
    assert [found["logprob"][i] for i in sampled[:3]] == [0.0, -0.125, -0.25]
    assert {found["logprob"][i] for i in read} == {None}
    assert [found["log_ratio"][i] for i in sampled[:3]] == [-0.5, 0.25, -0.5]
    assert {found["advantage"][i] for i in sampled} == {1.0}
    assert [found["kept"][i] for i in sampled[:5]] == [True, True, True, False, True]
    assert {found["log_ratio"][i] for i in read} == {None}
    assert found["turn"][0] == 0 and found["turn"][-1] == 1


def test_untrained_tokens_have_no_ratio(get_json):
    found = get_json("/api/rollout", run="rl", ordinal=1, rollout=0)
    assert set(found["log_ratio"]) == {None}
    assert found["step"] is None


@pytest.mark.parametrize(
    ("path", "query", "why"),
    [
        ("/api/group", {"ordinal": 99}, "group 99 not found"),
        ("/api/rollout", {"ordinal": 0, "rollout": 9}, "9"),
        ("/api/engine/live", {}, "--engine-url URL"),
    ],
)
def test_missing_runs_groups_and_rollouts_get_404(get_json, path, query, why):
    assert why in get_json(path, 404, run="rl", **query)["error"]


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_truncated_ledger_is_named(folder, tmp_path, share):
    whole = (folder / "rl" / "ledger.sqlite").read_bytes()
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "metrics.jsonl").write_bytes((folder / "rl" / "metrics.jsonl").read_bytes())
    (tmp_path / "rl" / "ledger.sqlite").write_bytes(whole[: int(share * len(whole))])
    client = client_of(tmp_path)
    answers = [client.get(path, params=query) for path, query in REQUESTS]
    assert {answer.status_code for answer in answers} == {200, 404}
    shown = [answer.json()["error"] for answer in answers if answer.status_code == 404]
    assert any("ledger.sqlite" in error for error in shown)


def test_the_timeline_has_lanes_and_gaps(get_json):
    found = get_json("/api/timeline", run="rl")
    assert len(found["bars"]) == 12
    ends = {}
    for bar in found["bars"]:
        assert ends.get(bar["lane"], 0.0) <= bar["started"]
        ends[bar["lane"]] = bar["finished"]
    failures = {bar["failure"] for bar in found["bars"] if bar["number"] == 2}
    assert failures == {"environment at start"}
    assert found["concurrency"][-1][1] == 0
    assert found["idle"][0] == [1004.0, 1004.5] and len(found["idle"]) == 11
    assert found["before"] is None


def test_engine_prefix_tree_and_network_pages(get_json):
    assert [row["running"] for row in get_json("/api/engine", run="rl")["rows"]] == [0, 1, 2]
    tree = get_json("/api/prefix_tree", run="rl")
    assert tree["rollouts"] == 12
    assert tree["unique_tokens"] < tree["total_tokens"] / 8
    network = get_json("/api/network", run="rl")
    assert network["rows"][0]["indexer"][0]["queries"] == [2, 3]
    assert network["expert_imbalance"] == [[1, 1.5], [2, 1.25]]


def test_a_report_is_rendered_without_writing_a_file(folder):
    text = client_of(folder).get("/report", params={"run": "rl"}).text
    assert "<h1>" in text and "reward" in text
    assert not (folder / "rl" / "report.html").exists()


def test_a_run_without_a_tokenizer_shows_ids(tmp_path):
    run = write_rl_run(tmp_path / "rl")
    for file in (run / "tokenizer").iterdir():
        file.unlink()
    found = client_of(tmp_path).get("/api/rollout?run=rl&ordinal=0&rollout=0").json()
    assert found["pieces"] == [f"[{token}]" for token in found["ids"]]
    group = client_of(tmp_path).get("/api/group?run=rl&ordinal=0").json()
    roles = [message["role"] for message in group["rollouts"][0]["messages"]]
    assert roles == ["prompt", "reply", "prompt", "reply"]


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    write_run(tmp_path / "run", [1.0, float("nan"), 2.0])
    found = client_of(tmp_path).get("/api/curves?run=run&metric=loss").json()
    assert found["run"]["y"] == [1.0, None, 2.0]


def test_new_steps_are_shown_while_running(tmp_path):
    run = write_rl_run(tmp_path / "rl")
    client = client_of(tmp_path)
    assert client.get("/api/runs").json()["runs"][0]["step"] == 2
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "reward": 0.9}) + "\n")
    assert client.get("/api/runs").json()["runs"][0]["step"] == 3


def test_the_demo_shows_everything(tmp_path):
    runs = write_demo_runs(tmp_path)
    client = client_of(runs)
    names = {run["run"]: run for run in client.get("/api/runs").json()["runs"]}
    assert len(names) == 2
    (name,) = [key for key, run in names.items() if run["ledger"]]
    overview = client.get("/api/rollouts", params={"run": name}).json()
    balance = overview["counts"]
    assert balance["issued"] == sum(balance[k] for k in balance if k != "issued")
    whole = next(g for g in overview["groups"] if g["status"] == "trained")
    found = client.get(
        "/api/rollout", params={"run": name, "ordinal": whole["ordinal"], "rollout": 0}
    ).json()
    assert any(value is not None for value in found["log_ratio"])
    assert any(value for value in found["advantage"])
    assert client.get("/api/timeline", params={"run": name}).json()["idle"]
    assert len(client.get("/api/engine", params={"run": name}).json()["rows"]) > 10
    assert client.get("/api/network", params={"run": name}).json()["rows"][0]["indexer"]


# --- read-only ------------------------------------------------------------------------------------


def test_requests_change_no_file(folder):
    before = digests(folder)
    client = client_of(folder)
    for path, query in REQUESTS:
        assert client.get(path, params=query).status_code == 200, path
    assert digests(folder) == before


def bytes_read() -> int:
    """Bytes this process has read so far, from files or the page cache."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
def test_showing_rollouts_does_not_read_a_hundred_thousand_trajectories(tmp_path):
    run = write_large(tmp_path / "large", 100_000)
    whole = sum((run / name).stat().st_size for name in ("ledger.sqlite", "rollouts.jsonl"))
    assert whole > 40e6
    client = client_of(tmp_path)
    before, start = digests(run), bytes_read()
    overview = client.get("/api/rollouts", params={"run": "large"}).json()
    client.get("/api/runs")
    client.get("/api/group", params={"run": "large", "ordinal": 9000})
    client.get("/api/rollout", params={"run": "large", "ordinal": 9000, "rollout": 5})
    client.get("/api/timeline", params={"run": "large"})
    client.get("/api/failures", params={"run": "large"})
    client.get("/api/prefix_tree", params={"run": "large"})
    read = bytes_read() - start
    assert overview["counts"]["trained"] == 12_500
    assert overview["more"] is True and overview["rollouts"] == 4096
    assert read < whole / 3
    assert digests(run) == before
