"""One attempt at a task, by Harbor's contract: environment, agent, verifier, rewards."""

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
    """A sandbox in which a task's programs run, with their folder, variables and user."""

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
    left: FilesystemSnapshot | None = None,
) -> TaskSandbox:
    """An environment, started and healthy; with what somebody `left`, who has worked in another."""
    image = await build_image(task, folder, environment, settings)
    shape = sandbox_settings(environment, task, settings, image.image)
    try:
        box = open_sandbox(shape, *([left] if left else []), *image.base)
        place = TaskSandbox(box, image, environment)
        variables = expand_variables(environment.env, settings.env_vars, "environment.env")
        place.env = with_offline_path({**image.env, **variables}, settings)
        await box.start()
        await install_offline_tools(box, settings)
        made = await box.exec(["mkdir", "-p", place.workdir, *FOLDERS], cwd="/")
        await box.exec(["chmod", "777", *FOLDERS], cwd="/")
        if not made.ok:
            raise SandboxError(f"no folder {place.workdir}: {made.stderr.strip()}")
    except SandboxError as error:
        with contextlib.suppress(UnboundLocalError):
            await box.close()
        raise _sandbox_failed("start", str(error)) from error
    try:
        if environment.healthcheck is not None and left is None:
            await wait_until_healthy(place, environment.healthcheck)
    except BaseException:
        await box.close()
        raise
    return place


def _sandbox_failed(where: str, what: str, name: str = "EnvironmentStartError") -> TrialFailed:
    return TrialFailed("sandbox_failed", name, where, what)


async def wait_until_healthy(place: TaskSandbox, check: HealthcheckConfig) -> None:
    """Wait until a check passes. Failures in the beginning do not count."""
    began, failures = time.monotonic(), 0
    while True:
        done = await place.exec(check.command, timeout_s=check.timeout_sec)
        if done.ok:
            return
        starting = time.monotonic() - began < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            what = f"{check.command!r} failed {failures} times: {done.stderr.strip()[-200:]}"
            raise _sandbox_failed("healthcheck", what, "HealthcheckError")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


