import pytest

from paddock.text import MissingToken, Special, Specials

FIRST = 154820  # in the released vocabulary


@pytest.mark.parametrize(
    ("token", "released"),
    [
        (Special.ENDOFTEXT, 154820),
        (Special.GMASK, 154822),
        (Special.SOP, 154824),
        (Special.OBSERVATION, 154829),
        (Special.CODE_PREFIX, 154838),
        (Special.THINK_OPEN, 154841),
        (Special.ARG_VALUE_CLOSE, 154850),
        (Special.VIDEO, 154855),
    ],
)
def test_the_order_is_that_of_the_released_vocabulary(token, released):
    assert list(Special).index(token) == released - FIRST
    assert len(Special) == 36


def test_what_the_model_says_is_never_silent():
    assert Special.USER.silent and Special.ENDOFTEXT.silent
    assert not any(
        token.silent
        for token in Special
        if "think" in token or "tool" in token or "arg" in token or "code" in token
    )


def test_a_token_that_a_tokenizer_lacks_is_named_with_the_tokenizer():
    specials = Specials.of({"<|endoftext|>": 5}.get, tokenizer="llama")
    assert Special.ENDOFTEXT in specials and specials.stops == (5,)
    with pytest.raises(MissingToken, match=r"'llama' has no token <think>"):
        specials.all([Special.ENDOFTEXT, Special.THINK_OPEN])


def test_a_reply_ends_where_the_released_model_stops():
    ids = {token.value: FIRST + i for i, token in enumerate(Special)}
    assert Specials.of(ids.get, tokenizer="glm5").stops == (154820, 154827, 154829)
