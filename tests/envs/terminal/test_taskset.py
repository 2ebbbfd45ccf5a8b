import asyncio
import shlex

import pytest

from paddock.envs import EnvError, make, run_rollout
from paddock.envs.env import scripted_policy
from paddock.envs.terminal.task import write_harbor_task
from paddock.envs.terminal.taskset import command_policy
from paddock.records import Failure, Message, ToolCall, Verdict
from paddock.sandbox import SandboxError, open_sandbox
from tests.envs.harbor.tasks import in_steps, simple
from tests.sandbox.sandboxes import BWRAP

bwrap = pytest.mark.parametrize("backend", BWRAP)
SMALL = {"levels": [2], "families": ["files", "search", "archive"], "warm_sandboxes": 0}


def run(taskset, policy, index=0, split="train"):
    task = taskset.task(index, split)

    async def once():
        env = taskset.make_env(task)
        return await run_rollout(env, policy(task))

    return asyncio.run(once())


def say(content="", **arguments):
    calls = (ToolCall(id="c", name="shell", arguments=arguments),) if arguments else ()
    return Message(role="assistant", content=content, tool_calls=calls)


def saying(*replies):
    return lambda task: scripted_policy(*replies)


@bwrap
def test_the_solution_has_reward_one_and_doing_nothing_has_reward_zero(backend):
    taskset = make("terminal", SMALL)
    solved = run(taskset, taskset.solver)
    assert solved.outcome.reward == 1.0
    assert solved.leak == ""
    assert set(solved.outcome.parts.values()) == {1.0}
    empty = run(taskset, lambda task: command_policy([]))
    assert empty.outcome.reward == 0.0
    assert empty.outcome.note.startswith("not so: ")


@bwrap
def test_the_shell_persists_and_reports_errors(backend):
    taskset = make("terminal", SMALL | {"command_timeout_s": 1.0})
    commands = ["cd /tmp && export A=5", "pwd; echo $A; false", "sleep 30", "exit 3", "pwd"]
    trace = run(taskset, lambda task: command_policy(commands))
    results = [message.content for message in trace.messages if message.role == "tool"]
    assert results[0] == "(no output)"
    assert results[1] == "/tmp\n5\n(exit code 1)"
    assert results[2].endswith("(over 1 s: it was killed)")
    assert results[3] == "(exit code 3)\n(the shell ended; the next command gets a fresh one)"
    assert results[4] == "/workspace\n"


@bwrap
def test_invalid_tool_calls_get_an_error_message(backend):
    taskset = make("terminal", SMALL)
    trace = run(taskset, saying(say(cmd="ls"), say(command="ls", timeout_s=-1), say("Done.")))
    results = [message.content for message in trace.messages if message.role == "tool"]
    assert "unknown argument 'cmd'" in results[0]
    assert "must be above zero" in results[1]


@bwrap
def test_background_processes_cannot_affect_the_verifier(backend):
    """A background process that writes the solution after the policy has ended."""
    taskset = make("terminal", {"levels": [1], "families": ["permissions"], "warm_sandboxes": 0})
    fix = taskset.task_by_id(taskset.task(0)).solution[0]
    wait = "while true; do sleep 0.05; done"
    later = f"(trap {shlex.quote(fix)} TERM HUP INT EXIT; {wait}) >/dev/null 2>&1 &"
    assert run(taskset, lambda task: command_policy([later])).outcome.reward == 0.0


FAULTS = [
    ("start", "infrastructure", SandboxError("no box")),
    ("start", "world", OSError("disk")),
    ("grade", "infrastructure", SandboxError("box died")),
    ("grade", "grader", KeyError("bug in the checker")),
    ("grade", "time", TimeoutError("tests took too long")),
]


@bwrap
@pytest.mark.parametrize(("where", "kind", "error"), FAULTS)
def test_an_environment_error_is_a_failure_and_not_reward_zero(
    backend, monkeypatch, where, kind, error
):
    from paddock.envs.terminal import taskset as module

    async def broken(*_):
        raise error

    monkeypatch.setattr(module, "write_files" if where == "start" else "score_workspace", broken)
    taskset = make("terminal", SMALL)
    outcome = run(taskset, taskset.solver).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.where) == (kind, where)


def dying(taskset):
    """The outcome when the sandbox dies during the rollout."""
    task = taskset.task(0)

    async def once():
        env = taskset.make_env(task)

        async def policy(messages, tools):
            await env.backend._box.close()
            return say(command="ls") if len(messages) < 3 else say("Done.")

        return await run_rollout(env, policy)

    return asyncio.run(once()).outcome


@bwrap
def test_a_dead_sandbox_is_a_failure_if_no_other_works_either(backend, monkeypatch):
    taskset = make("terminal", SMALL)
    assert dying(taskset).reward == 0.0, "others work, so it was the policy's doing"
    opened = []

    def once(*given):
        opened.append(given)
        if len(opened) > 1:
            raise SandboxError("no sandbox today")
        return open_sandbox(*given)

    monkeypatch.setattr("paddock.sandbox.pool.open_sandbox", once)
    outcome = dying(taskset)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.what) == ("infrastructure", "no sandbox today")


TRICKS = {  # run after the solution, with the reward that remains
    "printf() { builtin printf '%s x y\\n' \"$2\"; }; cd /": 1.0,
    "kill -9 -1": 1.0,
    "find . -type f -exec sh -c 'rm {}; mkfifo {}' ';'": 0.0,
    "mkdir -p /run/check.py /run/expects.json; rm -rf /workspace/*": 0.0,
}


