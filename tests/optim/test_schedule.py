import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.optim import ConstantSchedule, CosineSchedule, LinearSchedule
from paddock.optim.schedule import LinearRampSchedule, PiecewiseConstantSchedule

B, T = 1e9, 1e12

# What the papers disclose; x in tokens. The length of GLM-5's warm-up is not known.
PRETRAIN = CosineSchedule(warmup=10 * B, end=27 * T, final=4e-5 / 2e-4)
MIDTRAIN = LinearSchedule(end=1.55 * T, final=1e-5 / 4e-5)
INDEXER_WARMUP = LinearSchedule(end=1000, final=2e-4 / 5e-3)  # in steps
SPARSE_ADAPTATION = ConstantSchedule()
BATCH_TOKENS = LinearRampSchedule(first=16e6, last=64e6, end=500 * B)
ROUTER_BIAS_RATE = PiecewiseConstantSchedule(values=(0.001, 0.0), edges=(15 * T,))
MTP_WEIGHT = PiecewiseConstantSchedule(values=(0.3, 0.1), edges=(15 * T,))


@pytest.mark.parametrize(
    ("schedule", "peak", "points"),
    [
        (PRETRAIN, 2e-4, {0: 0, 5 * B: 1e-4, 10 * B: 2e-4, 27 * T: 4e-5, 30 * T: 4e-5}),
        (MIDTRAIN, 4e-5, {0: 4e-5, 0.775 * T: 2.5e-5, 1.55 * T: 1e-5}),
        (INDEXER_WARMUP, 5e-3, {0: 5e-3, 500: 2.6e-3, 1000: 2e-4}),
        (SPARSE_ADAPTATION, 1e-5, {0: 1e-5, 20 * B: 1e-5}),
        (BATCH_TOKENS, 1, {0: 16e6, 250 * B: 40e6, 500 * B: 64e6, 20 * T: 64e6}),
        (ROUTER_BIAS_RATE, 1, {0: 0.001, 15 * T - 1: 0.001, 15 * T: 0.0}),
        (MTP_WEIGHT, 1, {0: 0.3, 15 * T - 1: 0.3, 15 * T: 0.1, 27 * T: 0.1}),
    ],
)
def test_the_schedules_of_the_papers(schedule, peak, points):
    assert {x: peak * schedule.at(x) for x in points} == pytest.approx(points)


def test_constant_then_linear():
    schedule = LinearSchedule(warmup=10, flat=50, end=100, final=0.2)
    points = {0: 0.0, 5: 0.5, 10: 1.0, 60: 1.0, 80: 0.6, 100: 0.2, 200: 0.2}
    assert {x: schedule.at(x) for x in points} == pytest.approx(points)


def test_a_schedule_without_decay_steps_ends_at_its_final_value():
    schedule = LinearSchedule(warmup=2, flat=8, end=10, final=0.2)
    assert [schedule.at(x) for x in (1, 2, 9, 10)] == pytest.approx([0.5, 1, 1, 0.2])
    assert [CosineSchedule(warmup=10, end=10, final=0.2).at(x) for x in (5, 10)] == pytest.approx(
        [0.5, 0.2]
    )


def test_ratios_that_sum_to_one_cover_any_run_length():
    for steps in range(1, 200):
        schedule = LinearSchedule(warmup=0.1 * steps, flat=0.9 * steps, end=steps, final=0.2)
        assert schedule.at(0.5 * steps) == 1.0
        assert schedule.at(steps) == pytest.approx(0.2)


def test_a_cosine_is_halfway_down_halfway_along():
    assert CosineSchedule(warmup=20, end=100, final=0.2).at(60) == pytest.approx(0.6)


spans = st.floats(0, 1e13)
shares = st.floats(0, 1)


@given(warmup=spans, flat=spans, fall=spans, final=shares, x=spans, further=spans)
def test_factors_stay_between_zero_and_one_and_never_rise_after_the_warm_up(
    warmup, flat, fall, final, x, further
):
    linear = LinearSchedule(warmup=warmup, flat=flat, end=warmup + flat + fall, final=final)
    for schedule in (linear, CosineSchedule(warmup=warmup, end=warmup + fall, final=final)):
        assert 0 <= schedule.at(x) <= 1
        early = schedule.at(warmup + x)
        assert schedule.at(warmup + x + further) <= early or math.isclose(
            schedule.at(warmup + x + further), early
        )


@pytest.mark.parametrize(("values", "edges"), [((1.0,), (5.0,)), ((1.0, 2.0, 3.0), (5.0, 4.0))])
def test_invalid_edges_are_rejected(values, edges):
    with pytest.raises(ValueError, match="edges must ascend"):
        PiecewiseConstantSchedule(values=values, edges=edges)


def test_a_decay_that_ends_before_it_starts_is_rejected():
    with pytest.raises(ValueError, match="end at 60, after the schedule ends at 50"):
        LinearSchedule(warmup=10, flat=50, end=50)
    with pytest.raises(ValueError, match="end at 60"):
        CosineSchedule(warmup=60, end=50)
