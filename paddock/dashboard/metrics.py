"""Charts of a run's metrics: title, unit and axis of each."""

from dataclasses import dataclass, replace
from statistics import fmean

from paddock.dashboard.charts import ChartAxis, ReferenceLine, line_chart
from paddock.dashboard.html import Html
from paddock.dashboard.run_view import RunView
from paddock.dashboard.series import MetricSeries


@dataclass(frozen=True, slots=True)
class MetricDisplay:
    """How a metric is displayed."""

    title: str
    unit: str = ""
    log: bool = False
    zero: bool = False  # the axis starts at zero
    noisy: bool = True  # smoothed

    @property
    def axis(self) -> ChartAxis:
        return ChartAxis(f"{self.unit}{', logarithmic axis' * self.log}", self.log, self.zero)


LOSS_DISPLAY = MetricDisplay("Loss", "nats/token")
METRIC_DISPLAYS = {
    "loss": LOSS_DISPLAY,
    "val_loss": MetricDisplay("Validation loss", "nats/token"),
    "mtp_loss": MetricDisplay("MTP loss", "nats/token"),
    "indexer_loss": MetricDisplay("Indexer loss", "nats/query"),
    "balance_loss": MetricDisplay("Load-balancing loss"),
    "grad_norm": MetricDisplay("Gradient norm", "before clipping", log=True),
    "lr": MetricDisplay("Learning rate", zero=True, noisy=False),
    "expert_imbalance": MetricDisplay("Expert imbalance", "max load / mean load, worst layer"),
    "memory_bytes": MetricDisplay("Memory", "GiB", zero=True, noisy=False),
    "speed": MetricDisplay("Throughput", "tok/s, without evaluation", zero=True),
    "mfu": MetricDisplay("MFU", "% of peak FLOP/s", zero=True),
    "reward": MetricDisplay("Reward", "mean of all rollouts"),
    "rewards": MetricDisplay("Reward by task", "mean of its rollouts"),
    "entropy": MetricDisplay("Entropy", "nats/token of sampled tokens", zero=True),
    "logprob_diff": MetricDisplay(
        "Train-inference mismatch", "log-prob difference in nats/token", zero=True
    ),
    "train_inference_kl": MetricDisplay("Train-inference KL", "nats/token, estimated", zero=True),
    "routing_mismatch": MetricDisplay(
        "Routing mismatch", "fraction of tokens with other experts", zero=True
    ),
    "teacher_kl": MetricDisplay("KL to the teacher", "nats/token, estimated"),
    "accept_length": MetricDisplay(
        "MTP acceptance length",
        "tokens per decode step, greedy, on a batch's rollouts",
        noisy=False,
    ),
    "masked": MetricDisplay("Masked tokens", "fraction of trained tokens", zero=True),
    "zero_variance": MetricDisplay(
        "Zero-variance groups", "share of groups with equal rewards", zero=True
    ),
    "truncated": MetricDisplay("Truncated", "share of rollouts", zero=True),
    "staleness": MetricDisplay("Staleness", "steps, batch mean", zero=True),
    "staleness_max": MetricDisplay("Max staleness", "steps", zero=True, noisy=False),
    "trainer_idle": MetricDisplay("Trainer idle", "fraction of time", zero=True),
    "engine_idle": MetricDisplay("Engine idle", "fraction of time", zero=True),
    "weight_sync_s": MetricDisplay("Weight sync", "seconds per step", zero=True),
    "policy_loss": MetricDisplay("Policy loss"),
}
REWARD = "reward/"  # prefix of the reward of one task
TOKEN_SHARE = "token_share/"  # prefix of the share of one task


def metric_display(metric: str) -> MetricDisplay:
    """Display of a metric; an unknown one is shown under its name."""
    if metric.startswith(REWARD):
        return MetricDisplay(f"Reward, {metric.removeprefix(REWARD)}", "mean of its rollouts")
    if metric.startswith(TOKEN_SHARE):
        task = metric.removeprefix(TOKEN_SHARE)
        return MetricDisplay(f"Token share, {task}", "of the sampled tokens of a batch", zero=True)
    return METRIC_DISPLAYS.get(metric, MetricDisplay(metric.replace("_", " ")))


def smoothing_window(points: int) -> float:
    """1 % of the points: enough to show the trend, too little to hide a bump."""
    return float(max(1, round(points / 100)))