@bwrap
@pytest.mark.parametrize("trick", TRICKS)
def test_a_policy_that_breaks_its_terminal_gets_a_verdict(backend, trick):
    taskset = make("terminal", SMALL | {"families": ["archive"], "verifier_timeout_s": 20.0})
    outcome = run(
        taskset, lambda task: command_policy([*taskset.task_by_id(task).solution, trick])
    ).outcome
    assert isinstance(outcome, Verdict), outcome
    assert outcome.reward == TRICKS[trick]


@bwrap
@pytest.mark.parametrize("sees", ["files", "processes"])
def test_a_policy_that_breaks_the_verifier_gets_reward_zero(backend, tmp_path, sees):
    settings = {"split": "train", "harbor": {"verifier_sees": sees}}
    taskset = make("harbor", {"path": str(simple(tmp_path / "a")), **settings})
    breaking = say(command="rm -rf /logs/verifier; touch /logs/verifier")
    outcome = run(taskset, saying(breaking, say("Done."))).outcome
    assert isinstance(outcome, Verdict), outcome
    assert outcome.reward == 0.0
    # A fresh sandbox is verified as if nothing had been done; the policy's own cannot be.
    unverified = outcome.note.startswith("it cannot be verified as it was left")
    assert unverified == (sees == "processes")


@bwrap
def test_a_directory_of_tasks_is_a_taskset(backend, tmp_path):
    for name in ("a", "b"):
        simple(tmp_path / name)
    taskset = make("harbor", {"path": str(tmp_path), "split": "train"})
    assert taskset.size("train") == 2
    assert [taskset.task(i).id for i in range(2)] == ["harbor/a", "harbor/b"]
    assert {taskset.task(i).id for i in (2, 3)} == {"harbor/a", "harbor/b"}
    assert run(taskset, taskset.solver).outcome == Verdict(reward=1.0, parts={"reward": 1.0})
    assert run(taskset, saying(say("Done."))).outcome.reward == 0.0
    with pytest.raises(EnvError, match="none of its 2 tasks is in split 'test'"):
        taskset.task(0, "test")


@bwrap
def test_tests_are_not_visible_to_the_policy(backend, tmp_path):
    taskset = make("harbor", {"path": str(simple(tmp_path / "a")), "split": "train"})
    look = (
        "ls -A /tests /solution /logs/verifier; "
        "grep -rl 'expected is 42' /app /tmp /root /opt /home /srv /logs"
    )
    trace = run(taskset, saying(say(command=f"({look}) 2>/dev/null; true"), say("Done.")))
    seen = next(message.content for message in trace.messages if message.role == "tool")
    assert "test.sh" not in seen
    assert "hidden.txt" not in seen


@bwrap
def test_steps_of_a_task_are_turns_of_one_conversation(backend, tmp_path):
    taskset = make("harbor", {"path": str(in_steps(tmp_path / "a")), "split": "test"})
    solved = run(taskset, taskset.solver, split="test")
    assert solved.outcome.reward == 1.0
    assert solved.outcome.note == "2 of 2 steps were reached"
    prompts = [message.content for message in solved.messages if message.role == "user"]
    assert prompts[1] == "Make two.txt."
    stopped = run(taskset, saying(say("Done.")), split="test")
    assert stopped.outcome.reward == 0.0
    assert stopped.outcome.note == "1 of 2 steps were reached"


@bwrap
def test_the_tests_of_a_step_are_gone_in_the_next(backend, tmp_path):
    taskset = make("harbor", {"path": str(in_steps(tmp_path / "a")), "split": "test"})
    replies = say(command="touch one.txt"), say("Next."), say(command="ls -A /tests"), say("Done.")
    trace = run(taskset, saying(*replies), split="test")
    results = [message.content for message in trace.messages if message.role == "tool"]
    assert "test.sh" not in results[1]
    assert trace.outcome.note == "2 of 2 steps were reached"


@bwrap
def test_a_policy_that_times_out_is_still_verified(backend, tmp_path):
    toml = "[agent]\ntimeout_sec = 0.5\n"
    folder = simple(tmp_path / "a", task_DOT_toml=toml)
    taskset = make("harbor", {"path": str(folder), "split": "train"})
    work = say(command="echo 42 > answer.txt; sleep 0.7")
    trace = run(taskset, saying(work, say(command="rm answer.txt"), say("never sent")))
    assert trace.outcome == Verdict(reward=1.0, parts={"reward": 1.0})
    assert trace.turns == 2


@bwrap
def test_a_broken_verifier_is_a_grader_failure(backend, tmp_path):
    folder = simple(tmp_path / "a", tests__test_DOT_sh="#!/bin/bash\ntrue\n")
    taskset = make("harbor", {"path": str(folder), "split": "train"})
    outcome = run(taskset, saying(say("Done."))).outcome
    assert (outcome.kind, outcome.where) == ("grader", "verify")


@bwrap
def test_a_generated_task_can_be_written_as_a_harbor_task(backend, tmp_path):
    made = make("terminal", SMALL)
    write_harbor_task(made.generated_task(0, "train"), tmp_path / "a")
    taskset = make("harbor", {"path": str(tmp_path / "a"), "split": "train"})
    assert run(taskset, taskset.solver).outcome.reward == 1.0
    assert run(taskset, saying(say("Done."))).outcome.reward == 0.0
