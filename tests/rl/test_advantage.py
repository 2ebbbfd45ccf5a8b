import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.rl.advantage import gae, group_advantages, is_zero_variance, pad_group

REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16)


@given(REWARDS)
def test_group_advantages_match_numpy(rewards):
    r = np.array(rewards)
    centred = r - r.mean()
    np.testing.assert_allclose(group_advantages(rewards, norm="mean"), centred, atol=1e-9)
    spread = group_advantages(rewards, norm="std")
    if is_zero_variance(rewards):
        assert spread == [0.0] * len(rewards)
    else:
        np.testing.assert_allclose(spread, centred / r.std(), atol=1e-9)


@pytest.mark.parametrize(
    ("valid", "size", "kept"),
    [
        (4, 8, False),
        (5, 8, True),
        (8, 8, True),
        (0, 8, False),
        (2, 3, True),
        (1, 1, True),
        (1, 2, False),
    ],
)
def test_more_than_half_must_be_valid(valid, size, kept):
    found = pad_group(list(range(valid)), size)
    assert (found is not None) is kept
    if found is not None:
        assert len(found) == size
        counts = np.bincount(found, minlength=valid)
        assert counts.max() - counts.min() <= 1  # repeated evenly


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=10),
    st.floats(0.5, 1.0),
    st.floats(0.0, 1.0),
)
def test_gae_is_the_weighted_sum_of_td_errors(steps, discount, trace):
    reward, value = zip(*steps, strict=True)
    after = [*value[1:], 0.0]
    td_error = [r + discount * v1 - v0 for r, v0, v1 in zip(reward, value, after, strict=True)]
    expected = [
        sum((discount * trace) ** k * td_error[t + k] for k in range(len(steps) - t))
        for t in range(len(steps))
    ]
    found = gae(reward, value, gamma=discount, lam=trace)
    np.testing.assert_allclose(found, expected, atol=1e-9)
