"""Which sandbox this machine can give."""

from collections.abc import Callable

from paddock.envs.sandbox import bwrap, container, unisolated
from paddock.envs.sandbox.box import Backend, Sandbox, SandboxError, SandboxSettings, Snapshot

_CLASSES: dict[str, Callable[[SandboxSettings, tuple[Snapshot, ...]], Sandbox]] = {
    "bwrap": bwrap.Bwrap,
    "container": container.Container,
    "unisolated": unisolated.Unisolated,
}
_FORGET = {
    "bwrap": bwrap.forget,
    "container": container.forget,
    "unisolated": unisolated.forget,
}


def chosen(settings: SandboxSettings) -> Backend:
    """The backend that will be used. Raises with a remedy if there is none."""
    if settings.backend == "unisolated":
        return settings.backend
    wanted = ("bwrap", "container") if settings.backend == "auto" else (settings.backend,)
    if settings.backend == "auto" and settings.image:
        wanted = ("container",)
    problems = []
    for name in wanted:
        problem = bwrap.problem() if name == "bwrap" else container.problem()
        if problem is None:
            return "bwrap" if name == "bwrap" else "container"
        problems.append(problem)
    raise SandboxError(
        f"no sandbox: {'; '.join(problems)}. Without isolation: backend = 'unisolated'"
    )


def open_sandbox(settings: SandboxSettings, *base: Snapshot) -> Sandbox:
    """A sandbox that is not started yet, upon snapshots if there are any, the newest first."""
    backend = chosen(settings)
    for snapshot in base:
        if snapshot.backend != backend:
            raise SandboxError(f"a snapshot of {snapshot.backend} is of no use to {backend}")
    return _CLASSES[backend](settings, base)


def forget(snapshot: Snapshot) -> None:
    """Let a snapshot go; nothing can be started from it any more."""
    _FORGET[snapshot.backend](snapshot)
