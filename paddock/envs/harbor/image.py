"""Environment images of tasks, built once and cached.

With bubblewrap the instructions of a Dockerfile run on a copy-on-write root of this machine's
system, and the changes are cached as a layer. With a container engine the engine builds the image.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from paddock.envs.harbor.dockerfile import (
    CopyInstruction,
    Dockerfile,
    EnvInstruction,
    Instruction,
    RunInstruction,
    UserInstruction,
    WorkdirInstruction,
    read_dockerfile,
)
from paddock.envs.harbor.failures import TrialFailed
from paddock.envs.harbor.offline_tools import OFFLINE_BIN, offline_tool_scripts
from paddock.envs.harbor.settings import HarborSettings, sandbox_settings
from paddock.envs.harbor.task import HarborTask
from paddock.envs.harbor.task_config import EnvironmentConfig, TaskError
from paddock.sandbox import (
    PATH,
    ContainerEngine,
    FilesystemSnapshot,
    Sandbox,
    SandboxError,
    find_container_engine,
    open_sandbox,
    pick_backend,
    rootfs,
)

DOWNLOADS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|pip3?|uv|uvx|npm|yarn|pnpm|cargo|gem|conda|curl|wget|git clone)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentImage:
    """Snapshots or image to start sandboxes from, and how programs run in them."""

    base: tuple[FilesystemSnapshot, ...] = ()  # newest first
    image: str = ""  # of a container engine
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str | None = None
    notes: tuple[str, ...] = ()  # replacements and skipped instructions


_building: dict[tuple[int, str], asyncio.Lock] = {}


async def build_image(
    task: HarborTask, folder: Path, environment: EnvironmentConfig, settings: HarborSettings
) -> EnvironmentImage:
    """The image of the environment in `folder`. Concurrent calls build it once.

    Raises TrialFailed if it cannot be built.
    """
    backend = pick_backend(settings.sandbox)
    compose = folder / "docker-compose.yaml"
    if compose.is_file():
        raise _failed("several services (docker-compose.yaml) are not supported")
    file = folder / "Dockerfile"
    if backend == "container":
        return await asyncio.to_thread(_build_by_engine, task, folder, environment)
    if environment.docker_image or not file.is_file():
        note = f"this machine's system replaces the image {environment.docker_image}"
        return EnvironmentImage(notes=(note,) if environment.docker_image else ())
    builder = DockerfileBuilder(task, folder, read_dockerfile(file), environment, settings)
    loop = id(asyncio.get_running_loop())
    async with _building.setdefault((loop, builder.keys[-1]), asyncio.Lock()):
        try:
            async with asyncio.timeout(environment.build_timeout_sec * settings.timeout_multiplier):
                return await builder.build()
        except TimeoutError:
            seconds = environment.build_timeout_sec * settings.timeout_multiplier
            message = f"the build exceeded {seconds:g} s"
            raise _failed(message, "EnvironmentStartTimeoutError") from None
        except SandboxError as error:
            raise _failed(str(error)) from error


def _failed(message: str, exception: str = "EnvironmentBuildError") -> TrialFailed:
    return TrialFailed("sandbox_failed", exception, "build", message)


def _build_by_engine(
    task: HarborTask, folder: Path, environment: EnvironmentConfig
) -> EnvironmentImage:
    if environment.docker_image:
        return EnvironmentImage(image=environment.docker_image)
    engine = find_container_engine()
    assert isinstance(engine, ContainerEngine)  # checked by pick_backend
    if not (folder / "Dockerfile").is_file():
        return EnvironmentImage()
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*")):
        digest.update(_fingerprint(path, folder))
    name = f"paddock-task-{digest.hexdigest()}:1"
    try:
        engine.run("image", "inspect", name)
    except SandboxError:
        try:
            engine.run("build", "-q", "-t", name, str(folder))
        except SandboxError as error:
            raise _failed(f"{task.name}: {error}") from error
    workdir = engine.run("image", "inspect", "-f", "{{.Config.WorkingDir}}", name)
    return EnvironmentImage(image=name, workdir=workdir)


class DockerfileBuilder:
    """Runs the instructions of a Dockerfile, starting after the longest cached prefix."""

    def __init__(
        self,
        task: HarborTask,
        folder: Path,
        dockerfile: Dockerfile,
        environment: EnvironmentConfig,
        settings: HarborSettings,
    ) -> None:
        self.task, self.folder, self.dockerfile = task, folder, dockerfile
        self.settings, self.environment = settings, environment
        self.store = rootfs.cache_dir().parent / "layers"
        self.keys = self._cache_keys()

    async def build(self) -> EnvironmentImage:
        """The image, from the cache or built now. Raises SandboxError or TrialFailed."""
        done, image = self._cached_prefix()
        if done == len(self.dockerfile.steps):
            return image
        network = self.settings.allow_internet_in_build
        sandbox = sandbox_settings(self.environment, self.task, self.settings)
        sandbox = sandbox.model_copy(update={"allow_internet": network})
        box = open_sandbox(sandbox, *image.base)
        try:
            await box.start()
            await install_offline_tools(box, self.settings)
            for step in self.dockerfile.steps[done:]:
                image = await self._run_step(box, step, image)
            await box.kill()
            return self._store(await box.snapshot(), image)
        finally:
            await box.close()

    def _cached_prefix(self) -> tuple[int, EnvironmentImage]:
        """Number of instructions that are cached, and the image after them."""
        for count in range(len(self.keys), 0, -1):
            file = self.store / f"{self.keys[count - 1]}.json"
            if file.is_file():
                cached = json.loads(file.read_text())
                base = tuple(FilesystemSnapshot(**each) for each in cached.pop("base"))
                if all(Path(each.place).is_dir() for each in base):
                    return count, EnvironmentImage(
                        base=base, **{**cached, "notes": tuple(cached["notes"])}
                    )
        note = f"this machine's system replaces the image {self.dockerfile.base}"
        return 0, EnvironmentImage(notes=(note,))

    def _store(self, snapshot: FilesystemSnapshot, image: EnvironmentImage) -> EnvironmentImage:
        self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        layer = self.store / self.keys[-1]
        if layer.is_dir():
            shutil.rmtree(snapshot.place, ignore_errors=True)
        else:
            shutil.move(snapshot.place, layer)
        cached = FilesystemSnapshot(backend=snapshot.backend, place=str(layer))
        built = replace(image, base=(cached, *image.base))
        file = self.store / f"{self.keys[-1]}.json"
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(built)))
        draft.rename(file)
        return built

    def _cache_keys(self) -> list[str]:
        """Digest of everything that determines the state after each instruction."""
        settings = self.settings
        sandbox = sandbox_settings(self.environment, self.task, settings)
        options = (
            settings.skip_installs,
            settings.offline_python,
            sandbox.writable_root,
            sandbox.writable_paths,
        )
        digest = hashlib.blake2b(repr((self.dockerfile.base, options)).encode(), digest_size=12)
        root = rootfs.make_rootfs(rootfs.cache_dir(), os.geteuid())
        digest.update(root.folder.name.encode())
        keys = []
        for step in self.dockerfile.steps:
            digest.update(repr(step).encode())
            if isinstance(step, CopyInstruction):
                for path in self._sources(step):
                    for inner in sorted([path, *path.rglob("*")]):
                        digest.update(_fingerprint(inner, self.folder))
            keys.append(digest.hexdigest())
        return keys or [digest.hexdigest()]

    def _sources(self, step: CopyInstruction) -> list[Path]:
        found: list[Path] = []
        for source in step.sources:
            name = source.lstrip("/").removeprefix("./")
            matches = [self.folder] if name in ("", ".") else sorted(self.folder.glob(name))
            if not matches:
                raise TaskError(f"{self.folder / 'Dockerfile'}: COPY {source}: file not found")
            for path in matches:
                if not path.resolve().is_relative_to(self.folder.resolve()):
                    raise TaskError(
                        f"{self.folder / 'Dockerfile'}: COPY {source}: outside environment/"
                    )
            found += matches
        return found

    async def _run_step(
        self, box: Sandbox, step: Instruction, image: EnvironmentImage
    ) -> EnvironmentImage:
        match step:
            case EnvInstruction(values):
                return replace(image, env={**image.env, **dict(values)})
            case UserInstruction(name):
                return replace(image, user=None if name in ("root", "0") else name)
            case WorkdirInstruction(path):
                workdir = str(PurePosixPath(image.workdir or "/") / path)
                await _exec(box, ["mkdir", "-p", workdir], "WORKDIR")
                return replace(image, workdir=workdir)
            case CopyInstruction():
                await self._copy(box, step, image)
                return image
            case RunInstruction():
                return await self._run(box, step, image)

    async def _run(
        self, box: Sandbox, step: RunInstruction, image: EnvironmentImage
    ) -> EnvironmentImage:
        text = step.command if isinstance(step.command, str) else " ".join(step.command)
        short = " ".join(text.split())[:80]
        if self.settings.skip_installs and DOWNLOADS.search(text):
            return replace(image, notes=(*image.notes, f"skipped: RUN {short}"))
        argv = [*step.shell, step.command] if isinstance(step.command, str) else step.command
        env = with_offline_path(image.env, self.settings)
        limit = self.environment.build_timeout_sec * self.settings.timeout_multiplier
        done = await box.exec(
            argv, cwd=image.workdir or "/", env=env, user=image.user, timeout_s=limit
        )
        if done.ok:
            return image
        lines = (done.stderr or done.stdout).strip().splitlines()
        message = f"RUN {short}: exit code {done.code}: {lines[-1] if lines else 'no output'}"
        if self.settings.fail_on_build_error:
            raise _failed(message)
        return replace(image, notes=(*image.notes, message))

    async def _copy(self, box: Sandbox, step: CopyInstruction, image: EnvironmentImage) -> None:
        sources = self._sources(step)
        target = str(PurePosixPath(image.workdir or "/") / step.target)
        into = step.target.endswith(("/", "/.")) or step.target in (".", "./")
        into = into or len(sources) + len(step.texts) > 1
        if not into and sources and sources[0].is_file():
            is_dir = await box.exec(["test", "-d", target])
            into = is_dir.code == 0
        copied = []
        for source in sources:
            if source.is_dir():
                await box.put(source, target)
                copied.append(target)
            elif step.unpack and tarfile.is_tarfile(source):
                await box.put(source, "/tmp/.added")
                await _exec(box, ["mkdir", "-p", target], "ADD")
                await _exec(box, ["tar", "-xf", "/tmp/.added", "-C", target], f"ADD {source.name}")
                await _exec(box, ["rm", "/tmp/.added"], "ADD")
            else:
                path = str(PurePosixPath(target) / source.name) if into else target
                await box.put(source, path)
                copied.append(path)
        for name, text in step.texts:
            path = str(PurePosixPath(target) / name) if into else target
            await box.put(text.encode(), path)
            copied.append(path)
        if step.chmod and copied:
            await _exec(box, ["chmod", "-R", step.chmod, *copied], "COPY --chmod")
        if step.chown and copied:
            await _exec(box, ["chown", "-R", step.chown, *copied], "COPY --chown")


async def _exec(box: Sandbox, argv: list[str], instruction: str) -> None:
    done = await box.exec(argv, cwd="/")
    if not done.ok:
        raise _failed(f"{instruction}: {done.stderr.strip()}")


def _fingerprint(path: Path, folder: Path) -> bytes:
    mode = path.lstat().st_mode
    text = f"{path.relative_to(folder)}\0{mode}\0".encode()
    if path.is_symlink():
        return text + os.readlink(path).encode()
    return text + (hashlib.blake2b(path.read_bytes()).digest() if path.is_file() else b"")


async def install_offline_tools(box: Sandbox, settings: HarborSettings) -> None:
    """Write the offline tools into a sandbox if the settings name a Python environment."""
    if settings.offline_python:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in offline_tool_scripts(f"{settings.offline_python}/bin/python").items():
                Path(folder, name).write_text(text)
                Path(folder, name).chmod(0o755)
            await box.put(Path(folder), OFFLINE_BIN)


def with_offline_path(env: dict[str, str], settings: HarborSettings) -> dict[str, str]:
    """The variables with the offline tools first in PATH, if they are used."""
    if not settings.offline_python:
        return dict(env)
    return {**env, "PATH": f"{OFFLINE_BIN}:{env.get('PATH', PATH)}"}
