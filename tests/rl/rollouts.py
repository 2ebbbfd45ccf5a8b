"""Hand-made rollouts."""

from paddock.records import Completion, Failure, Segment, Trajectory, Turn, Verdict


def completion(ids, *, version=0, finish="stop", logprob=-0.5, forced=()):
    return Completion(
        token_ids=tuple(ids),
        logprobs=(logprob,) * len(ids),
        versions=(Segment(version, len(ids)),),
        finish=finish,
        forced=tuple(forced),
    )


def trajectory(outcome, *turns, session="s", branch=0, group="g"):
    if isinstance(outcome, float | int):
        outcome = Verdict(reward=float(outcome))
    if isinstance(outcome, str):
        outcome = Failure(kind=outcome, where="there", what="broke")
    return Trajectory(
        task_id="t/0",
        group_id=group,
        session_id=session,
        branch=branch,
        turns=turns,
        outcome=outcome,
    )


def rollout(outcome, *, session="s", reply=(8, 9), finish="stop", version=0):
    turn = Turn(added_ids=(1, 7), completion=completion(reply, finish=finish, version=version))
    return (trajectory(outcome, turn, session=session),)


def group(*outcomes, **changes):
    return [rollout(outcome, session=f"s{i}", **changes) for i, outcome in enumerate(outcomes)]
