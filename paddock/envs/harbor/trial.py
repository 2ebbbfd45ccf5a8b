"""One attempt at a task, by Harbor's contract: environment, agent, verifier, rewards."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from paddock.envs.harbor import reward
from paddock.envs.harbor.build import Image, build, lend_stand_ins, with_stand_ins
from paddock.envs.harbor.config import Environment, Healthcheck, Seen
from paddock.envs.harbor.failures import TrialStopped
from paddock.envs.harbor.folder import HarborTask, Step
from paddock.envs.harbor.reward import RewardError
from paddock.envs.harbor.seen import kept, seen, warn
from paddock.envs.harbor.settings import (
    LOGS,
    SOLUTION,
    TESTS,
    HarborSettings,
    box_settings,
    filled,
)
from paddock.envs.sandbox import (
    ExecResult,
    Sandbox,
    SandboxError,
    Snapshot,
    forget,
    open_sandbox,
)
from paddock.envs.sandbox.running import PATH

VERIFIER_LOGS = f"{LOGS}/verifier"
OUTPUT = f"{VERIFIER_LOGS}/test-stdout.txt"
FOLDERS = tuple(f"{LOGS}/{name}" for name in ("agent", "verifier", "artifacts"))


class Place:
    """A sandbox in which a task's programs run, with their folder, variables and user."""

    def __init__(self, box: Sandbox, image: Image, environment: Environment) -> None:
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


async def open_place(
    task: HarborTask,
    folder: Path,
    environment: Environment,
    settings: HarborSettings,
    left: Snapshot | None = None,
) -> Place:
    """An environment, started and healthy; with what somebody `left`, who has worked in another."""
    image = await build(task, folder, environment, settings)
    shape = box_settings(environment, task, settings, image.image)
    try:
        box = open_sandbox(shape, *([left] if left else []), *image.base)
        place = Place(box, image, environment)
        variables = filled(environment.env, settings.variables, "environment.env")
        place.env = with_stand_ins({**image.env, **variables}, settings)
        await box.start()
        await lend_stand_ins(box, settings)
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
            await healthy(place, environment.healthcheck)
    except BaseException:
        await box.close()
        raise
    return place


def _sandbox_failed(where: str, what: str, name: str = "EnvironmentStartError") -> TrialStopped:
    return TrialStopped("sandbox_failed", name, where, what)


