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
from tests.sandbox.boxes import BWRAP

bwrap = pytest.mark.parametrize("backend", BWRAP)
SMALL = {"levels": [2], "families": ["files", "search", "archive"], "warm_sandboxes": 0}


def run(world, policy, index=0, split="train"):
    task = world.task(index, split)

    async def once():
        env = world.make_env(task)
        return await run_rollout(env, policy(task))

    return asyncio.run(once())


def say(content="", **arguments):
    calls = (ToolCall(id="c", name="shell", arguments=arguments),) if arguments else ()
    return Message(role="assistant", content=content, tool_calls=calls)


def saying(*replies):
    return lambda task: scripted_policy(*replies)


@bwrap
def test_the_solution_of_a_puzzle_is_worth_one_and_nothing_is_worth_nothing(backend):
    world = make("terminal", SMALL)
    solved = run(world, world.solver)
    assert solved.outcome.reward == 1.0
    assert solved.leak == ""
    assert set(solved.outcome.parts.values()) == {1.0}
    empty = run(world, lambda task: command_policy([]))
    assert empty.outcome.reward == 0.0
    assert empty.outcome.note.startswith("not so: ")


@bwrap
def test_a_shell_stays_and_says_what_went_wrong(backend):
    world = make("terminal", SMALL | {"command_timeout_s": 1.0})
    commands = ["cd /tmp && export A=5", "pwd; echo $A; false", "sleep 30", "exit 3", "pwd"]
    episode = run(world, lambda task: command_policy(commands))
    said = [message.content for message in episode.messages if message.role == "tool"]
    assert said[0] == "(no output)"
    assert said[1] == "/tmp\n5\n(exit code 1)"
    assert said[2].endswith("(over 1 s: it was killed)")
    assert said[3] == "(exit code 3)\n(the shell ended; the next command gets a fresh one)"
    assert said[4] == "/workspace\n"


@bwrap
def test_wrong_calls_are_answered_in_words(backend):
    world = make("terminal", SMALL)
    episode = run(world, saying(say(cmd="ls"), say(command="ls", timeout_s=-1), say("Done.")))
    said = [message.content for message in episode.messages if message.role == "tool"]
    assert "unknown argument 'cmd'" in said[0]
    assert "must be above zero" in said[1]


@bwrap
def test_what_still_runs_cannot_touch_the_grading(backend):
    """A background process that puts things right once its player is gone."""
    world = make("terminal", {"levels": [1], "families": ["permissions"], "warm_sandboxes": 0})
    fix = world.task_by_id(world.task(0)).solution[0]
    wait = "while true; do sleep 0.05; done"
    later = f"(trap {shlex.quote(fix)} TERM HUP INT EXIT; {wait}) >/dev/null 2>&1 &"
    assert run(world, lambda task: command_policy([later])).outcome.reward == 0.0


FAULTS = [
    ("start", "infrastructure", SandboxError("no box")),
    ("start", "world", OSError("disk")),
    ("grade", "infrastructure", SandboxError("box died")),
    ("grade", "grader", KeyError("bug in the checker")),
    ("grade", "time", TimeoutError("tests took too long")),
]


@bwrap
@pytest.mark.parametrize(("where", "kind", "error"), FAULTS)
def test_a_fault_of_the_world_is_a_failure_and_never_a_zero(
    backend, monkeypatch, where, kind, error
):
    from paddock.envs.terminal import taskset as module

    async def broken(*_):
        raise error

    monkeypatch.setattr(module, "write_files" if where == "start" else "score_workspace", broken)
    world = make("terminal", SMALL)
    outcome = run(world, world.solver).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.where) == (kind, where)


def dying(world):
    """What comes of a sandbox that dies under the player."""
    task = world.task(0)

    async def once():
        env = world.make_env(task)

        async def policy(messages, tools):
            await env.backend._box.close()
            return say(command="ls") if len(messages) < 3 else say("Done.")

        return await run_rollout(env, policy)

    return asyncio.run(once()).outcome


@bwrap
def test_a_sandbox_that_dies_is_a_failure_if_no_other_works_either(backend, monkeypatch):
    world = make("terminal", SMALL)
    assert dying(world).reward == 0.0, "others work, so it was the player's doing"
    opened = []

    def once(*given):
        opened.append(given)
        if len(opened) > 1:
            raise SandboxError("no sandbox today")
        return open_sandbox(*given)

    monkeypatch.setattr("paddock.sandbox.pool.open_sandbox", once)
    outcome = dying(world)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.what) == ("infrastructure", "no sandbox today")


TRICKS = {  # after the solution, and what that is still worth then
    "printf() { builtin printf '%s x y\\n' \"$2\"; }; cd /": 1.0,
    "kill -9 -1": 1.0,
    "find . -type f -exec sh -c 'rm {}; mkfifo {}' ';'": 0.0,
    "mkdir -p /run/check.py /run/expects.json; rm -rf /workspace/*": 0.0,
}