def run_smoothing_window(run: RunView) -> float:
    """Window of a run: 1 % of its steps, 5 % in RL, where steps are few and rewards noisy."""
    return smoothing_window(len(run.lines) * (5 if "reward" in run.metrics else 1))


def final_value(curve: MetricSeries) -> tuple[float, str]:
    """The value at the end of a curve, and how it was taken.

    The loss of one step is too noisy to compare: the last 1 % of the points is averaged. A metric
    that is measured only now and then is not.

    >>> final_value(MetricSeries(name="a", x=range(200), y=[9.0] * 198 + [1.0, 2.0]))
    (1.5, 'mean of the last 2 steps')
    """
    points = 1 if curve.marks else round(smoothing_window(len(curve.y)))
    meaning = f"mean of the last {points:,} steps" if points > 1 else "last value"
    return fmean(curve.y[-points:]), meaning


def first_and_last(curve: MetricSeries) -> tuple[float, float]:
    """Means of the first and last 5 % of a curve.

    >>> first_and_last(MetricSeries(name="a", x=range(40), y=[0.0, 0.2, *[0.5] * 36, 0.8, 1.0]))
    (0.1, 0.9)
    """
    points = max(1, round(len(curve.y) / 20))
    return fmean(curve.y[:points]), fmean(curve.y[-points:])


def chart(
    run: RunView, shown: MetricDisplay, curves: list[MetricSeries], *rules: ReferenceLine
) -> Html:
    """A chart of curves of one run. The x-axis starts at zero unless the curves start late."""
    x = ChartAxis(run.progress[0], zero=not starts_late(curves))
    smooth = run_smoothing_window(run) if shown.noisy else 0
    return line_chart(shown.title, curves, x=x, y=shown.axis, rules=rules, smooth=smooth)


def starts_late(curves: list[MetricSeries]) -> bool:
    """Whether all curves start after the first quarter of the x-axis.

    >>> starts_late([MetricSeries(name="a", x=[1, 2, 100], y=[0, 0, 0])])
    False
    >>> empty = MetricSeries(name="c", x=[], y=[])
    >>> starts_late([MetricSeries(name="b", x=[50, 100], y=[0, 0]), empty])
    True
    """
    drawn = [curve.x for curve in curves if curve.x]
    return not drawn or min(x[0] for x in drawn) > max(x[-1] for x in drawn) / 4


def metric_chart(run: RunView, metric: str) -> Html:
    """Chart of one metric; bytes are shown in GiB."""
    curve = run.curve(metric)
    if metric.endswith("_bytes"):
        curve = replace(curve, y=[value / 2**30 for value in curve.y])
    return chart(run, metric_display(metric), [curve])


def reward_metrics(run: RunView) -> list[str]:
    """Rewards by task, or the overall reward if there are none."""
    tasks = [name for name in run.metrics if name.startswith(REWARD)]
    return tasks or [name for name in run.metrics if name == "reward"]


def reward_chart(run: RunView) -> Html:
    """Chart of the rewards of all tasks."""
    curves = [
        replace(run.curve(name), name=name.removeprefix(REWARD)) for name in reward_metrics(run)
    ]
    return chart(run, metric_display("reward" if len(curves) == 1 else "rewards"), curves)


def last_half(curve: MetricSeries) -> MetricSeries:
    """The second half of a curve, along x."""
    first = next((i for i, x in enumerate(curve.x) if x >= curve.x[-1] / 2), 0)
    columns = ("x", "y", "low", "high", "step")
    return replace(curve, **{name: getattr(curve, name)[first:] for name in columns})


def throughput_series(run: RunView) -> MetricSeries:
    """Tokens per second of the steps without validation."""
    found = [
        (x, line)
        for x, line in zip(run.progress[1], run.lines, strict=True)
        if run.tokens and line.get("step_time_s", 0) > 0 and "val_loss" not in line
    ]
    return MetricSeries(
        name="tok/s",
        x=[x for x, _ in found],
        y=[line["tokens"] / line["step_time_s"] for _, line in found],
        step=[line["step"] for _, line in found],
    )


def mfu_series(run: RunView) -> MetricSeries | None:
    """MFU in percent; None if the run did not record FLOPs per token and peak FLOP/s."""
    flops, peak = (
        run.latest_positive_value("started", name) for name in ("flops_per_token", "peak_flops")
    )
    if flops is None or peak is None:
        return None
    throughput = throughput_series(run)
    return replace(throughput, name="MFU", y=[100 * y * flops / peak for y in throughput.y])
