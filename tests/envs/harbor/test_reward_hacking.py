"""Reward hacking in Harbor tasks, and what the tests see of the agent's work."""

import asyncio
import warnings

import pytest

from benchmarks.attack_sandbox import HACKS, harbor_settings, reward, write_task
from paddock.envs.harbor import HarborSettings, TaskError, check_task, read_task
from paddock.envs.harbor import verifier_view as seen_module
from paddock.envs.harbor.settings import sandbox_settings
from paddock.envs.harbor.verifier_view import verifier_view
from tests.envs.harbor.tasks import SETTINGS, simple
from tests.sandbox.sandboxes import BOTH, BWRAP

bwrap = pytest.mark.parametrize("backend", BWRAP)
# One of each kind; `make prove AREA=attack` tries them all on every backend.
SOME = ["replace cat", "replace bash", "replace tar", "ld.so.preload",
        "a daemon that writes the reward", "a daemon that waits for the tests",
        "replace rm, keep the reward"]  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@bwrap
@pytest.mark.parametrize("hack", SOME)
def test_a_hack_earns_nothing_by_default(backend, hack, tmp_path):
    settings = harbor_settings(backend, "files")
    assert asyncio.run(reward(write_task(tmp_path), settings, HACKS[hack])) == 0.0


@bwrap
@pytest.mark.parametrize("hack", SOME)
def test_a_hack_earns_nothing_where_the_tests_see_the_system(backend, hack, tmp_path):
    folder = write_task(tmp_path)
    shared = (
        folder.joinpath("task.toml")
        .read_text()
        .replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
    )
    folder.joinpath("task.toml").write_text(shared)
    settings = harbor_settings(backend, "files")
    assert asyncio.run(reward(folder, settings, HACKS[hack])) == 0.0


@pytest.mark.parametrize("backend", BOTH[1:])
def test_hacks_earn_nothing_in_a_container(backend, tmp_path):
    """All in one: damage done by one hack does not help the others."""
    folder = write_task(tmp_path)
    hacks = "\n".join(
        HACKS[name] for name in ("write the reward", "ld.so.preload", *SOME[4:6], "logs as a link")
    )
    assert asyncio.run(reward(folder, harbor_settings(backend, "system"), hacks)) == 0.0


WORK = """mkdir -p /data /opt/x /home/me /usr/src/deep; echo 42 > answer.txt; rm start.txt
echo 42 > /data/a; echo 42 > /opt/x/a; echo 42 > /home/me/a; mkfifo /data/pipe; ln -s /data/a link
echo 42 > /usr/src/deep/a; echo mine > /etc/mine; printf '#!/bin/sh\necho 42\n' > /usr/local/bin/own
chmod +x /usr/local/bin/own"""
LOOK = """#!/bin/bash
r=0; for f in answer.txt /data/a /opt/x/a /home/me/a link; do
[ "$(cat $f)" = 42 ] && r=$((r + 1)); done
[ ! -e start.txt ] && r=$((r + 1))
[ -e /usr/src/deep/a ] && r=$((r + 10)); [ -e /etc/mine ] && r=$((r + 10))
[ "$(own)" = 42 ] && r=$((r + 10))
echo $r > /logs/verifier/reward.txt
"""


@bwrap
@pytest.mark.parametrize(("sees", "worth"), [("files", 6.0), ("system", 36.0), ("processes", 36.0)])
def test_the_tests_see_what_the_setting_allows(backend, sees, worth, tmp_path):
    folder = simple(tmp_path, tests__test_DOT_sh=LOOK)
    settings = SETTINGS.model_copy(update={"verifier_sees": sees})
    assert asyncio.run(reward(folder, settings, WORK)) == worth


@bwrap
def test_a_working_folder_inside_a_system_folder_is_seen(backend, tmp_path):
    dockerfile = "FROM node:22\nWORKDIR /usr/src/app\n"
    folder = simple(tmp_path, environment__Dockerfile=dockerfile)
    assert asyncio.run(reward(folder, SETTINGS, "echo 42 > answer.txt")) == 1.0


SERVER = "#!/bin/bash\nkill -0 $(cat pid) && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"


@bwrap
def test_a_task_may_require_running_processes(backend, tmp_path):
    toml = '[metadata.paddock]\nverifier_sees = "processes"\n'
    start = "sleep 60 & echo $! > pid"
    without = simple(tmp_path / "a", tests__test_DOT_sh=SERVER)
    named = simple(tmp_path / "b", tests__test_DOT_sh=SERVER, task_DOT_toml=toml)
    assert asyncio.run(reward(without, SETTINGS, start)) == 0.0
    assert asyncio.run(reward(named, SETTINGS, start)) == 1.0


def test_a_task_may_require_system_calls(tmp_path):
    toml = '[metadata.paddock]\nallow = ["ptrace"]\n'
    task = read_task(simple(tmp_path / "a", task_DOT_toml=toml))
    shape = sandbox_settings(task.config.environment, task, HarborSettings())
    assert shape.allow_syscalls == ("ptrace",)
    with pytest.raises(TaskError, match=r"metadata\.paddock\.alow"):
        read_task(simple(tmp_path / "b", task_DOT_toml='[metadata.paddock]\nalow = ["ptrace"]\n'))


def test_sharing_follows_the_task_or_the_setting(tmp_path):
    silent = read_task(simple(tmp_path / "a"))
    shared = read_task(
        simple(tmp_path / "b", task_DOT_toml='[verifier]\nenvironment_mode = "shared"\n')
    )
    more = HarborSettings(verifier_sees="processes")
    assert verifier_view(silent, silent.steps[0], HarborSettings()) == "files"
    assert verifier_view(shared, shared.steps[0], HarborSettings()) == "system"
    assert verifier_view(silent, silent.steps[0], more) == "processes"


def test_a_forgeable_setting_warns_once(tmp_path, monkeypatch):
    monkeypatch.setattr(seen_module, "_warned", set())
    task = read_task(simple(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sees in ("files", "system", "system", "processes", "processes"):
            seen_module.warn_forgeable(task, sees)
    assert [str(each.message).split(": ")[0][-9:] for each in caught] == [" 'system'", "rocesses'"]


@bwrap
def test_check_reports_that_the_tests_do_not_see_the_system(backend, tmp_path):
    folder = simple(
        tmp_path,
        solution__solve_DOT_sh="#!/bin/bash\necho 42 > /etc/answer\n",
        tests__test_DOT_sh="#!/bin/bash\n[ -e /etc/answer ] && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    )
    report = asyncio.run(check_task(read_task(folder), SETTINGS))
    assert any("verifier_sees = 'system'" in problem for problem in report.problems)
