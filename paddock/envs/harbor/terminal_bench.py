"""Conversion of terminal-bench 1 tasks to Harbor's format.

The task's run-tests.sh runs unchanged; a generated test.sh reads pytest's summary as terminal-bench
does: every test must have passed, be expected to fail, or be skipped.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddock.envs.harbor.task import HarborTask
from paddock.envs.harbor.task_config import TaskError
from paddock.sandbox import rootfs

NOTES = "notes.txt"
VERSION = "2"  # of the conversion, part of the cache key
HIDDEN_FROM_AGENT = {"tests", "solution.sh", "solution.yaml", "run-tests.sh", "task.yaml"}
TEST = r"""#!/bin/bash
# Runs the task's own tests and reads pytest's summary. Without one there is no reward.
export TEST_DIR=/tests
bash /tests/run-tests.sh 2>&1 | tee /logs/verifier/output.txt
awk '
  /short test summary info/ { inside = 1; next }
  inside && /^(PASSED|XFAIL|SKIPPED)/ { good++ }
  inside && /^(FAILED|ERROR|XPASS)/ { bad++ }
  END { if (good + bad) print (good && !bad) ? 1 : 0 > "/logs/verifier/reward.txt" }
' /logs/verifier/output.txt
"""


def read_terminal_bench_task(folder: Path, read_harbor: Callable[[Path], HarborTask]) -> HarborTask:
    """Convert and read a task. The conversion is cached by the contents of its files."""
    target = rootfs.cache_dir().parent / "tasks" / f"{folder.name}-{_digest(folder)}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=target.parent))
        convert_task(folder, made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    task = read_harbor(target)
    notes = [f"converted from terminal-bench 1: {folder}"]
    if (target / NOTES).is_file():
        notes += (target / NOTES).read_text().splitlines()
    return replace(task, name=f"terminal-bench/{folder.name}", notes=tuple(notes))


def convert_task(folder: Path, target: Path) -> None:
    """Write a terminal-bench 1 task as a Harbor task. Raises TaskError if it is incomplete."""
    config = _yaml(folder / "task.yaml")
    instruction = config.get("instruction") if isinstance(config, dict) else None
    if not isinstance(instruction, str):
        raise TaskError(f"{folder / 'task.yaml'}: instruction: missing")
    for name in ("run-tests.sh", "Dockerfile"):
        if not (folder / name).is_file():
            raise TaskError(f"{folder / name}: missing")
    agent, tests = (_timeout(folder, config, *each) for each in _TIMEOUTS)
    (target / "instruction.md").write_text(instruction)
    (target / "task.toml").write_text(
        f'schema_version = "1.4"\n\n[agent]\ntimeout_sec = {agent}\n\n'
        f"[verifier]\ntimeout_sec = {tests}\n\n"
        f"[metadata]\ndifficulty = {str(config.get('difficulty', 'unknown'))!r}\n"
    )
    for child in folder.iterdir():
        if child.name not in HIDDEN_FROM_AGENT:
            _copy(child, target / "environment" / child.name)
    compose = target / "environment" / "docker-compose.yaml"
    if compose.is_file():  # only the service `client`, the agent's, is supported
        others = sorted(set(_yaml(compose).get("services", {})) - {"client"})
        notes = [f"service {name} of docker-compose.yaml is not started" for name in others]
        (target / NOTES).write_text("".join(f"{note}\n" for note in notes))
        compose.unlink()
    if (folder / "tests").is_dir():
        _copy(folder / "tests", target / "tests")
    _copy(folder / "run-tests.sh", target / "tests" / "run-tests.sh")
    _script(target / "tests" / "test.sh", TEST)
    _solution(folder, target / "solution")


_TIMEOUTS = (("max_agent_timeout_sec", 360.0), ("max_test_timeout_sec", 60.0))


def _timeout(folder: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or not value > 0:
        raise TaskError(
            f"{folder / 'task.yaml'}: {key}: must be a number of seconds, got {value!r}"
        )
    return float(value)


def _solution(folder: Path, target: Path) -> None:
    if (folder / "solution.sh").is_file():
        text = (folder / "solution.sh").read_text()
    elif (folder / "solution.yaml").is_file():
        rows = _yaml(folder / "solution.yaml") or []
        commands = [str(row["command"]) for row in rows if isinstance(row, dict)]
        text = "#!/bin/bash\n" + "".join(f"{command}\n" for command in commands)
    else:
        return
    _script(target / "solve.sh", text)


def _script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _yaml(file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise TaskError(f"{file}: PyYAML is not installed: pip install 'paddock[envs]'") from None
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TaskError(f"{file}: not YAML: {error}") from None


def _digest(folder: Path) -> str:
    """Digest of all files of a task."""
    digest = hashlib.blake2b(VERSION.encode() + TEST.encode(), digest_size=8)
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
        digest.update(f"{path.relative_to(folder)}\0{status.st_mode}\0{target}\n".encode())
        if path.is_file() and not path.is_symlink():
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
