"""Progress of an RL run: a live table on a terminal, elsewhere a plain line from time to time."""

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from paddock.cli.tables import table
from paddock.launch import RLCallbacks
from paddock.records import Failure

if TYPE_CHECKING:
    from paddock.rl import UpdateMetrics

# Events of the orchestrator that are printed and not only logged.
PRINTED_EVENTS = (
    *("blocked", "group_dropped", "ratios", "stale", "stall", "task_aside", "task_back"),
    *("event_loop_blocked", "task_ratios", "group_stale", "rollouts_stalled"),
    *("task_disabled", "task_enabled", "task_registered", "task_removed", "gateway"),
)


class RLProgress(RLCallbacks):
    """Shows every batch, and prints events and alerts."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._printed_at = 0.0

    def __enter__(self) -> "RLProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def on_start(self, step: int, steps: int) -> None:
        self.print(f"step {step} of {steps}")

    def on_event(self, kind: str, **fields: Any) -> None:
        if kind in PRINTED_EVENTS:
            self.print(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items()))

    def on_alert(self, kind: str, message: str) -> None:
        self.print(f"alert: {kind}: {message}")

    def on_update(self, metrics: "UpdateMetrics") -> None:
        cells = _cells(metrics)
        if self._console.is_terminal:
            made = table(*cells)
            made.add_row(*cells.values())
            self._live.update(made)
        elif metrics.update == metrics.steps or time.monotonic() - self._printed_at >= 5:
            self._printed_at = time.monotonic()
            self.print("  ".join(_cell(name, value) for name, value in cells.items() if value))


def _cell(name: str, value: str) -> str:
    return f"{value} {name}" if name == "tok/s" else f"{name} {value}"


def _cells(metrics: "UpdateMetrics") -> dict[str, str]:
    trained, rollouts = metrics.train_stats, metrics.rollout_stats
    cells = {"step": f"{metrics.update}/{metrics.steps}"}
    cells |= {f"reward/{task}": f"{reward:.3f}" for task, reward in rollouts.rewards.items()}
    staleness = metrics.staleness or (0,)
    cells["staleness"] = f"{sum(staleness) / len(staleness):.1f} (max {max(staleness)})"
    cells["trainer idle"] = f"{metrics.trainer_idle:.0%}"
    cells["engine idle"] = "" if metrics.engine_idle is None else f"{metrics.engine_idle:.0%}"
    cells["tok/s"] = f"{trained.tokens / max(metrics.seconds, 1e-9):,.0f}"
    cells["logprob diff"] = f"{trained.mean('logprob_diff'):.1e}"
    cells["masked"] = f"{trained.mean('masked'):.1%}"
    cells["entropy"] = f"{trained.mean('entropy'):.3f}"
    cells["zero-variance"] = f"{rollouts.num_zero_variance}/{rollouts.num_groups}"
    cells["failures"] = ", ".join(
        f"{Failure.kind_label(kind)} {count}" for kind, count in rollouts.failures.items()
    )
    return cells