async def healthy(place: Place, check: Healthcheck) -> None:
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
        self.place: Place | None = None
        self.rewards: list[reward.Rewards | None] = []
        self.graded_in: Place | None = None  # where the last tests ran, until others do
        self._left: Snapshot | None = None

    async def start(self) -> None:
        environment = self.task.config.environment
        self.place = await open_place(self.task, self.task.environment, environment, self.settings)

    def _here(self) -> Place:
        if self.place is None:
            raise _sandbox_failed("start", "the environment was not started")
        return self.place

    async def begin(self, step: Step) -> None:
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
            await healthy(place, step.config.healthcheck)

    async def solve(self, step: Step) -> ExecResult:
        """Play the task's own solution."""
        if step.solution is None:
            raise TrialStopped("harness_failed", "SolutionError", "solve", "there is no solution")
        place = self._here()
        await place.box.put(step.solution, SOLUTION)
        variables = filled(self.task.config.solution.env, self.settings.variables, "solution.env")
        seconds = self.task.agent(step).timeout_sec or self.settings.sandbox.timeout_s
        return await place.exec(
            f"chmod +x {SOLUTION}/solve.sh; bash {SOLUTION}/solve.sh",
            timeout_s=self._times(seconds),
            user=self.task.agent(step).user,
            env={"DEBIAN_FRONTEND": "noninteractive", **variables},
        )

    async def verify(self, step: Step) -> reward.Rewards:
        """Run a step's tests and read the rewards they leave. What they exit with means nothing."""
        await self._close_graded()
        own = self.task.own_verifier(step)
        sees = seen(self.task, step, self.settings)
        if own is not None:
            rewards = await self._verify_apart(step, own)
        elif sees == "processes":
            warn(self.task, sees)
            self.graded_in = self._here()
            rewards = await self._verify_in(self.graded_in, step)
        else:
            rewards = await self._verify_copy(step, sees)
        self.rewards.append(rewards)
        return rewards

    async def _verify_copy(self, step: Step, sees: Seen) -> reward.Rewards:
        """In a fresh sandbox with what the agent has left: none of its processes is there."""
        warn(self.task, sees)
        here = self._here()
        path = here.image.env.get("PATH", PATH)
        keep = kept(sees, self.task, step, here.workdir, path)
        self._left = await here.box.snapshot(keep)
        self.graded_in = await open_place(
            self.task, self.task.environment, here.environment, self.settings, self._left
        )
        return await self._verify_in(self.graded_in, step)

    async def _close_graded(self) -> None:
        place, self.graded_in = self.graded_in, None
        if place is not None and place is not self.place:
            await place.box.close()
        left, self._left = self._left, None
        if left is not None:
            forget(left)

    async def _verify_apart(self, step: Step, environment: Environment) -> reward.Rewards:
        """In a fresh sandbox, which gets only what the task lists as artifacts."""
        verifier = self.task.verifier(step)
        here = self._here()
        for hook in verifier.collect:
            await here.exec(hook.command, timeout_s=self._times(hook.timeout_sec), user=hook.user)
        folder = self.task.environment
        for tests in reversed(step.tests):
            if (tests / "Dockerfile").is_file():
                folder = tests
                break
        self.graded_in = await open_place(self.task, folder, environment, self.settings)
        await move_artifacts(self.task, step, here, self.graded_in)
        return await self._verify_in(self.graded_in, step)

    async def _verify_in(self, place: Place, step: Step) -> reward.Rewards:
        verifier = self.task.verifier(step)
        seconds = self._times(verifier.timeout_sec)
        stale = [f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt", TESTS]
        script = f"{TESTS}/{step.script}"
        # Programs by themselves, no shell: a shell could not fork where all processes are taken.
        for argv in (["rm", "-rf", *stale], ["mkdir", "-p", TESTS, VERIFIER_LOGS]):
            await place.box.exec(argv, cwd="/", user=0)
        await self._upload(place, step)
        for argv in (["chmod", "-R", "a+rX", TESTS], ["chmod", "+x", script]):
            await place.box.exec(argv, cwd="/", user=0)
        variables = filled(verifier.env, self.settings.variables, "verifier.env")
        done = await place.exec(
            f"{script} > {OUTPUT} 2>&1", timeout_s=seconds, user=verifier.user, env=variables
        )
        if done.timed_out:
            what = f"the tests took over {seconds:g} s"
            raise TrialStopped("verifier_failed", "VerifierTimeoutError", "verify", what)
        return await self._read(place)

    async def _upload(self, place: Place, step: Step) -> None:
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

    async def _read(self, place: Place) -> reward.Rewards:
        for name, parse, exception in (
            ("reward.json", reward.parse_json, "VerifierOutputParseError"),
            ("reward.txt", reward.parse_text, "VerifierOutputParseError"),
        ):
            try:
                text = (await place.box.read(f"{VERIFIER_LOGS}/{name}")).decode(errors="replace")
                return parse(text)
            except FileNotFoundError:
                continue
            except RewardError as error:
                empty = str(error).endswith("empty")
                name = "RewardFileEmptyError" if empty else exception
                raise TrialStopped("verifier_failed", name, "verify", str(error)) from None
        what = f"no reward file; the tests said: {await self._tail(place)}"
        raise TrialStopped("verifier_failed", "RewardFileNotFoundError", "verify", what)

    async def _tail(self, place: Place) -> str:
        with contextlib.suppress(OSError, SandboxError):
            text = (await place.box.read(OUTPUT)).decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            return " / ".join(lines[-2:])[-300:] or "nothing"
        return "nothing"

    def goes_on(self, step: Step) -> bool:
        """Whether the steps after this one may be tried."""
        return reward.passes(self.rewards[-1] if self.rewards else None, step.config.min_reward)

    def result(self) -> reward.Rewards | None:
        """What all steps together are worth."""
        if not self.task.in_steps:
            return self.rewards[-1] if self.rewards else None
        strategy = self.task.config.multi_step_reward_strategy or "mean"
        return reward.together(self.rewards, strategy)

    def _times(self, seconds: float) -> float:
        return seconds * self.settings.time_factor

    async def close(self) -> None:
        await self._close_graded()
        if self.place is not None:
            await self.place.box.close()


async def move_artifacts(task: HarborTask, step: Step, here: Place, there: Place) -> None:
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
