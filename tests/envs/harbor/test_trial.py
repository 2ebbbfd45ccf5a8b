import asyncio
import json
import secrets

import pytest

from paddock.envs.harbor import Trial, check_task, read_task
from paddock.envs.harbor.failures import TrialFailed
from paddock.envs.harbor.image import DockerfileBuilder
from paddock.envs.harbor.results import TrialInfo, now, save_logs, write_results
from tests.envs.harbor.tasks import SETTINGS, TEST, in_steps, simple
from tests.sandbox.sandboxes import BOTH, BWRAP

bwrap = pytest.mark.parametrize("backend", BWRAP)


def tried(folder, work=None, settings=SETTINGS, keep=None):
    """The rewards of one trial; `work(box)` is the agent, by default it does nothing."""

    async def run():
        trial = Trial(read_task(folder), settings)
        try:
            await trial.start()
            for step in trial.task.steps:
                await trial.begin_step(step)
                if work is not None:
                    await work(trial.agent_sandbox)
                await trial.verify(step)
                if keep is not None:
                    await save_logs(trial, step, keep)
                if not trial.may_continue(step):
                    break
            if keep is not None:
                record = TrialInfo(name="t", agent="test", started=now(), finished=now())
                write_results(trial, settings, keep, record)
            return trial.total_rewards()
        finally:
            await trial.close()

    return asyncio.run(run())


def doing(command, **how):
    async def work(box):
        done = await box.exec(command, timeout_s=20, **how)
        assert done.ok, done

    return work


@bwrap
def test_the_reward_file_counts_and_the_exit_code_does_not(backend, tmp_path):
    folder = simple(tmp_path / "a")
    assert tried(folder) == {"reward": 0.0}
    assert tried(folder, doing("echo 42 > answer.txt")) == {"reward": 1.0}


@bwrap
def test_the_environment_is_built_once_and_cached(backend, tmp_path, monkeypatch):
    folder = simple(
        tmp_path / "a",
        environment__Dockerfile=(
            "FROM debian:12\nENV GREETING=hi\nWORKDIR /app\nCOPY start.txt deep/\n"
            "RUN date +%s%N > when.txt # {}\n"
            "RUN echo $GREETING > said.txt; rm /usr/bin/yes\n"
            "USER nobody\n"
        ).replace("{}", secrets.token_hex(8)),
    )
    seen = []

    async def work(box):
        done = await box.exec(
            "cat when.txt said.txt deep/start.txt; whoami; pwd; echo $GREETING; ls /usr/bin/yes",
            timeout_s=20,
        )
        seen.append(done.stdout)

    tried(folder, work)
    monkeypatch.delattr(DockerfileBuilder, "_run")  # nothing runs a second time
    tried(folder, work)
    assert seen[0] == seen[1]
    assert seen[0].split("\n", 1)[1] == "hi\nstart\nnobody\n/app\nhi\n"


@bwrap
def test_stale_rewards_and_stale_tests_do_not_count(backend, tmp_path):
    cheat = "mkdir -p /tests; echo 'exit 0' > /tests/test.sh; echo 1 > /logs/verifier/reward.txt; "
    cheat += "echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    assert tried(simple(tmp_path / "a"), doing(cheat)) == {"reward": 0.0}


@bwrap
def test_tests_are_never_in_the_sandbox_of_the_agent(backend, tmp_path):
    async def run():
        trial = Trial(read_task(simple(tmp_path / "a")), SETTINGS)
        try:
            await trial.start()
            (step,) = trial.task.steps
            await trial.verify(step)
            return [
                await box.box.exec("ls /tests")
                for box in (trial.agent_sandbox, trial.verifier_sandbox)
            ]
        finally:
            await trial.close()

    agents, graders = asyncio.run(run())
    assert agents.stdout == ""
    assert graders.stdout == "hidden.txt\ntest.sh\n"


FAULTS = {
    "RewardFileNotFoundError": "#!/bin/bash\necho nothing to see\n",
    "RewardFileEmptyError": "#!/bin/bash\n: > /logs/verifier/reward.txt\n",
    "VerifierOutputParseError": "#!/bin/bash\necho good > /logs/verifier/reward.txt\n",
    "VerifierTimeoutError": "#!/bin/bash\nsleep 60\n",
}


