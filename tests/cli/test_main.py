import errno
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paddock import __version__
from paddock.cli.__main__ import COMMANDS, app
from paddock.cli.errors import ErrorReportingGroup, UserError
from paddock.config import ConfigError

ROOT = Path(__file__).parents[2]


def paddock(*arguments):
    command = [sys.executable, "-m", "paddock.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_lists_every_command():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert all(subcommand in done.stdout for subcommand in COMMANDS)


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paddock {__version__}\n"


def test_python_m_paddock_is_the_cli():
    command = [sys.executable, "-m", "paddock", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"paddock {__version__}\n"


def test_help_imports_no_torch_transformers_or_fastapi():
    code = (
        "import sys; from paddock.cli.__main__ import main; sys.argv[1:] = ['--help']\n"
        "try: main()\nfinally:\n"
        "    assert not {'torch', 'transformers', 'fastapi', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("package", ["paddock.launch", "paddock.bench"])
def test_launch_and_bench_import_without_torch(package):
    code = f"import sys, {package}; assert not {{'torch', 'fastapi'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_user_error_is_one_line_on_stderr_and_exit_code_one():
    done = paddock("model", "describe", "glm6")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: 'glm6' is neither a preset nor a folder; did you mean 'glm5'?")


def test_a_usage_error_is_exit_code_two():
    done = paddock("model", "describe")
    assert done.returncode == 2
    assert "Missing argument" in done.stderr


def raising(error):
    """The output of the CLI when a command raises this error."""
    house = typer.Typer(cls=ErrorReportingGroup, pretty_exceptions_enable=False)

    @house.callback(invoke_without_command=True)
    def subcommand():
        raise error

    return CliRunner().invoke(house, [])


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (UserError("no such thing"), "error: no such thing\n"),
        (ConfigError("unknown 'a'\nunknown 'b'"), "error: unknown 'a'\nerror: unknown 'b'\n"),
        (FileNotFoundError(2, "No such file", "x.toml"), "error: x.toml: No such file\n"),
        (  # as raised by a write of bytes: without a file name
            OSError(errno.ENOSPC, "No space left on device"),
            "error: No space left on device; free some space, then run the same command again\n",
        ),
    ],
)
def test_a_user_error_has_no_traceback(error, lines):
    done = raising(error)
    assert (done.exit_code, done.stderr) == (1, lines)


@pytest.mark.parametrize("error", [ValueError("shapes"), KeyError("k"), OSError("odd")])
def test_a_bug_still_raises(error):
    assert raising(error).exception is error
