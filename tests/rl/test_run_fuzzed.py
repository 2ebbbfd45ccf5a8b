"""The gateway of a run that goes on, fuzzed on all its routes with every key."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from schemathesis import GenerationMode

from paddock import launch
from paddock.journal import Ledger
from tests.patience import until
from tests.rl.test_run_tasks import KEPT, Killed, Until, free_port
from tests.rl.vault_runs import recipe_in
from tests.rollout.agents import HTTP
from tests.rollout.fuzzing import check_that_strangers_are_refused, fuzz


def fuzzed_run(start, folder, *, examples):
    """A run that trains on while its gateway is fuzzed; the number of operations, the updates."""
    run, stop = folder / "run", []
    sets = [*KEPT, "steps=100000", "checkpoint.every=1000", f"gateway.port={free_port()}"]
    observer = Until(lambda: stop)
    with ThreadPoolExecutor(1) as pool:
        recipe = recipe_in(folder, start)
        running = pool.submit(launch.rl, recipe, out=run, overrides=sets, callbacks=observer)
        try:
            until(lambda: observer.updates or running.done())
            told = json.loads((run / "gateway.json").read_text())
            url, admin = told["url"], {"x-api-key": told["admin_key"]}

            def opened(name):
                body = {"id": name, "max_tokens": 8}
                return HTTP.post(f"{url}/sessions", json=body, headers=admin).json()["api_key"]

            agent, _ = opened("fuzzed"), opened("other")
            refused = check_that_strangers_are_refused(
                url, "other", own_key=agent, keys=(None, "guess", "")
            )
            assert refused > 100
            for key in (told["admin_key"], told["worker_key"], agent):
                for mode in GenerationMode:
                    count = fuzz(url, key, mode, examples=examples, session="fuzzed", task="vault")
            assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
            tasks = HTTP.get(f"{url}/tasks", headers=admin).json()["tasks"]
            assert set(tasks) == {"vault"} and tasks["vault"]["ratio"] == 1.0
            other = HTTP.get(f"{url}/sessions/other", headers=admin).json()
            assert other["turns"] == 0 and other["outcome"]["what"] == "not scored yet"
            after = observer.updates
            until(lambda: observer.updates > after + 1 or running.done())
        finally:
            stop.append("now")
        with pytest.raises(Killed):
            running.result()
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.group_counts().is_consistent
        assert {kind for _, kind, _ in ledger.failure_counts()} <= {"policy"}
    return count, observer.updates


def test_a_run_trains_on_while_its_gateway_is_fuzzed(start, tmp_path):
    count, updates = fuzzed_run(start, tmp_path, examples=1)
    assert count > 30 and updates > 2
