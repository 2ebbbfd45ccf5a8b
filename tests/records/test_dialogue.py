import pytest

from paddock.records import Dialogue, LossMaskSpan, Message, ToolCall
from paddock.records.json_codec import decode, encode

ASK = Message(role="user", content="Hi")
CALL = ToolCall(id="c", name="look", arguments={"far": 2})
REPLY = Message(role="assistant", content="Hello", reasoning="Hm.", tool_calls=(CALL,))


def test_a_dialogue_round_trips_through_json():
    marks = (LossMaskSpan(message=1, part="reasoning", start=1, end=2), LossMaskSpan(message=1))
    whole = Dialogue(messages=(ASK, REPLY), untrained=marks, thinking="turns", weight=0.5, id="a")
    assert decode(Dialogue, encode(whole)) == whole


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        ({"message": 2}, r"untrained\[0\]: message 2 not found; the dialogue has 2"),
        ({"message": 0}, "message 0 must come from the assistant, got user"),
        ({"message": 1, "part": "content", "end": 9}, "ends at 9, but the length of content is 5"),
        (
            {"message": 1, "part": "reasoning", "start": 4},
            "ends at 4, but the length of reasoning is 3",
        ),
        ({"message": 1, "part": "calls", "end": 2}, "ends at 2, but the length of calls is 1"),
    ],
)
def test_a_loss_mask_span_must_refer_to_existing_text(mark, error):
    with pytest.raises(ValueError, match=error):
        Dialogue(messages=(ASK, REPLY), untrained=(LossMaskSpan(**mark),))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"messages": (ASK,)}, "none of 1 comes from the assistant"),
        ({"thinking": "hard"}, "thinking: must be one of interleaved"),
        ({"weight": -1.0}, "weight: must be finite and at least 0, got -1.0"),
        ({"weight": float("nan")}, "weight: must be finite and at least 0, got nan"),
    ],
)
def test_a_dialogue_that_cannot_be_trained_on_is_rejected(wrong, error):
    with pytest.raises(ValueError, match=error):
        Dialogue(**({"messages": (ASK, REPLY)} | wrong))


def test_a_range_must_not_end_before_it_starts():
    with pytest.raises(ValueError, match=r"end: 2 must not be smaller than start \(3\)"):
        LossMaskSpan(message=0, part="content", start=3, end=2)
