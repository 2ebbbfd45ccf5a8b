"""The curves of a run, and how each is shown."""

from dataclasses import dataclass, replace
from statistics import fmean

from paddock.dashboard.charts import ChartAxis, ReferenceLine, line_chart
from paddock.dashboard.html import Html
from paddock.dashboard.run_view import RunView
from paddock.dashboard.series import MetricSeries


@dataclass(frozen=True, slots=True)
class MetricDisplay:
    """How a metric is shown."""

    title: str
    unit: str = ""
    log: bool = False
    zero: bool = False  # the axis begins there
    noisy: bool = True  # an average says more than single steps

    @property
    def axis(self) -> ChartAxis:
        return ChartAxis(f"{self.unit}{', logarithmic axis' * self.log}", self.log, self.zero)


LOSS_DISPLAY = MetricDisplay("Loss", "nats a token")
METRIC_DISPLAYS = {
    "loss": LOSS_DISPLAY,
    "held_out": MetricDisplay("Held-out loss", "nats a token"),
    "indexer": MetricDisplay("Indexer loss", "nats a query"),
    "balance": MetricDisplay("Balance loss", "1 is even"),
    "grad_norm": MetricDisplay("Gradient norm", "before clipping", log=True),
    "lr": MetricDisplay("Learning rate", zero=True, noisy=False),
    "imbalance": MetricDisplay("Busiest expert", "its load over the mean, worst layer; 1 is even"),
    "memory_bytes": MetricDisplay("Memory", "GiB", zero=True, noisy=False),
    "speed": MetricDisplay("Speed", "tokens a second, without evaluation", zero=True),
    "mfu": MetricDisplay("MFU", "% of the chip's peak", zero=True),
    "reward": MetricDisplay("Reward", "mean of all attempts"),
    "rewards": MetricDisplay("Reward by task", "mean of its attempts"),
    "entropy": MetricDisplay("Entropy", "nats a token, of what was sampled", zero=True),
    "gap": MetricDisplay("Trainer and engine apart", "nats a token", zero=True),
    "gap_kl": MetricDisplay("Trainer and engine apart", "KL divergence, estimated", zero=True),
    "masked": MetricDisplay("Masked", "share of the trained tokens", zero=True),
    "flat": MetricDisplay("Flat groups", "share in which all earned the same", zero=True),
    "truncated": MetricDisplay("Truncated", "share of the attempts", zero=True),
    "staleness": MetricDisplay("Staleness", "updates, mean of the batch", zero=True),
    "staleness_max": MetricDisplay("Staleness, the oldest", "updates", zero=True, noisy=False),
    "trainer_idle": MetricDisplay("Trainer idle", "share of the time", zero=True),
    "engine_idle": MetricDisplay("Engine idle", "share of the time", zero=True),
    "pushed_s": MetricDisplay("Handing over weights", "seconds an update", zero=True),
    "policy_loss": MetricDisplay("Policy loss"),
}
REWARD = "reward_"  # begins the name of a task's own


def metric_display(metric: str) -> MetricDisplay:
    if metric.startswith(REWARD):
        return MetricDisplay(f"Reward, {metric.removeprefix(REWARD)}", "mean of its attempts")
    return METRIC_DISPLAYS.get(metric, MetricDisplay(metric.replace("_", " ")))


def smoothing_window(points: int) -> float:
    """A hundredth of a run: enough to see the trend, too little to hide a bump."""
    return float(max(1, round(points / 100)))


def run_smoothing_window(run: RunView) -> float:
    """Rewards of a few attempts jump, and there are few updates: a twentieth of them."""
    return smoothing_window(len(run.lines) * (5 if "reward" in run.metrics else 1))


