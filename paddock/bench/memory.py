"""Peak resident memory of a process."""

from pathlib import Path


def peak_rss_bytes(pid: int | None = None) -> int | None:
    """Of a process, or of this one; None where the system or another user's process hides it."""
    status = Path("/proc") / ("self" if pid is None else str(pid)) / "status"
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(found, None)
