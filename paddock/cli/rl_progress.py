"""An RL run as it goes: a live table on a terminal, a plain line now and then elsewhere."""

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from paddock.cli.tables import table

if TYPE_CHECKING:
    from paddock.journal import Journal
    from paddock.rl import RLSettings, UpdateMetrics

# What the orchestrator may tell.
PRINTED_EVENTS = ("blocked", "group_dropped", "ratios", "stale", "stall", "task_aside", "task_back")


class RLProgress:
    """Writes every batch down, and shows it."""

    def __init__(self, journal: "Journal", settings: "RLSettings") -> None:
        self._journal, self._settings = journal, settings
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._alerts: set[str] = set()  # that are going on
        self._said_at = 0.0

    def __enter__(self) -> "RLProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def log_event(self, kind: str, **fields: Any) -> None:
        """What the orchestrator has to say."""
        self._journal.log_event(kind, **fields)
        if kind in PRINTED_EVENTS:
            self.print(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items()))

    def on_update(self, moment: "UpdateMetrics") -> None:
        self._journal.log_metrics(moment.update, **moment.metrics())
        self._warn(moment)
        cells = _cells(moment)
        if self._console.is_terminal:
            made = table(*cells)
            made.add_row(*cells.values())
            self._live.update(made)
        elif moment.update == moment.steps or time.monotonic() - self._said_at >= 5:
            self._said_at = time.monotonic()
            self.print("  ".join(f"{name} {value}" for name, value in cells.items() if value))

    def _warn(self, moment: "UpdateMetrics") -> None:
        """Each alert once, until it has passed."""
        for alert in moment.alerts:
            if alert.kind not in self._alerts:
                self._journal.log_event(
                    "alert", alert=alert.kind, what=alert.message, step=moment.update
                )
                self.print(f"alert: {alert.kind}: {alert.message}")
        self._alerts = {alert.kind for alert in moment.alerts}


def _cells(moment: "UpdateMetrics") -> dict[str, str]:
    study, tally = moment.train_stats, moment.rollout_stats
    cells = {"update": f"{moment.update}/{moment.steps}"}
    cells |= {f"reward {task}": f"{reward:.3f}" for task, reward in tally.rewards.items()}
    lags = moment.staleness or (0,)
    cells["lag"] = f"{sum(lags) / len(lags):.1f} (max {max(lags)})"
    cells["trainer idle"] = f"{moment.trainer_idle:.0%}"
    cells["engine idle"] = "" if moment.engine_idle is None else f"{moment.engine_idle:.0%}"
    cells["tokens/s"] = f"{study.tokens / max(moment.seconds, 1e-9):,.0f}"
    cells["gap"] = f"{study.mean('logprob_diff'):.1e}"
    cells["masked"] = f"{study.mean('masked'):.1%}"
    cells["entropy"] = f"{study.mean('entropy'):.3f}"
    cells["flat"] = f"{tally.num_zero_variance}/{tally.num_groups}"
    cells["failed"] = ", ".join(f"{kind} {count}" for kind, count in tally.failures.items())
    return cells
