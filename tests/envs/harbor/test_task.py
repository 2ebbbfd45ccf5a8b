import os

import pytest

from paddock.envs.harbor import TaskError, find_task_folders, read_task
from tests.envs.harbor.tasks import in_steps, simple, write


def test_a_task_is_read_completely(tmp_path):
    task = read_task(simple(tmp_path / "a"))
    (step,) = task.steps
    assert task.name == "a"
    assert step.instruction == "Write 42 into answer.txt.\n"
    assert step.script == "test.sh"
    assert step.solution is not None
    assert task.agent_config(step).timeout_sec == 60


def test_steps_have_their_own_files_and_share_those_of_the_task(tmp_path):
    task = read_task(in_steps(tmp_path / "a"))
    assert [step.name for step in task.steps] == ["one", "two"]
    assert [path.name for path in task.steps[0].tests] == ["tests", "tests"]
    assert task.steps[1].workdir is not None


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("instruction.md", "instruction.md: file not found"),
        ("tests/test.sh", "test.sh: file not found"),
        ("task.toml", "task.toml not found"),
    ],
)
def test_a_missing_file_is_named(tmp_path, removed, message):
    folder = simple(tmp_path / "a")
    (folder / removed).unlink()
    with pytest.raises(TaskError, match=message):
        read_task(folder)


def test_a_step_without_a_folder_is_named(tmp_path):
    folder = in_steps(tmp_path / "a", task_DOT_toml='[[steps]]\nname = "three"\n')
    with pytest.raises(TaskError, match=r"task.toml: steps.three: directory"):
        read_task(folder)


def test_windows_tasks_are_rejected(tmp_path):
    folder = simple(tmp_path / "a", task_DOT_toml='[environment]\nos = "Windows"\n')
    with pytest.raises(TaskError, match=r"task.toml: environment.os: Windows"):
        read_task(folder)


def test_a_symlink_out_of_a_task_is_rejected(tmp_path):
    folder = simple(tmp_path / "a")
    os.symlink("/etc/passwd", folder / "tests" / "mine")
    with pytest.raises(TaskError, match="mine: symbolic link leads out of the task"):
        read_task(folder)


def test_canaries_are_removed_from_instructions(tmp_path):
    folder = simple(tmp_path / "a", instruction_DOT_md="# some-canary GUID 1\n\nDo it.\n")
    assert read_task(folder).steps[0].instruction == "Do it.\n"


def test_a_folder_of_tasks_is_read_in_order(tmp_path):
    for name in ("b", "a"):
        simple(tmp_path / name)
    write(tmp_path / "none", {"x": ""})
    assert [folder.name for folder in find_task_folders(tmp_path)] == ["a", "b"]
    with pytest.raises(TaskError, match="neither a task"):
        find_task_folders(tmp_path / "none")
