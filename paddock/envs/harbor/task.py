"""Task folders in Harbor's layout.

task/
  task.toml  instruction.md
  environment/   Dockerfile and the files that it copies
  tests/         test.sh and other files; uploaded after the agent is done
  solution/      solve.sh and other files; uploaded only to run the reference solution
  steps/NAME/    of multi-step tasks: instruction.md, tests/, solution/, workdir/
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paddock.envs.harbor.task_config import (
    AgentConfig,
    ArtifactConfig,
    EnvironmentConfig,
    StepConfig,
    TaskConfig,
    TaskError,
    VerifierConfig,
    read_config,
)

CANARY = "canary"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStep:
    """One instruction with its tests; most tasks have one step, without a name."""

    name: str
    instruction: str
    tests: tuple[Path, ...]  # directories, copied over each other in this order
    script: str  # path below /tests
    solution: Path | None
    workdir: Path | None
    config: StepConfig

    @property
    def label(self) -> str:
        return self.name or "the task"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task read from its folder."""

    folder: Path
    name: str
    config: TaskConfig
    steps: tuple[TaskStep, ...]
    unknown: tuple[str, ...] = ()  # unknown keys of task.toml
    notes: tuple[str, ...] = field(default=())  # about its conversion

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def is_multi_step(self) -> bool:
        return bool(self.config.steps)

    def agent_config(self, step: TaskStep) -> AgentConfig:
        """The agent table of a step, with defaults from the task."""
        names = step.config.agent.model_fields_set
        return self.config.agent.model_copy(
            update={name: getattr(step.config.agent, name) for name in names}
        )

    def verifier_config(self, step: TaskStep) -> VerifierConfig:
        """The verifier table of a step, with defaults from the task."""
        names = step.config.verifier.model_fields_set
        merged = {name: getattr(step.config.verifier, name) for name in names}
        merged["env"] = {**self.config.verifier.env, **step.config.verifier.env}
        return self.config.verifier.model_copy(update=merged)

    def separate_verifier(self, step: TaskStep) -> EnvironmentConfig | None:
        """The verifier's own environment, or None if it shares the agent's."""
        own, shared = step.config.verifier, self.config.verifier
        if (own.effective_mode or shared.effective_mode or "shared") == "shared":
            return None
        return own.environment or shared.environment or self.config.environment

    def artifacts(self, step: TaskStep) -> tuple[ArtifactConfig, ...]:
        return (*self.config.artifacts, *step.config.artifacts)


def is_task_folder(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def find_task_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a task, else the tasks in it by name. Raises TaskError if none."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: folder not found")
    if is_task_folder(folder):
        return [folder]
    found = sorted(child for child in folder.iterdir() if child.is_dir() and is_task_folder(child))
    if not found:
        raise TaskError(f"{folder}: neither a task (task.toml, task.yaml) nor a directory of tasks")
    return found


def read_task(folder: Path) -> HarborTask:
    """Read a task in Harbor's format, or in that of terminal-bench 1, which is converted first.

    Raises TaskError if the folder is not a valid task.
    """
    # Imported here, because the converter uses this module.
    from paddock.envs.harbor.terminal_bench import read_terminal_bench_task

    if (folder / "task.toml").is_file():
        return _read(folder)
    if (folder / "task.yaml").is_file():
        return read_terminal_bench_task(folder, _read)
    raise TaskError(f"{folder}: task.toml not found")


def _read(folder: Path) -> HarborTask:
    config, unknown = read_config(folder / "task.toml")
    if config.environment.os == "windows":
        raise TaskError(f"{folder / 'task.toml'}: environment.os: Windows tasks are not supported")
    if not (folder / "environment").is_dir() and not config.environment.docker_image:
        raise TaskError(f"{folder}: needs a directory environment/ or environment.docker_image")
    for name in ("environment", "tests", "solution", "steps"):
        _reject_outside_links(folder / name, folder)
    steps = tuple(_steps(folder, config))
    name = config.task.name if config.task else folder.name
    return HarborTask(folder=folder, name=name, config=config, steps=steps, unknown=unknown)


def _steps(folder: Path, config: TaskConfig) -> Iterator[TaskStep]:
    if not config.steps:
        yield _step(folder, folder, StepConfig.model_construct(name=""), config)
    for step in config.steps or ():
        step_folder = folder / "steps" / step.name
        if not step_folder.is_dir():
            raise TaskError(
                f"{folder / 'task.toml'}: steps.{step.name}: directory {step_folder} not found"
            )
        yield _step(folder, step_folder, step, config)


def _step(folder: Path, step_folder: Path, step: StepConfig, config: TaskConfig) -> TaskStep:
    file = step_folder / "instruction.md"
    if not file.is_file():
        raise TaskError(f"{file}: file not found")
    tests = [folder / "tests"]
    if folder != step_folder:
        tests.append(step_folder / "tests")
    existing = tuple(path for path in tests if path.is_dir())
    # The step's script takes precedence over the task's.
    script = next((name for path in reversed(existing) for name in _scripts(path, "test")), None)
    if script is None and _separate_image(step, config) is None:
        raise TaskError(f"{tests[-1] / 'test.sh'}: file not found")
    solution = step_folder / "solution"
    workdir = step_folder / "workdir"
    solvable = solution.is_dir() and any(_scripts(solution, "solve"))
    return TaskStep(
        name=step.name,
        instruction=_without_canary(file.read_text(encoding="utf-8")),
        tests=existing,
        script=script or "test.sh",
        solution=solution if solvable else None,
        workdir=workdir if folder != step_folder and workdir.is_dir() else None,
        config=step,
    )


def _separate_image(step: StepConfig, config: TaskConfig) -> str | None:
    """Image of a separate verifier environment, which already contains its tests."""
    for verifier in (step.verifier, config.verifier):
        if verifier.environment is not None and verifier.environment.docker_image:
            return verifier.environment.docker_image
    return None


def _scripts(folder: Path, name: str) -> Iterator[str]:
    if (folder / f"{name}.sh").is_file():
        yield f"{name}.sh"


def _without_canary(text: str) -> str:
    """The text without canary lines at its top, which mark benchmark data for training filters."""
    lines = text.splitlines(keepends=True)
    while lines and (CANARY in lines[0].lower() or not lines[0].strip()):
        lines.pop(0)
    return "".join(lines)


def _reject_outside_links(part: Path, folder: Path) -> None:
    """Raises TaskError if a link leads out of the task: it could expose files of this machine."""
    root = folder.resolve()
    for path in part.rglob("*") if part.is_dir() else ():
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise TaskError(f"{path}: symbolic link leads out of the task")
