import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.journal.rollout_codec import pack_rollout, unpack_rollout
from paddock.records import Completion, Failure, Segment, Trajectory, Turn, Verdict

IDS = st.integers(min_value=0, max_value=2**31 - 1)
LOGPROBS = st.floats(min_value=-(2.0**20), max_value=0.0, width=32)


@st.composite
def completions(draw):
    tokens = draw(st.lists(st.tuples(IDS, LOGPROBS), max_size=6))
    versions = draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens)))
    return Completion(
        token_ids=tuple(id for id, _ in tokens),
        logprobs=tuple(logprob for _, logprob in tokens),
        versions=tuple(Segment(version, 1) for version in versions),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        forced=tuple(sorted(draw(st.sets(st.integers(0, len(tokens) - 1))))) if tokens else (),
    )


@st.composite
def turns(draw):
    added = draw(st.lists(IDS, min_size=1, max_size=5))
    return Turn(added_ids=tuple(added), completion=draw(completions()), trained=draw(st.booleans()))


OUTCOMES = st.one_of(
    st.builds(Verdict, reward=st.floats(-9, 9), parts=st.just({"tests": 0.5}), note=st.text()),
    st.builds(Failure, kind=st.sampled_from(["world", "time"]), where=st.text(), what=st.text()),
)


@settings(max_examples=40)
@given(st.lists(st.lists(turns(), max_size=3), min_size=1, max_size=3), OUTCOMES)
def test_a_rollout_round_trips(branches, outcome):
    rollout = tuple(
        Trajectory(
            task_id="sums/1",
            group_id="g",
            session_id="s",
            branch=number,
            turns=tuple(found),
            outcome=outcome,
        )
        for number, found in enumerate(branches)
    )
    assert unpack_rollout(pack_rollout(rollout)) == rollout


def test_a_token_takes_few_bytes():
    rng = np.random.default_rng(0)
    ids = tuple(map(int, rng.integers(0, 154_880, 50_000)))
    logprobs = tuple(map(float, -rng.exponential(1.0, 50_000).astype(np.float32)))
    completion = Completion(
        token_ids=ids, logprobs=logprobs, versions=(Segment(3, 50_000),), finish="stop"
    )
    rollout = Trajectory(
        task_id="t",
        group_id="g",
        session_id="s",
        turns=(Turn(added_ids=(1,), completion=completion),),
        outcome=Verdict(reward=1.0),
    )
    packed = pack_rollout([rollout])
    assert len(packed) / 50_000 < 6.5  # random ids and log-probabilities are the worst case
    assert unpack_rollout(packed) == (rollout,)


def test_another_format_is_rejected():
    with pytest.raises(ValueError, match="rollout format 9 is not supported, expected 1"):
        unpack_rollout(b"\x09" + bytes(20))


@pytest.mark.parametrize("reward", [True, 1, np.float32(1.0), np.bool_(True), np.int64(1)])
def test_a_reward_of_any_numeric_type_round_trips(reward):
    verdict = Verdict(reward=reward, parts={"right": reward})
    trajectory = Trajectory(task_id="t", group_id="g", session_id="s", turns=(), outcome=verdict)
    (found,) = unpack_rollout(pack_rollout([trajectory]))
    assert found.outcome == Verdict(reward=1.0, parts={"right": 1.0})
    assert type(verdict.reward) is float
