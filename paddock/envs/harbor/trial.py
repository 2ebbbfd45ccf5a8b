"""One trial of a task by Harbor's contract: environment, agent, verifier, rewards."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from paddock.envs.harbor import reward
from paddock.envs.harbor.failures import TrialFailed
from paddock.envs.harbor.image import (
    EnvironmentImage,
    build_image,
    install_offline_tools,
    with_offline_path,
)
from paddock.envs.harbor.reward import RewardFileError
from paddock.envs.harbor.settings import (
    LOGS,
    SOLUTION,
    TESTS,
    HarborSettings,
    expand_variables,
    sandbox_settings,
)
from paddock.envs.harbor.task import HarborTask, TaskStep
from paddock.envs.harbor.task_config import EnvironmentConfig, HealthcheckConfig, VerifierView
from paddock.envs.harbor.verifier_view import (
    verifier_snapshot_filter,
    verifier_view,
    warn_forgeable,
)
from paddock.sandbox import (
    PATH,
    ExecResult,
    FilesystemSnapshot,
    Sandbox,
    SandboxError,
    delete_snapshot,
    open_sandbox,
)

VERIFIER_LOGS = f"{LOGS}/verifier"
OUTPUT = f"{VERIFIER_LOGS}/test-stdout.txt"
FOLDERS = tuple(f"{LOGS}/{name}" for name in ("agent", "verifier", "artifacts"))


class TaskSandbox:
    """A sandbox with the working directory, variables and user of a task."""

    def __init__(
        self, box: Sandbox, image: EnvironmentImage, environment: EnvironmentConfig
    ) -> None:
        self.box, self.image, self.environment = box, image, environment
        self.env: dict[str, str] = {}

    @property
    def workdir(self) -> str:
        return self.environment.workdir or self.image.workdir or "/"

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        return await self.box.exec(
            command,
            cwd=self.workdir,
            env={**self.env, **(env or {})},
            timeout_s=timeout_s,
            user=self.image.user if user is None else user,
        )


async def open_task_sandbox(
    task: HarborTask,
    folder: Path,
    environment: EnvironmentConfig,
    settings: HarborSettings,
    snapshot: FilesystemSnapshot | None = None,
) -> TaskSandbox:
    """Start an environment and wait until it is healthy.

    `snapshot` has the agent's changes, for a verifier. Raises TrialFailed if it does not start.
    """
    image = await build_image(task, folder, environment, settings)
    sandbox = sandbox_settings(environment, task, settings, image.image)
    try:
        box = open_sandbox(sandbox, *([snapshot] if snapshot else []), *image.base)
        task_sandbox = TaskSandbox(box, image, environment)
        variables = expand_variables(environment.env, settings.env_vars, "environment.env")
        task_sandbox.env = with_offline_path({**image.env, **variables}, settings)
        await box.start()
        await install_offline_tools(box, settings)
        made = await box.exec(["mkdir", "-p", task_sandbox.workdir, *FOLDERS], cwd="/")
        await box.exec(["chmod", "777", *FOLDERS], cwd="/")
        if not made.ok:
            raise SandboxError(
                f"{task_sandbox.workdir} could not be created: {made.stderr.strip()}"
            )
    except SandboxError as error:
        with contextlib.suppress(UnboundLocalError):
            await box.close()
        raise _sandbox_failed("start", str(error)) from error
    try:
        if environment.healthcheck is not None and snapshot is None:
            await wait_until_healthy(task_sandbox, environment.healthcheck)
    except BaseException:
        await box.close()
        raise
    return task_sandbox


def _sandbox_failed(where: str, message: str, name: str = "EnvironmentStartError") -> TrialFailed:
    return TrialFailed("sandbox_failed", name, where, message)


async def wait_until_healthy(sandbox: TaskSandbox, check: HealthcheckConfig) -> None:
    """Wait until a health check passes. Failures in its start period do not count.

    Raises TrialFailed after its number of retries.
    """
    started, failures = time.monotonic(), 0
    while True:
        done = await sandbox.exec(check.command, timeout_s=check.timeout_sec)
        if done.ok:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            message = f"{check.command!r} failed {failures} times: {done.stderr.strip()[-200:]}"
            raise _sandbox_failed("healthcheck", message, "HealthcheckError")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


class Trial:
    """Start; for each step: begin it, work in `agent_sandbox`, verify; then close."""

    def __init__(self, task: HarborTask, settings: HarborSettings) -> None:
        self.task, self.settings = task, settings
        self.agent_sandbox: TaskSandbox | None = None
        self.rewards: list[reward.Rewards | None] = []
        self.verifier_sandbox: TaskSandbox | None = None  # of the last verification
        self._snapshot: FilesystemSnapshot | None = None

    async def start(self) -> None:
        environment = self.task.config.environment
        self.agent_sandbox = await open_task_sandbox(
            self.task, self.task.environment, environment, self.settings
        )

    def _started(self) -> TaskSandbox:
        if self.agent_sandbox is None:
            raise _sandbox_failed("start", "the environment is not started")
        return self.agent_sandbox

    async def begin_step(self, step: TaskStep) -> None:
        """Copy a step's files into the working directory and run its setup."""
        sandbox = self._started()
        if step.workdir is not None:
            try:
                await sandbox.box.put(step.workdir, sandbox.workdir)
            except SandboxError as error:
                raise _sandbox_failed("begin", str(error)) from error
            if (step.workdir / "setup.sh").is_file():
                done = await sandbox.exec("bash ./setup.sh", timeout_s=self._scaled(600.0))
                if not done.ok:
                    message = f"setup.sh of {step.label}: exit code {done.code}"
                    raise _sandbox_failed("begin", message, "StepSetupError")
        if step.config.healthcheck is not None:
            await wait_until_healthy(sandbox, step.config.healthcheck)

    async def run_oracle(self, step: TaskStep) -> ExecResult:
        """Run the reference solution of a step."""
        if step.solution is None:
            raise TrialFailed(
                "harness_failed", "SolutionError", "solve", "the step has no solution"
            )
        sandbox = self._started()
        await sandbox.box.put(step.solution, SOLUTION)
        variables = expand_variables(
            self.task.config.solution.env, self.settings.env_vars, "solution.env"
        )
        seconds = self.task.agent_config(step).timeout_sec or self.settings.sandbox.timeout_s
        return await sandbox.exec(
            f"chmod +x {SOLUTION}/solve.sh; bash {SOLUTION}/solve.sh",
            timeout_s=self._scaled(seconds),
            user=self.task.agent_config(step).user,
            env={"DEBIAN_FRONTEND": "noninteractive", **variables},
        )

    async def verify(self, step: TaskStep) -> reward.Rewards:
        """Run a step's tests and read the reward file. Their exit code is ignored.

        Raises TrialFailed if there is no valid reward file.
        """
        await self._close_verifier()
        separate = self.task.separate_verifier(step)
        view = verifier_view(self.task, step, self.settings)
        if separate is not None:
            rewards = await self._verify_separately(step, separate)
        elif view == "processes":
            warn_forgeable(self.task, view)
            self.verifier_sandbox = self._started()
            rewards = await self._verify_in(self.verifier_sandbox, step)
        else:
            rewards = await self._verify_copy(step, view)
        self.rewards.append(rewards)
        return rewards

    async def _verify_copy(self, step: TaskStep, view: VerifierView) -> reward.Rewards:
        """Verify in a fresh sandbox with the agent's files but without its processes."""
        warn_forgeable(self.task, view)
        agent = self._started()
        path = agent.image.env.get("PATH", PATH)
        keep = verifier_snapshot_filter(view, self.task, step, agent.workdir, path)
        self._snapshot = await agent.box.snapshot(keep)
        self.verifier_sandbox = await open_task_sandbox(
            self.task, self.task.environment, agent.environment, self.settings, self._snapshot
        )
        return await self._verify_in(self.verifier_sandbox, step)

    async def _close_verifier(self) -> None:
        sandbox, self.verifier_sandbox = self.verifier_sandbox, None
        if sandbox is not None and sandbox is not self.agent_sandbox:
            await sandbox.box.close()
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            delete_snapshot(snapshot)

    async def _verify_separately(
        self, step: TaskStep, environment: EnvironmentConfig
    ) -> reward.Rewards:
        """Verify in the verifier's own environment, with the artifacts of the task only."""
        verifier = self.task.verifier_config(step)
        agent = self._started()
        for hook in verifier.collect:
            await agent.exec(hook.command, timeout_s=self._scaled(hook.timeout_sec), user=hook.user)
        folder = self.task.environment
        for tests in reversed(step.tests):
            if (tests / "Dockerfile").is_file():
                folder = tests
                break
        self.verifier_sandbox = await open_task_sandbox(
            self.task, folder, environment, self.settings
        )
        await move_artifacts(self.task, step, agent, self.verifier_sandbox)
        return await self._verify_in(self.verifier_sandbox, step)

    async def _verify_in(self, sandbox: TaskSandbox, step: TaskStep) -> reward.Rewards:
        verifier = self.task.verifier_config(step)
        seconds = self._scaled(verifier.timeout_sec)
        stale = [f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt", TESTS]
        script = f"{TESTS}/{step.script}"
        # Without a shell, which could not fork when the agent has used up all processes.
        for argv in (["rm", "-rf", *stale], ["mkdir", "-p", TESTS, VERIFIER_LOGS]):
            await sandbox.box.exec(argv, cwd="/", user=0)
        await self._upload_tests(sandbox, step)
        for argv in (["chmod", "-R", "a+rX", TESTS], ["chmod", "+x", script]):
            await sandbox.box.exec(argv, cwd="/", user=0)
        variables = expand_variables(verifier.env, self.settings.env_vars, "verifier.env")
        done = await sandbox.exec(
            f"{script} > {OUTPUT} 2>&1", timeout_s=seconds, user=verifier.user, env=variables
        )
        if done.timed_out:
            message = f"the tests exceeded {seconds:g} s"
            raise TrialFailed("verifier_failed", "VerifierTimeoutError", "verify", message)
        return await self._read_rewards(sandbox)

    async def _upload_tests(self, sandbox: TaskSandbox, step: TaskStep) -> None:
        for retry in (False, True):
            try:
                for folder in step.tests:
                    await sandbox.box.put(folder, TESTS)
                return
            except SandboxError as error:
                if retry:
                    raise _sandbox_failed("verify", str(error), "AddTestsDirError") from error
                # An agent that used up all processes must not avoid its verdict.
                await sandbox.box.kill()

    async def _read_rewards(self, sandbox: TaskSandbox) -> reward.Rewards:
        for name, parse, exception in (
            ("reward.json", reward.parse_json, "VerifierOutputParseError"),
            ("reward.txt", reward.parse_text, "VerifierOutputParseError"),
        ):
            try:
                text = (await sandbox.box.read(f"{VERIFIER_LOGS}/{name}")).decode(errors="replace")
                return parse(text)
            except FileNotFoundError:
                continue
            except RewardFileError as error:
                empty = str(error).endswith("empty")
                name = "RewardFileEmptyError" if empty else exception
                raise TrialFailed("verifier_failed", name, "verify", str(error)) from None
        message = f"no reward file; last output of the tests: {await self._tail(sandbox)}"
        raise TrialFailed("verifier_failed", "RewardFileNotFoundError", "verify", message)

    async def _tail(self, sandbox: TaskSandbox) -> str:
        with contextlib.suppress(OSError, SandboxError):
            text = (await sandbox.box.read(OUTPUT)).decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            return " / ".join(lines[-2:])[-300:] or "none"
        return "none"

    def may_continue(self, step: TaskStep) -> bool:
        """Whether the rewards allow the steps after this one."""
        return reward.meets_min_reward(
            self.rewards[-1] if self.rewards else None, step.config.min_reward
        )

    def total_rewards(self) -> reward.Rewards | None:
        """The combined rewards of all steps."""
        if not self.task.is_multi_step:
            return self.rewards[-1] if self.rewards else None
        strategy = self.task.config.multi_step_reward_strategy or "mean"
        return reward.combine_step_rewards(self.rewards, strategy)

    def _scaled(self, seconds: float) -> float:
        return seconds * self.settings.timeout_multiplier

    async def close(self) -> None:
        await self._close_verifier()
        if self.agent_sandbox is not None:
            await self.agent_sandbox.box.close()


async def move_artifacts(
    task: HarborTask, step: TaskStep, agent: TaskSandbox, verifier: TaskSandbox
) -> None:
    """Copy the agent's artifacts to the same paths in the verifier's sandbox."""
    sources = dict.fromkeys([f"{LOGS}/artifacts", *(each.source for each in task.artifacts(step))])
    for source in sources:
        path = source if source.startswith("/") else f"{agent.workdir}/{source}"
        exists = await agent.box.exec(["test", "-e", path], cwd="/")
        if exists.ok:
            await _copy(agent.box, verifier.box, path)


async def _copy(source: Sandbox, target: Sandbox, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "artifact")
        await source.get(path, copy)
        await target.put(copy, path)
