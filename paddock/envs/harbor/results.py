"""Result files of a trial in Harbor's layout, readable by its tools.

TRIAL/ config.json  lock.json  result.json  trial.log  agent/ verifier/ artifacts/manifest.json
       (multi-step tasks: steps/NAME/{agent,verifier,artifacts})
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
    """Facts about a trial that its files do not contain."""

    name: str
    agent: str
    started: datetime
    finished: datetime
    stopped: RolloutFailed | None = None
    log: Sequence[str] = ()


async def save_logs(trial: Trial, step: TaskStep, folder: Path) -> None:
    """Copy a step's logs and artifacts out of the sandboxes. Call before the trial is closed."""
    assert trial.agent_sandbox is not None
    target_dir = folder / "steps" / step.name if step.name else folder
    await _fetch(trial.agent_sandbox, f"{LOGS}/agent", target_dir / "agent")
    await _fetch(
        trial.verifier_sandbox or trial.agent_sandbox, f"{LOGS}/verifier", target_dir / "verifier"
    )
    rows = []
    artifacts: list[tuple[str, str | None]] = [(f"{LOGS}/artifacts", None)]
    artifacts += [(each.source, each.destination) for each in trial.task.artifacts(step)]
    for source, destination in artifacts:
        target = target_dir / "artifacts" / (destination or source.strip("/"))
        path = source if source.startswith("/") else f"{trial.agent_sandbox.workdir}/{source}"
        fetched = await _fetch(trial.agent_sandbox, path, target)
        row = {"source": source, "destination": str(target.relative_to(target_dir / "artifacts"))}
        rows.append({**row, "service": "main", "status": "ok" if fetched else "missing"})
    (target_dir / "artifacts").mkdir(parents=True, exist_ok=True)
    (target_dir / "artifacts" / "manifest.json").write_text(json.dumps(rows, indent=2))


async def _fetch(sandbox: TaskSandbox, source: str, target: Path) -> bool:
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        await sandbox.box.get(source, target)
    except (FileNotFoundError, SandboxError):
        return False
    return True


def write_results(trial: Trial, settings: HarborSettings, folder: Path, info: TrialInfo) -> None:
    """Write result.json, config.json, lock.json and trial.log."""
    folder.mkdir(parents=True, exist_ok=True)
    task = trial.task
    rewards = trial.total_rewards()
    result = {
        "task_name": task.name,
        "trial_name": info.name,
        "trial_uri": folder.resolve().as_uri(),
        "source": task.config.source,
        "task_checksum": task_checksum(task.folder),
        "agent_info": {"name": info.agent, "version": "unknown", "model_info": None},
        "verifier_result": None if rewards is None else {"rewards": dict(rewards)},
        "exception_info": _exception(info.stopped, info.finished),
        "started_at": info.started.isoformat(),
        "finished_at": info.finished.isoformat(),
        "step_results": _steps(task, trial.rewards) if task.is_multi_step else None,
    }
    texts: dict[str, object] = {
        "result.json": result,
        "config.json": {"task": {"path": str(task.folder)}, **settings.model_dump(mode="json")},
        "lock.json": {"task": {"name": task.name, "digest": task_checksum(task.folder)}},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "trial.log").write_text("".join(f"{line}\n" for line in info.log))


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
    """Digest of all files of a task."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


def now() -> datetime:
    return datetime.now(UTC)
