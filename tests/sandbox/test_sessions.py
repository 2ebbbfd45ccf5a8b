import pytest

from paddock.sandbox import PythonSession, ShellSession
from tests.sandbox.sandboxes import BOTH, BWRAP, SMALL, in_sandbox

both = pytest.mark.parametrize("backend", BOTH)
only_bwrap = pytest.mark.parametrize("backend", BWRAP)


@both
def test_a_python_session_keeps_its_state(backend):
    async def work(box):
        session = PythonSession(box)
        pieces = [
            "x = 20\nx + 1",
            "print(x)\n1 / 0",
            "import os\n_ = os.system('echo sub')",
            "def f(",
        ]
        return [await session.run(piece, 10) for piece in pieces]

    value, error, child, syntax = in_sandbox(work, backend=backend)
    assert (value.output, value.error) == ("21\n", "")
    assert error.output == "20\n"
    assert error.error.endswith("ZeroDivisionError: division by zero\n")
    assert "python_inside" not in error.error
    assert child.output == "sub\n"
    assert "SyntaxError" in syntax.error


@both
def test_a_long_error_is_truncated_and_the_interpreter_survives(backend):
    async def work(box):
        session = PythonSession(box)
        pieces = [
            "x = 7",
            "raise ValueError('a' * 100_000)",
            "raise ValueError('\\ud800')",
            "import sys; x, sys.argv",
        ]
        return [await session.run(piece, 10) for piece in pieces]

    _, long, odd, after = in_sandbox(work, backend=backend)
    assert long.error.startswith("Traceback")
    assert "\n... cut ...\n" in long.error
    assert odd.error.endswith("ValueError: \\ud800\n")
    assert after.output == "(7, ['-c'])\n"


@only_bwrap
def test_python_that_hangs_exits_or_floods_is_reported(backend):
    async def work(box):
        session = PythonSession(box)
        await session.run("x = 1", 10)
        late = await session.run("print('so far', flush=True)\nwhile True: pass", 0.5)
        gone = await session.run("x", 10)
        ended = await session.run("import os; os._exit(3)", 10)
        flood = await session.run("print('y' * 10**6)", 10)
        return late, gone, ended, flood, await session.run("1 + 1", 10)

    late, gone, ended, flood, after = in_sandbox(work)
    assert late.timed_out
    assert late.restarted
    assert late.output == "so far\n"
    assert "NameError" in gone.error
    assert ended.error == "the interpreter ended (exit code 3) and was restarted"
    assert flood.cut
    assert len(flood.output) < SMALL.max_output_bytes + 100
    assert after.output == "2\n"


@both
def test_a_shell_session_keeps_its_state(backend):
    async def work(box):
        shell = ShellSession(box)
        commands = ["cd /tmp; A=1", "pwd; echo $A; ls /nowhere", "cat; echo read", "echo 'open"]
        return [await shell.run(command, 10) for command in commands]

    moved, kept, blind, broken = in_sandbox(work, backend=backend)
    assert (moved.cwd, moved.code) == ("/tmp", 0)
    assert kept.output.startswith("/tmp\n1\nls: ")
    assert kept.code == 2
    assert blind.output == "read\n"  # a command cannot read the input of the session
    assert broken.code == 2


@both
def test_a_shell_survives_a_timeout_and_keeps_its_jobs(backend):
    async def work(box):
        shell = ShellSession(box)
        await shell.run("A=1; sleep 555 & true", 10)
        late = await shell.run("sleep 666", 0.7)
        after = await shell.run("echo $A; jobs -r | grep -c 'sleep 555'", 10)
        ended = await shell.run("exit 9", 10)
        return late, after, ended, await shell.run("echo $A.", 10)

    late, after, ended, fresh = in_sandbox(work, backend=backend)
    assert late.timed_out
    assert not late.ended
    if backend == "bwrap":  # a container engine does not tell which child belongs to which session
        assert after.output == "1\n1\n"
    assert ended.ended
    assert ended.code == 9
    assert fresh.output == ".\n"