@bwrap
@pytest.mark.parametrize("trick", TRICKS)
def test_who_breaks_its_terminal_gets_a_verdict(backend, trick):
    world = make("terminal", SMALL | {"families": ["archive"], "verifier_timeout_s": 20.0})
    outcome = run(
        world, lambda task: command_policy([*world.task_by_id(task).solution, trick])
    ).outcome
    assert isinstance(outcome, Verdict), outcome
    assert outcome.reward == TRICKS[trick]


@bwrap
@pytest.mark.parametrize("sees", ["files", "processes"])
def test_who_breaks_the_verifier_of_a_task_gets_nothing(backend, tmp_path, sees):
    settings = {"split": "train", "harbor": {"verifier_sees": sees}}
    world = make("harbor", {"path": str(simple(tmp_path / "a")), **settings})
    breaking = say(command="rm -rf /logs/verifier; touch /logs/verifier")
    outcome = run(world, saying(breaking, say("Done."))).outcome
    assert isinstance(outcome, Verdict), outcome
    assert outcome.reward == 0.0
    # A fresh sandbox is verified as if nothing had been done; the player's own cannot be.
    unverified = outcome.note.startswith("it cannot be verified as it was left")
    assert unverified == (sees == "processes")


@bwrap
def test_a_folder_of_tasks_is_a_world(backend, tmp_path):
    for name in ("a", "b"):
        simple(tmp_path / name)
    world = make("harbor", {"path": str(tmp_path), "split": "train"})
    assert world.size("train") == 2
    assert [world.task(i).id for i in range(2)] == ["harbor/a", "harbor/b"]
    assert {world.task(i).id for i in (2, 3)} == {"harbor/a", "harbor/b"}
    assert run(world, world.solver).outcome == Verdict(reward=1.0, parts={"reward": 1.0})
    assert run(world, saying(say("Done."))).outcome.reward == 0.0
    with pytest.raises(EnvError, match="none of its 2 tasks is in split 'test'"):
        world.task(0, "test")


@bwrap
def test_tests_are_not_there_while_the_player_works(backend, tmp_path):
    world = make("harbor", {"path": str(simple(tmp_path / "a")), "split": "train"})
    look = (
        "ls -A /tests /solution /logs/verifier; "
        "grep -rl 'expected is 42' /app /tmp /root /opt /home /srv /logs"
    )
    episode = run(world, saying(say(command=f"({look}) 2>/dev/null; true"), say("Done.")))
    seen = next(message.content for message in episode.messages if message.role == "tool")
    assert "test.sh" not in seen
    assert "hidden.txt" not in seen


@bwrap
def test_the_steps_of_a_task_are_turns_of_one_conversation(backend, tmp_path):
    world = make("harbor", {"path": str(in_steps(tmp_path / "a")), "split": "test"})
    solved = run(world, world.solver, split="test")
    assert solved.outcome.reward == 1.0
    assert solved.outcome.note == "2 of 2 steps were reached"
    asked = [message.content for message in solved.messages if message.role == "user"]
    assert asked[1] == "Make two.txt."
    stopped = run(world, saying(say("Done.")), split="test")
    assert stopped.outcome.reward == 0.0
    assert stopped.outcome.note == "1 of 2 steps were reached"


@bwrap
def test_the_tests_of_a_step_are_gone_in_the_next(backend, tmp_path):
    world = make("harbor", {"path": str(in_steps(tmp_path / "a")), "split": "test"})
    replies = say(command="touch one.txt"), say("Next."), say(command="ls -A /tests"), say("Done.")
    episode = run(world, saying(*replies), split="test")
    said = [message.content for message in episode.messages if message.role == "tool"]
    assert "test.sh" not in said[1]
    assert episode.outcome.note == "2 of 2 steps were reached"


@bwrap
def test_a_player_out_of_time_is_graded_all_the_same(backend, tmp_path):
    toml = "[agent]\ntimeout_sec = 0.5\n"
    folder = simple(tmp_path / "a", task_DOT_toml=toml)
    world = make("harbor", {"path": str(folder), "split": "train"})
    work = say(command="echo 42 > answer.txt; sleep 0.7")
    episode = run(world, saying(work, say(command="rm answer.txt"), say("never said")))
    assert episode.outcome == Verdict(reward=1.0, parts={"reward": 1.0})
    assert episode.turns == 2


@bwrap
def test_a_broken_verifier_is_a_failure_of_the_grader(backend, tmp_path):
    folder = simple(tmp_path / "a", tests__test_DOT_sh="#!/bin/bash\ntrue\n")
    world = make("harbor", {"path": str(folder), "split": "train"})
    outcome = run(world, saying(say("Done."))).outcome
    assert (outcome.kind, outcome.where) == ("grader", "verify")


@bwrap
def test_a_puzzle_can_be_written_as_a_harbor_task(backend, tmp_path):
    made = make("terminal", SMALL)
    write_harbor_task(made.generated_task(0, "train"), tmp_path / "a")
    world = make("harbor", {"path": str(tmp_path / "a"), "split": "train"})
    assert run(world, world.solver).outcome.reward == 1.0
    assert run(world, saying(say("Done."))).outcome.reward == 0.0
