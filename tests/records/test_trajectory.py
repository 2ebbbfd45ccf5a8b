from dataclasses import replace
from math import nan

import pytest

from paddock.records import Completion, Segment, Trajectory, Turn, Verdict

ANSWER = Completion(
    token_ids=(11, 12, 13),
    logprobs=(-0.1, -0.2, -0.5),
    versions=(Segment(3, 2), Segment(4, 1)),
    finish="stop",
)
TRAJECTORY = Trajectory(
    task_id="t", group_id="g", session_id="s", turns=(), outcome=Verdict(reward=1.0)
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", (11, -1, 13)),
        ("logprobs", (-0.1, -0.2)),
        ("logprobs", (-0.1, -0.2, nan)),
        ("logprobs", (-0.1, 0.5, -0.1)),  # positive: a loss in place of a log-probability
        ("versions", (Segment(3, 2),)),
        ("versions", (Segment(3, 4),)),
        ("finish", "tired"),
        ("forced", (3,)),
        ("forced", (-1,)),
        ("forced", (1, 1)),
        ("forced", (2, 0)),
    ],
)
def test_an_inconsistent_completion_is_rejected_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        replace(ANSWER, **{field: value})


@pytest.mark.parametrize(("version", "tokens", "field"), [(-1, 1, "version"), (0, 0, "tokens")])
def test_a_segment_has_a_version_and_a_token(version, tokens, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Segment(version, tokens)


def test_an_empty_aborted_completion_is_valid():
    nothing = Completion(token_ids=(), logprobs=(), versions=(), finish="abort")
    assert nothing.token_versions == () and nothing.sampled == ()


def test_columns_of_a_trajectory_align_with_the_context():
    forced = replace(ANSWER, token_ids=(21, 22, 23), forced=(1,))
    trajectory = replace(
        TRAJECTORY,
        turns=(
            Turn(added_ids=(1, 2), completion=ANSWER),
            Turn(added_ids=(5,), completion=forced),
        ),
    )
    assert trajectory.token_ids == (1, 2, 11, 12, 13, 5, 21, 22, 23)
    assert trajectory.logprobs == (0.0, 0.0, -0.1, -0.2, -0.5, 0.0, -0.1, -0.2, -0.5)
    assert [i for i, trained in enumerate(trajectory.loss_mask) if trained] == [2, 3, 4, 6, 8]


def test_a_turn_trained_by_another_branch_is_context_only():
    shared = Turn(added_ids=(1,), completion=ANSWER, trained=False)
    fork = replace(TRAJECTORY, branch=1, turns=(shared, Turn(added_ids=(7,), completion=ANSWER)))
    assert fork.loss_mask == (False,) * 5 + (True,) * 3


def test_the_oldest_version_is_the_smallest_even_if_an_engine_fell_behind():
    late = replace(ANSWER, versions=(Segment(5, 1), Segment(2, 2)))
    turns = (Turn(added_ids=(1,), completion=ANSWER), Turn(added_ids=(), completion=late))
    assert replace(TRAJECTORY, turns=turns).oldest_version == 2
    assert TRAJECTORY.oldest_version is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_id", ""),
        ("group_id", ""),
        ("session_id", ""),
        ("branch", -1),
        ("turns", (Turn(added_ids=(), completion=ANSWER),)),
    ],
)
def test_a_trajectory_without_id_or_prompt_is_rejected(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        replace(TRAJECTORY, **{field: value})
    with pytest.raises(ValueError, match=r"^added_ids: "):
        Turn(added_ids=(-1,), completion=ANSWER)
