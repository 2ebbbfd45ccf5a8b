"""Tasks registered, changed and removed over HTTP while a run goes on, and after it is resumed."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddock import launch
from paddock.dashboard.jsonl_pages import read_task_states
from paddock.journal import Ledger, LedgerView
from tests.patience import until
from tests.rl.vault_runs import events, recipe_in
from tests.rollout.agents import HTTP

MORE = {"env": "vault", "group_size": 2, "ratio": 1.0}
KEPT = ["credit.keep_zero_variance=true", "tasks.vault.group_size=2", "checkpoint.keep_last=3"]


class Killed(BaseException):
    """Stands for the end of the process."""


class Until(launch.RLCallbacks):
    """Ends the run after a batch once `over` says so."""

    def __init__(self, over):
        self.over, self.updates = over, 0

    def on_update(self, metrics):
        self.updates = metrics.update
        if self.over():
            raise Killed


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def shown(run):
    """The tasks that a dashboard shows."""
    return read_task_states(run / "tasks.json")["tasks"]


def trained(run):
    with Ledger(run / "ledger.sqlite") as ledger:
        return [(group.trained, group.task) for group in ledger.groups("trained")]


def test_tasks_come_and_go_while_a_run_goes_on_and_stay_when_it_is_resumed(start, tmp_path):
    run, stop = tmp_path / "run", []
    recipe, sets = recipe_in(tmp_path, start), [*KEPT, "steps=400", f"gateway.port={free_port()}"]
    observer = Until(lambda: stop)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launch.rl, recipe, out=run, overrides=sets, callbacks=observer)
        until(lambda: observer.updates or running.done())
        told = json.loads((run / "gateway.json").read_text())
        admin = {"x-api-key": told["admin_key"]}

        def call(method, path="", body=None, headers=admin):
            return HTTP.request(method, f"{told['url']}/tasks{path}", json=body, headers=headers)

        for method, path in (
            ("GET", ""),
            ("PUT", "/more"),
            ("PATCH", "/vault"),
            ("DELETE", "/vault"),
        ):
            for key in ("", told["worker_key"]):
                assert call(method, path, MORE, {"x-api-key": key}).status_code == 401
        for body, why in (
            ({"env": "vaults"}, "environment 'vaults' not found"),
            (MORE | {"size": 1}, "'size'"),
            (MORE | {"group_size": 1}, "such a group has no baseline"),
            (MORE | {"agent": {"command": "sh"}}, "'agent.command' is for recipes"),
            (MORE | {"env": "os:path"}, "is for recipes"),
        ):
            refused = call("PUT", "/more", body)
            assert refused.status_code == 400 and why in refused.text, refused.text
        assert set(call("GET").json()["tasks"]) == {"vault"}
        assert call("PUT", "/more", MORE).json()["ratio"] == 1.0
        until(lambda: call("GET", "/more").json()["trained"] > 1)
        changed = call("PATCH", "/more", {"ratio": 3.0, "group_size": 3}).json()
        assert (changed["ratio"], changed["settings"]["group_size"]) == (3.0, 3)
        assert call("DELETE", "/vault").status_code == 200
        assert call("DELETE", "/more").status_code == 409, "a task must be left"
        assert call("GET", "/vault").status_code == 404
        states = call("GET").json()["tasks"]
        assert set(states) == {"more"} and states["more"]["state"] in ("running", "waiting")
        until(lambda: shown(run).get("vault", {}).get("state") == "removed")
        assert shown(run)["more"]["ratio"] == 3.0 and shown(run)["vault"]["ratio"] == 0.0
        with LedgerView(run / "ledger.sqlite") as ledger:
            passed, mean = ledger.pass_rates()["more"]
        assert passed == mean and 0.0 <= mean <= 1.0, "rewards are zero or one"
        removed_at = observer.updates + 3
        until(lambda: observer.updates > removed_at or running.done())
        stop.append("now")
        with pytest.raises(Killed):
            running.result()
    assert {task for update, task in trained(run) if update > removed_at} == {"more"}
    again = Until(lambda: again.updates >= last + 2)
    last = max(update for update, _ in trained(run))
    with pytest.raises(Killed):
        launch.rl(recipe, out=run, overrides=sets, callbacks=again)
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.group_counts().is_consistent
        new = [g for g in ledger.groups("trained") if g.trained is not None and g.trained > last]
    assert {(group.task, group.size) for group in new} == {("more", 3)}
    assert [each["task"] for each in events(run, "task_registered")] == ["more", "more"]
    assert [each["task"] for each in events(run, "task_removed")] == ["vault"]