@bwrap
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_verifier_is_a_grader_failure(backend, tmp_path, fault):
    toml = "[verifier]\ntimeout_sec = 1.5\n"
    folder = simple(tmp_path / "a", tests__test_DOT_sh=FAULTS[fault], task_DOT_toml=toml)
    with pytest.raises(TrialFailed) as stopped:
        tried(folder)
    assert stopped.value.exception == fault
    assert stopped.value.cause == "verifier_failed"
    assert stopped.value.failure.kind == "grader"


@bwrap
@pytest.mark.parametrize(
    ("dockerfile", "toml", "where"),
    [
        ("FROM x\nRUN false\n", "", "build"),
        ("FROM x\nRUN sleep 60\n", "[environment]\nbuild_timeout_sec = 1\n", "build"),
        (
            "FROM x\n",
            '[environment]\nhealthcheck = {command = "false", retries = 2, interval_sec = 0.01}\n',
            "healthcheck",
        ),
    ],
)
def test_a_broken_environment_is_a_failure(backend, tmp_path, dockerfile, toml, where):
    folder = simple(tmp_path / "a", environment__Dockerfile=dockerfile, task_DOT_toml=toml)
    with pytest.raises(TrialFailed) as stopped:
        tried(folder)
    assert stopped.value.failure.where == where
    assert stopped.value.failure.kind == "infrastructure"


@bwrap
def test_several_services_are_rejected(backend, tmp_path):
    folder = simple(tmp_path / "a")
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(TrialFailed, match="several services"):
        tried(folder)


@bwrap
def test_a_health_check_is_awaited(backend, tmp_path):
    command = "echo x >> n; test $(wc -l < n) -ge 3"
    toml = f"[environment.healthcheck]\ncommand = {command!r}\nretries = 5\ninterval_sec = 0.01\n"
    seen = []

    async def work(box):
        seen.append((await box.exec("cat n", timeout_s=5)).stdout)

    tried(simple(tmp_path / "a", task_DOT_toml=toml), work)
    assert seen == ["x\nx\nx\n"]


BOMB = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
except OSError:
    open("/tmp/full", "w").close()
    time.sleep(600)