class Trial:
    """Start, then for each step: begin, let somebody work in `place`, verify. Then close."""

    def __init__(self, task: HarborTask, settings: HarborSettings) -> None:
        self.task, self.settings = task, settings
        self.place: TaskSandbox | None = None
        self.rewards: list[reward.Rewards | None] = []
        self.graded_in: TaskSandbox | None = None  # where the last tests ran, until others do
        self._left: FilesystemSnapshot | None = None

    async def start(self) -> None:
        environment = self.task.config.environment
        self.place = await open_task_sandbox(
            self.task, self.task.environment, environment, self.settings
        )

    def _here(self) -> TaskSandbox:
        if self.place is None:
            raise _sandbox_failed("start", "the environment was not started")
        return self.place

    async def begin_step(self, step: TaskStep) -> None:
        """Lay what a step brings into the working folder, and set it up."""
        place = self._here()
        if step.workdir is not None:
            try:
                await place.box.put(step.workdir, place.workdir)
            except SandboxError as error:
                raise _sandbox_failed("begin", str(error)) from error
            if (step.workdir / "setup.sh").is_file():
                done = await place.exec("bash ./setup.sh", timeout_s=self._times(600.0))
                if not done.ok:
                    what = f"setup.sh of {step.label}: exit code {done.code}"
                    raise _sandbox_failed("begin", what, "StepSetupError")
        if step.config.healthcheck is not None:
            await wait_until_healthy(place, step.config.healthcheck)

    async def run_oracle(self, step: TaskStep) -> ExecResult:
        """Play the task's own solution."""
        if step.solution is None:
            raise TrialFailed("harness_failed", "SolutionError", "solve", "there is no solution")
        place = self._here()
        await place.box.put(step.solution, SOLUTION)
        variables = expand_variables(
            self.task.config.solution.env, self.settings.env_vars, "solution.env"
        )
        seconds = self.task.agent_config(step).timeout_sec or self.settings.sandbox.timeout_s
        return await place.exec(
            f"chmod +x {SOLUTION}/solve.sh; bash {SOLUTION}/solve.sh",
            timeout_s=self._times(seconds),
            user=self.task.agent_config(step).user,
            env={"DEBIAN_FRONTEND": "noninteractive", **variables},
        )

    async def verify(self, step: TaskStep) -> reward.Rewards:
        """Run a step's tests and read the rewards they leave. What they exit with means nothing."""
        await self._close_graded()
        own = self.task.separate_verifier(step)
        sees = verifier_view(self.task, step, self.settings)
        if own is not None:
            rewards = await self._verify_apart(step, own)
        elif sees == "processes":
            warn_forgeable(self.task, sees)
            self.graded_in = self._here()
            rewards = await self._verify_in(self.graded_in, step)
        else:
            rewards = await self._verify_copy(step, sees)
        self.rewards.append(rewards)
        return rewards

    async def _verify_copy(self, step: TaskStep, sees: VerifierView) -> reward.Rewards:
        """In a fresh sandbox with what the agent has left: none of its processes is there."""
        warn_forgeable(self.task, sees)
        here = self._here()
        path = here.image.env.get("PATH", PATH)
        keep = verifier_snapshot_filter(sees, self.task, step, here.workdir, path)
        self._left = await here.box.snapshot(keep)
        self.graded_in = await open_task_sandbox(
            self.task, self.task.environment, here.environment, self.settings, self._left
        )
        return await self._verify_in(self.graded_in, step)

    async def _close_graded(self) -> None:
        place, self.graded_in = self.graded_in, None
        if place is not None and place is not self.place:
            await place.box.close()
        left, self._left = self._left, None
        if left is not None:
            delete_snapshot(left)

    async def _verify_apart(self, step: TaskStep, environment: EnvironmentConfig) -> reward.Rewards:
        """In a fresh sandbox, which gets only what the task lists as artifacts."""
        verifier = self.task.verifier_config(step)
        here = self._here()
        for hook in verifier.collect:
            await here.exec(hook.command, timeout_s=self._times(hook.timeout_sec), user=hook.user)
        folder = self.task.environment
        for tests in reversed(step.tests):
            if (tests / "Dockerfile").is_file():
                folder = tests
                break
        self.graded_in = await open_task_sandbox(self.task, folder, environment, self.settings)
        await move_artifacts(self.task, step, here, self.graded_in)
        return await self._verify_in(self.graded_in, step)

    async def _verify_in(self, place: TaskSandbox, step: TaskStep) -> reward.Rewards:
        verifier = self.task.verifier_config(step)
        seconds = self._times(verifier.timeout_sec)
        stale = [f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt", TESTS]
        script = f"{TESTS}/{step.script}"
        # Programs by themselves, no shell: a shell could not fork where all processes are taken.
        for argv in (["rm", "-rf", *stale], ["mkdir", "-p", TESTS, VERIFIER_LOGS]):
            await place.box.exec(argv, cwd="/", user=0)
        await self._upload(place, step)
        for argv in (["chmod", "-R", "a+rX", TESTS], ["chmod", "+x", script]):
            await place.box.exec(argv, cwd="/", user=0)
        variables = expand_variables(verifier.env, self.settings.env_vars, "verifier.env")
        done = await place.exec(
            f"{script} > {OUTPUT} 2>&1", timeout_s=seconds, user=verifier.user, env=variables
        )
        if done.timed_out:
            what = f"the tests took over {seconds:g} s"
            raise TrialFailed("verifier_failed", "VerifierTimeoutError", "verify", what)
        return await self._read(place)

    async def _upload(self, place: TaskSandbox, step: TaskStep) -> None:
        for attempt in range(2):
            try:
                for folder in step.tests:
                    await place.box.put(folder, TESTS)
                return
            except SandboxError as error:
                if attempt:
                    raise _sandbox_failed("verify", str(error), "AddTestsDirError") from error
                # Whoever filled the machine with processes is not spared its verdict.
                await place.box.kill()

    async def _read(self, place: TaskSandbox) -> reward.Rewards:
        for name, parse, exception in (
            ("reward.json", reward.parse_json, "VerifierOutputParseError"),
            ("reward.txt", reward.parse_text, "VerifierOutputParseError"),
        ):
            try:
                text = (await place.box.read(f"{VERIFIER_LOGS}/{name}")).decode(errors="replace")
                return parse(text)
            except FileNotFoundError:
                continue
            except RewardFileError as error:
                empty = str(error).endswith("empty")
                name = "RewardFileEmptyError" if empty else exception
                raise TrialFailed("verifier_failed", name, "verify", str(error)) from None
        what = f"no reward file; the tests said: {await self._tail(place)}"
        raise TrialFailed("verifier_failed", "RewardFileNotFoundError", "verify", what)

    async def _tail(self, place: TaskSandbox) -> str:
        with contextlib.suppress(OSError, SandboxError):
            text = (await place.box.read(OUTPUT)).decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            return " / ".join(lines[-2:])[-300:] or "nothing"
        return "nothing"

    def may_continue(self, step: TaskStep) -> bool:
        """Whether the steps after this one may be tried."""
        return reward.meets_min_reward(
            self.rewards[-1] if self.rewards else None, step.config.min_reward
        )

    def total_rewards(self) -> reward.Rewards | None:
        """What all steps together are worth."""
        if not self.task.is_multi_step:
            return self.rewards[-1] if self.rewards else None
        strategy = self.task.config.multi_step_reward_strategy or "mean"
        return reward.combine_step_rewards(self.rewards, strategy)

    def _times(self, seconds: float) -> float:
        return seconds * self.settings.timeout_multiplier

    async def close(self) -> None:
        await self._close_graded()
        if self.place is not None:
            await self.place.box.close()


async def move_artifacts(
    task: HarborTask, step: TaskStep, here: TaskSandbox, there: TaskSandbox
) -> None:
    """What the agent published, to where the verifier looks for it: the same paths."""
    sources = dict.fromkeys([f"{LOGS}/artifacts", *(each.source for each in task.artifacts(step))])
    for source in sources:
        path = source if source.startswith("/") else f"{here.workdir}/{source}"
        packed = await here.box.exec(["test", "-e", path], cwd="/")
        if packed.ok:
            await _move(here.box, there.box, path)


async def _move(here: Sandbox, there: Sandbox, path: str) -> None:

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "artifact")
        await here.get(path, copy)
        await there.put(copy, path)
