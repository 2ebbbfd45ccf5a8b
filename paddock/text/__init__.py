"""Text as the model sees it.

gguf.py       the tokenizer inside a GGUF file
special.py    the tokens that text cannot spell
tokenizer.py  text into token ids and back; training a tokenizer
"""

from paddock.text.special import MissingToken, Special, Specials
from paddock.text.tokenizer import Detokenizer, Tokenizer, TokenizerError, train

__all__ = [
    "Detokenizer",
    "MissingToken",
    "Special",
    "Specials",
    "Tokenizer",
    "TokenizerError",
    "train",
]
