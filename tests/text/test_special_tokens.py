import pytest

from paddock.text import SpecialToken, SpecialTokenIds
from paddock.text.special_tokens import MissingTokenError

FIRST = 154820  # in the released vocabulary


@pytest.mark.parametrize(
    ("token", "released"),
    [
        (SpecialToken.ENDOFTEXT, 154820),
        (SpecialToken.GMASK, 154822),
        (SpecialToken.SOP, 154824),
        (SpecialToken.OBSERVATION, 154829),
        (SpecialToken.CODE_PREFIX, 154838),
        (SpecialToken.THINK_OPEN, 154841),
        (SpecialToken.ARG_VALUE_CLOSE, 154850),
        (SpecialToken.VIDEO, 154855),
    ],
)
def test_the_order_is_that_of_the_released_vocabulary(token, released):
    assert list(SpecialToken).index(token) == released - FIRST
    assert len(SpecialToken) == 36


def test_generated_tokens_are_never_skipped():
    assert SpecialToken.USER.is_special and SpecialToken.ENDOFTEXT.is_special
    assert not any(
        token.is_special
        for token in SpecialToken
        if "think" in token or "tool" in token or "arg" in token or "code" in token
    )


def test_a_missing_token_is_named_with_the_tokenizer():
    specials = SpecialTokenIds.from_tokenizer({"<|endoftext|>": 5}.get, tokenizer="llama")
    assert SpecialToken.ENDOFTEXT in specials and specials.stop_token_ids == (5,)
    with pytest.raises(MissingTokenError, match=r"'llama' has no token <think>"):
        specials.ids_of([SpecialToken.ENDOFTEXT, SpecialToken.THINK_OPEN])


def test_stop_tokens_match_the_released_model():
    ids = {token.value: FIRST + i for i, token in enumerate(SpecialToken)}
    assert SpecialTokenIds.from_tokenizer(ids.get, tokenizer="glm5").stop_token_ids == (
        154820,
        154827,
        154829,
    )
