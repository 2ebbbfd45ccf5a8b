import pytest

from paddock.records import Dialogue, LossMaskSpan, Message, ToolCall
from paddock.records.json_codec import decode, encode

ASK = Message(role="user", content="Hi")
CALL = ToolCall(id="c", name="look", arguments={"far": 2})
REPLY = Message(role="assistant", content="Hello", reasoning="Hm.", tool_calls=(CALL,))


def test_a_dialogue_survives_the_wire():
    marks = (LossMaskSpan(message=1, part="reasoning", start=1, end=2), LossMaskSpan(message=1))
    whole = Dialogue(messages=(ASK, REPLY), untrained=marks, thinking="turns", weight=0.5, id="a")
    assert decode(Dialogue, encode(whole)) == whole


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ({"message": 2}, r"untrained\[0\]: message 2 of 2 is not there"),
        ({"message": 0}, "message 0 is of the user, no reply"),
        ({"message": 1, "part": "content", "end": 9}, "ends at 9, but the content ends at 5"),
        ({"message": 1, "part": "reasoning", "init": 4}, "ends at 4, but the reasoning ends at 3"),
        ({"message": 1, "part": "calls", "end": 2}, "ends at 2, but the calls ends at 1"),
    ],
)
def test_a_mark_must_point_at_something(mark, complaint):
    with pytest.raises(ValueError, match=complaint):
        Dialogue(messages=(ASK, REPLY), untrained=(LossMaskSpan(**mark),))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"messages": (ASK,)}, "none of 1 is a reply"),
        ({"thinking": "hard"}, "thinking: 'hard' is none of interleaved"),
        ({"weight": -1.0}, "weight: -1.0"),
        ({"weight": float("nan")}, "weight: nan"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        Dialogue(**({"messages": (ASK, REPLY)} | wrong))


def test_a_range_must_not_end_before_it_starts():
    with pytest.raises(ValueError, match="3 to 2 is no range"):
        LossMaskSpan(message=0, part="content", start=3, end=2)
