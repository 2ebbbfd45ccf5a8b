"""Which sandbox this machine can give."""

from collections.abc import Callable

from paddock.sandbox import bubblewrap, container, unisolated
from paddock.sandbox.sandbox import (
    BackendName,
    FilesystemSnapshot,
    Sandbox,
    SandboxError,
    SandboxSettings,
)

_CLASSES: dict[str, Callable[[SandboxSettings, tuple[FilesystemSnapshot, ...]], Sandbox]] = {
    "bwrap": bubblewrap.BubblewrapSandbox,
    "container": container.ContainerSandbox,
    "unisolated": unisolated.UnisolatedSandbox,
}
_FORGET = {
    "bwrap": bubblewrap.delete_snapshot,
    "container": container.delete_snapshot,
    "unisolated": unisolated.delete_snapshot,
}


def pick_backend(settings: SandboxSettings) -> BackendName:
    """The backend that will be used. Raises with a remedy if there is none."""
    if settings.backend == "unisolated":
        return settings.backend
    wanted = ("bwrap", "container") if settings.backend == "auto" else (settings.backend,)
    if settings.backend == "auto" and settings.image:
        wanted = ("container",)
    problems = []
    for name in wanted:
        problem = (
            bubblewrap.unavailable_reason() if name == "bwrap" else container.unavailable_reason()
        )
        if problem is None:
            return "bwrap" if name == "bwrap" else "container"
        problems.append(problem)
    raise SandboxError(
        f"no sandbox: {'; '.join(problems)}. Without isolation: backend = 'unisolated'"
    )


def open_sandbox(settings: SandboxSettings, *base: FilesystemSnapshot) -> Sandbox:
    """A sandbox that is not started yet, upon snapshots if there are any, the newest first."""
    backend = pick_backend(settings)
    for snapshot in base:
        if snapshot.backend != backend:
            raise SandboxError(f"a snapshot of {snapshot.backend} is of no use to {backend}")
    return _CLASSES[backend](settings, base)


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    """Let a snapshot go; nothing can be started from it any more."""
    _FORGET[snapshot.backend](snapshot)
