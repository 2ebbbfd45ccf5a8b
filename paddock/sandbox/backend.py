"""Choice of the sandbox backend that works on this machine."""

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
_DELETE_SNAPSHOT = {
    "bwrap": bubblewrap.delete_snapshot,
    "container": container.delete_snapshot,
    "unisolated": unisolated.delete_snapshot,
}


def pick_backend(settings: SandboxSettings) -> BackendName:
    """The backend to use: the requested one, or with "auto" the first that works.

    Raises SandboxError, with the reason and a remedy for each candidate, if none works.
    """
    if settings.backend == "unisolated":
        return settings.backend
    candidates = ("bwrap", "container") if settings.backend == "auto" else (settings.backend,)
    if settings.backend == "auto" and settings.image:
        candidates = ("container",)
    problems = []
    for name in candidates:
        problem = (
            bubblewrap.unavailable_reason() if name == "bwrap" else container.unavailable_reason()
        )
        if problem is None:
            return "bwrap" if name == "bwrap" else "container"
        problems.append(problem)
    raise SandboxError(
        f"no sandbox backend works: {'; '.join(problems)}. "
        "To run without isolation: backend = 'unisolated', allow_unisolated = true"
    )


def open_sandbox(settings: SandboxSettings, *base: FilesystemSnapshot) -> Sandbox:
    """A sandbox that is not started yet, based on the given snapshots, newest first."""
    backend = pick_backend(settings)
    for snapshot in base:
        if snapshot.backend != backend:
            raise SandboxError(
                f"a snapshot of backend {snapshot.backend!r} cannot be used with {backend!r}"
            )
    return _CLASSES[backend](settings, base)


def delete_snapshot(snapshot: FilesystemSnapshot) -> None:
    """Delete a snapshot; no sandbox can be started from it afterwards."""
    _DELETE_SNAPSHOT[snapshot.backend](snapshot)
