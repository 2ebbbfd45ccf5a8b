"""What a trial leaves on disk, in Harbor's own layout, so that its tools can read it.

TRIAL/ config.json  lock.json  result.json  trial.log  agent/ verifier/ artifacts/manifest.json
       (of tasks in steps: steps/NAME/{agent,verifier,artifacts})
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paddock.envs.env import RolloutFailed
from paddock.envs.harbor.failures import TrialFailed
from paddock.envs.harbor.settings import LOGS, HarborSettings
from paddock.envs.harbor.task import HarborTask, TaskStep
from paddock.envs.harbor.trial import TaskSandbox, Trial
from paddock.sandbox import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInfo:
    """What is to be said about a trial besides its files."""

    name: str
    agent: str
    started: datetime
    finished: datetime
    stopped: RolloutFailed | None = None
    log: Sequence[str] = ()


async def save_logs(trial: Trial, step: TaskStep, folder: Path) -> None:
    """A step's logs and artifacts, out of the sandbox, before it is gone."""
    assert trial.place is not None
    place = folder / "steps" / step.name if step.name else folder
    await _fetch(trial.place, f"{LOGS}/agent", place / "agent")
    await _fetch(trial.graded_in or trial.place, f"{LOGS}/verifier", place / "verifier")
    rows = []
    wanted: list[tuple[str, str | None]] = [(f"{LOGS}/artifacts", None)]
    wanted += [(each.source, each.destination) for each in trial.task.artifacts(step)]
    for source, destination in wanted:
        target = place / "artifacts" / (destination or source.strip("/"))
        path = source if source.startswith("/") else f"{trial.place.workdir}/{source}"
        fetched = await _fetch(trial.place, path, target)
        row = {"source": source, "destination": str(target.relative_to(place / "artifacts"))}
        rows.append({**row, "service": "main", "status": "ok" if fetched else "missing"})
    (place / "artifacts").mkdir(parents=True, exist_ok=True)
    (place / "artifacts" / "manifest.json").write_text(json.dumps(rows, indent=2))


async def _fetch(place: TaskSandbox, source: str, target: Path) -> bool:
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        await place.box.get(source, target)
    except (FileNotFoundError, SandboxError):
        return False
    return True


def write_results(trial: Trial, settings: HarborSettings, folder: Path, record: TrialInfo) -> None:
    """The files that say what was tried and what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    task = trial.task
    rewards = trial.total_rewards()
    result = {
        "task_name": task.name,
        "trial_name": record.name,
        "trial_uri": folder.resolve().as_uri(),
        "source": task.config.source,
        "task_checksum": task_checksum(task.folder),
        "agent_info": {"name": record.agent, "version": "unknown", "model_info": None},
        "verifier_result": None if rewards is None else {"rewards": dict(rewards)},
        "exception_info": _exception(record.stopped, record.finished),
        "started_at": record.started.isoformat(),
        "finished_at": record.finished.isoformat(),
        "step_results": _steps(task, trial.rewards) if task.is_multi_step else None,
    }
    texts: dict[str, object] = {
        "result.json": result,
        "config.json": {"task": {"path": str(task.folder)}, **settings.model_dump(mode="json")},
        "lock.json": {"task": {"name": task.name, "digest": task_checksum(task.folder)}},
    }
    for name, said in texts.items():
        (folder / name).write_text(json.dumps(said, indent=2) + "\n")
    (folder / "trial.log").write_text("".join(f"{line}\n" for line in record.log))


def _steps(
    task: HarborTask, rewards: Sequence[Mapping[str, float] | None]
) -> list[dict[str, object]]:
    return [
        {
            "step_name": step.name,
            "verifier_result": None if each is None else {"rewards": dict(each)},
        }
        for step, each in zip(task.steps, rewards, strict=False)
    ]


def _exception(stopped: RolloutFailed | None, when: datetime) -> dict[str, str] | None:
    if stopped is None:
        return None
    name = stopped.exception if isinstance(stopped, TrialFailed) else type(stopped).__name__
    return {
        "exception_type": name,
        "exception_message": str(stopped),
        "exception_traceback": "",
        "occurred_at": when.isoformat(),
    }


def task_checksum(folder: Path) -> str:
    """Changes when any file of a task does."""
    mark = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            mark.update(f"{path.relative_to(folder)}\0".encode())
            mark.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{mark.hexdigest()}"


def now() -> datetime:
    return datetime.now(UTC)
