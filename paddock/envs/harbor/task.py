"""A task's folder: what to do, where, how it is graded and how it is solved.

task/
  task.toml  instruction.md
  environment/   Dockerfile and what it copies
  tests/         test.sh and anything; inside only once the agent is done
  solution/      solve.sh and anything; inside only if the solution itself is played
  steps/NAME/    of tasks in several steps: instruction.md, tests/, solution/, workdir/
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
    """One instruction and how it is graded; most tasks have one step, without a name."""

    name: str
    instruction: str
    tests: tuple[Path, ...]  # folders, laid over each other in this order
    script: str  # below /tests
    solution: Path | None
    workdir: Path | None
    config: StepConfig

    @property
    def label(self) -> str:
        return self.name or "the task"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    folder: Path
    name: str
    config: TaskConfig
    steps: tuple[TaskStep, ...]
    unknown: tuple[str, ...] = ()  # keys of task.toml that nobody knows
    notes: tuple[str, ...] = field(default=())  # how it was converted

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def is_multi_step(self) -> bool:
        return bool(self.config.steps)

    def agent_config(self, step: TaskStep) -> AgentConfig:
        """How the agent works; what a step does not say, the task does."""
        said = step.config.agent.model_fields_set
        return self.config.agent.model_copy(
            update={name: getattr(step.config.agent, name) for name in said}
        )

    def verifier_config(self, step: TaskStep) -> VerifierConfig:
        said = step.config.verifier.model_fields_set
        merged = {name: getattr(step.config.verifier, name) for name in said}
        merged["env"] = {**self.config.verifier.env, **step.config.verifier.env}
        return self.config.verifier.model_copy(update=merged)

    def separate_verifier(self, step: TaskStep) -> EnvironmentConfig | None:
        """Where the verifier works if not in the agent's own environment."""
        mine, ours = step.config.verifier, self.config.verifier
        if (mine.effective_mode or ours.effective_mode or "shared") == "shared":
            return None
        return mine.environment or ours.environment or self.config.environment

    def artifacts(self, step: TaskStep) -> tuple[ArtifactConfig, ...]:
        return (*self.config.artifacts, *step.config.artifacts)


def is_task_folder(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def find_task_folders(folder: Path) -> list[Path]:
    """The task that a folder is, or those that it holds, in order of name."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder")
    if is_task_folder(folder):
        return [folder]
    found = sorted(child for child in folder.iterdir() if child.is_dir() and is_task_folder(child))
    if not found:
        raise TaskError(f"{folder}: neither a task (task.toml, task.yaml) nor a folder of tasks")
    return found


def read_task(folder: Path) -> HarborTask:
    """A task in Harbor's layout, or in that of terminal-bench 1, which is converted first."""
    from paddock.envs.harbor.terminal_bench import (
        read_terminal_bench_task,  # it reads what it has converted
    )

    if (folder / "task.toml").is_file():
        return _read(folder)
    if (folder / "task.yaml").is_file():
        return read_terminal_bench_task(folder, _read)
    raise TaskError(f"{folder}: no task.toml")


def _read(folder: Path) -> HarborTask:
    config, unknown = read_config(folder / "task.toml")
    if config.environment.os == "windows":
        raise TaskError(f"{folder / 'task.toml'}: environment.os: Windows tasks cannot run here")
    if not (folder / "environment").is_dir() and not config.environment.docker_image:
        raise TaskError(f"{folder}: no folder environment/ and no environment.docker_image")
    for name in ("environment", "tests", "solution", "steps"):
        _stays_inside(folder / name, folder)
    steps = tuple(_steps(folder, config))
    name = config.task.name if config.task else folder.name
    return HarborTask(folder=folder, name=name, config=config, steps=steps, unknown=unknown)


def _steps(folder: Path, config: TaskConfig) -> Iterator[TaskStep]:
    if not config.steps:
        yield _step(folder, folder, StepConfig.model_construct(name=""), config)
    for step in config.steps or ():
        place = folder / "steps" / step.name
        if not place.is_dir():
            raise TaskError(f"{folder / 'task.toml'}: steps.{step.name}: no folder {place}")
        yield _step(folder, place, step, config)


def _step(folder: Path, place: Path, step: StepConfig, config: TaskConfig) -> TaskStep:
    file = place / "instruction.md"
    if not file.is_file():
        raise TaskError(f"{file}: missing")
    tests = [folder / "tests"] if folder == place else [folder / "tests", place / "tests"]
    there = tuple(path for path in tests if path.is_dir())
    # The step's own script wins over the task's.
    script = next((name for path in reversed(there) for name in _scripts(path, "test")), None)
    if script is None and _separate_image(step, config) is None:
        raise TaskError(f"{tests[-1] / 'test.sh'}: missing")
    solution = place / "solution"
    solvable = solution.is_dir() and any(_scripts(solution, "solve"))
    return TaskStep(
        name=step.name,
        instruction=_without_canary(file.read_text(encoding="utf-8")),
        tests=there,
        script=script or "test.sh",
        solution=solution if solvable else None,
        workdir=place / "workdir" if folder != place and (place / "workdir").is_dir() else None,
        config=step,
    )


def _separate_image(step: StepConfig, config: TaskConfig) -> str | None:
    """An image of the verifier's own holds its tests already."""
    for verifier in (step.verifier, config.verifier):
        if verifier.environment is not None and verifier.environment.docker_image:
            return verifier.environment.docker_image
    return None


def _scripts(folder: Path, name: str) -> Iterator[str]:
    if (folder / f"{name}.sh").is_file():
        yield f"{name}.sh"


def _without_canary(text: str) -> str:
    """Lines at the top that mark a benchmark for training filters are no part of the task."""
    lines = text.splitlines(keepends=True)
    while lines and (CANARY in lines[0].lower() or not lines[0].strip()):
        lines.pop(0)
    return "".join(lines)


def _stays_inside(part: Path, folder: Path) -> None:
    """No link of a task may lead out of it: its tests would be ours to read."""
    root = folder.resolve()
    for path in part.rglob("*") if part.is_dir() else ():
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise TaskError(f"{path}: a link that leads out of the task")