def final_value(curve: MetricSeries) -> tuple[float, str]:
    """Where a curve ends, and what that means: one step's loss is too noisy to compare, so the last
    hundredth of many points is averaged; one measured now and then stands for itself.

    >>> final_value(MetricSeries(name="a", x=range(200), y=[9.0] * 198 + [1.0, 2.0]))
    (1.5, 'mean of the last 2 steps')
    """
    points = 1 if curve.marks else round(smoothing_window(len(curve.y)))
    said = f"mean of the last {points:,} steps" if points > 1 else "last value"
    return fmean(curve.y[-points:]), said


def first_and_last(curve: MetricSeries) -> tuple[float, float]:
    """Where a noisy curve begins and ends: means of its first and last twentieth.

    >>> first_and_last(MetricSeries(name="a", x=range(40), y=[0.0, 0.2, *[0.5] * 36, 0.8, 1.0]))
    (0.1, 0.9)
    """
    points = max(1, round(len(curve.y) / 20))
    return fmean(curve.y[:points]), fmean(curve.y[-points:])


def chart(
    run: RunView, shown: MetricDisplay, curves: list[MetricSeries], *rules: ReferenceLine
) -> Html:
    """Curves of one run. Its own axis begins at zero where the curves do not begin late."""
    x = ChartAxis(run.progress[0], zero=not starts_late(curves))
    smooth = run_smoothing_window(run) if shown.noisy else 0
    return line_chart(shown.title, curves, x=x, y=shown.axis, rules=rules, smooth=smooth)


def starts_late(curves: list[MetricSeries]) -> bool:
    """
    >>> starts_late([MetricSeries(name="a", x=[1, 2, 100], y=[0, 0, 0])])
    False
    >>> starts_late([MetricSeries(name="b", x=[50, 100], y=[0, 0]), MetricSeries(name="c", x=[], y=[])])
    True
    """
    drawn = [curve.x for curve in curves if curve.x]
    return not drawn or min(x[0] for x in drawn) > max(x[-1] for x in drawn) / 4


def metric_chart(run: RunView, metric: str) -> Html:
    curve = run.curve(metric)
    if metric.endswith("_bytes"):
        curve = replace(curve, y=[value / 2**30 for value in curve.y])
    return chart(run, metric_display(metric), [curve])


def reward_metrics(run: RunView) -> list[str]:
    """The metrics that say what was earned, of each task; of all where tasks are not told apart."""
    tasks = [name for name in run.metrics if name.startswith(REWARD)]
    return tasks or [name for name in run.metrics if name == "reward"]


def reward_chart(run: RunView) -> Html:
    curves = [
        replace(run.curve(name), name=name.removeprefix(REWARD)) for name in reward_metrics(run)
    ]
    return chart(run, metric_display("reward" if len(curves) == 1 else "rewards"), curves)


def last_half(curve: MetricSeries) -> MetricSeries:
    """From the middle on, along x."""
    first = next((i for i, x in enumerate(curve.x) if x >= curve.x[-1] / 2), 0)
    columns = ("x", "y", "low", "high", "step")
    return replace(curve, **{name: getattr(curve, name)[first:] for name in columns})


def throughput_series(run: RunView) -> MetricSeries:
    """Tokens a second of the steps that did nothing else."""
    found = [
        (x, line)
        for x, line in zip(run.progress[1], run.lines, strict=True)
        if run.tokens and line.get("seconds", 0) > 0 and "held_out" not in line
    ]
    return MetricSeries(
        name="tokens a second",
        x=[x for x, _ in found],
        y=[line["tokens"] / line["seconds"] for _, line in found],
        step=[line["step"] for _, line in found],
    )


def mfu_series(run: RunView) -> MetricSeries | None:
    """Percent of the peak, where the run wrote down what a token costs and what the chip can do."""
    flops, peak = (
        run.latest_positive_value("started", name) for name in ("flops_token", "peak_flops")
    )
    if flops is None or peak is None:
        return None
    fast = throughput_series(run)
    return replace(fast, name="MFU", y=[100 * y * flops / peak for y in fast.y])