"""


@bwrap
def test_a_fork_bomb_does_not_prevent_the_verdict(backend, tmp_path):
    async def work(box):
        await box.box.spawn([*box.box.python, "-c", BOMB])
        while not (await box.box.exec(["test", "-e", "/tmp/full"])).ok:
            await asyncio.sleep(0.05)

    assert tried(simple(tmp_path / "a"), work) == {"reward": 0.0}


@bwrap
def test_variables_reach_agent_and_verifier(backend, tmp_path):
    toml = (
        '[environment.env]\nA = "${GIVEN}"\nB = "${NOT:-else}"\n'
        '[verifier.env]\nC = "only the verifier"\n'
    )
    script = (
        '#!/bin/bash\n[ "$A$B$C" = "yeselseonly the verifier" ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n"
    )
    folder = simple(tmp_path / "a", task_DOT_toml=toml, tests__test_DOT_sh=script)
    settings = SETTINGS.model_copy(update={"env_vars": {"GIVEN": "yes"}})
    check_env = doing('test "$A$B$C" = yeselse')
    assert tried(folder, check_env, settings) == {"reward": 1.0}
    with pytest.raises(ValueError, match=r"environment\.env\.A: variable 'GIVEN' is not set"):
        tried(folder)


@bwrap
def test_a_separate_verifier_sees_only_artifacts(backend, tmp_path):
    toml = 'artifacts = ["answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    script = (
        '#!/bin/bash\n[ "$(cat answer.txt)" = 42 ] && [ ! -e other.txt ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n"
    )
    folder = simple(tmp_path / "a", task_DOT_toml=toml, tests__test_DOT_sh=script)
    assert tried(folder, doing("echo 42 > answer.txt; touch other.txt")) == {"reward": 1.0}


@bwrap
def test_steps_are_gated_and_their_rewards_combined(backend, tmp_path):
    folder = in_steps(tmp_path / "a")
    assert tried(folder) == {"one": 0.0, "reward": 0.0}  # the second step is not reached
    assert tried(folder, doing("touch one.txt")) == {"one": 0.5, "reward": 0.5, "two": 0.0}
    both = doing("touch one.txt; test ! -e prepared || touch two.txt")
    assert tried(folder, both) == {"one": 0.5, "reward": 1.0, "two": 0.5}


@bwrap
def test_a_trial_writes_the_folder_layout_of_harbor(backend, tmp_path):
    folder = simple(tmp_path / "a", task_DOT_toml='artifacts = ["answer.txt", "/nowhere"]\n')
    out = tmp_path / "trial"
    work = doing("echo 42 > answer.txt; echo log > /logs/agent/a.log; echo p > /logs/artifacts/p")
    tried(folder, work, keep=out)
    result = json.loads((out / "result.json").read_text())
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert result["exception_info"] is None
    assert (out / "verifier" / "reward.txt").read_text() == "1\n"
    assert (out / "verifier" / "test-stdout.txt").exists()
    assert (out / "agent" / "a.log").read_text() == "log\n"
    assert (out / "artifacts" / "answer.txt").read_text() == "42\n"
    assert (out / "artifacts" / "logs" / "artifacts" / "p").exists()
    manifest = json.loads((out / "artifacts" / "manifest.json").read_text())
    assert [row["status"] for row in manifest] == ["ok", "ok", "missing"]
    assert json.loads((out / "lock.json").read_text())["task"]["digest"].startswith("sha256:")
    assert {"config.json", "trial.log"} <= {path.name for path in out.iterdir()}


def checked(folder, settings=SETTINGS):
    return asyncio.run(check_task(read_task(folder), settings))


@bwrap
def test_a_sound_task_passes_the_check(backend, tmp_path):
    for folder in (simple(tmp_path / "a"), in_steps(tmp_path / "b")):
        report = checked(folder)
        assert report.is_sound, report.problems
        assert report.readable == ()


@bwrap
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"solution__solve_DOT_sh": "echo 41 > answer.txt\n"}, "the solution has reward 0"),
        (
            {"tests__test_DOT_sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"},
            "doing nothing has reward 1",
        ),
        (
            {"environment__start_DOT_txt": "the answer that is expected is 42\n"},
            "the agent can read /app/start.txt",
        ),
        (
            {"tests__test_DOT_sh": "#!/bin/bash\n"},
            "no verdict for doing nothing: verify: no reward file",
        ),
    ],
)
def test_an_unsound_task_is_reported_with_the_reason(backend, tmp_path, changes, problem):
    report = checked(simple(tmp_path / "a", **changes))
    assert not report.is_sound
    assert any(problem in line for line in report.problems), report.problems


@bwrap
def test_tests_that_hang_without_a_solution_do_not_make_a_task_unsound(backend, tmp_path):
    script = TEST.replace("echo 0", "sleep 60")
    toml = "[verifier]\ntimeout_sec = 2\n"
    report = checked(simple(tmp_path / "a", tests__test_DOT_sh=script, task_DOT_toml=toml))
    assert report.is_sound, report.problems
    assert any("the tests exceeded 2 s" in note for note in report.notes)


@pytest.mark.parametrize("backend", BOTH[1:])
def test_an_unavailable_image_is_a_failure(backend, tmp_path):
    folder = simple(tmp_path / "a", environment__Dockerfile="FROM localhost:1/no/such:image\n")
    sandbox = SETTINGS.sandbox.model_copy(update={"backend": "container"})
    with pytest.raises(TrialFailed) as stopped:
        tried(folder, settings=SETTINGS.model_copy(update={"sandbox": sandbox}))
    assert stopped.value.failure.where == "build"
    assert stopped.value.failure.kind == "infrastructure"


@pytest.mark.parametrize("backend", BOTH[1:])
def test_a_task_runs_in_a_container(backend, tmp_path):
    folder = simple(tmp_path / "a", task_DOT_toml='[environment]\nworkdir = "/app"\n')
    (folder / "environment" / "Dockerfile").unlink()
    sandbox = SETTINGS.sandbox.model_copy(update={"backend": "container"})
    settings = SETTINGS.model_copy(update={"sandbox": sandbox})
    assert tried(folder, doing("echo 42 > answer.txt"), settings) == {"reward": 1.0}
