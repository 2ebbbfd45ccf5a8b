"""Replies that belong to a language, by way of xgrammar (the extra `grammar`).

V vocabulary.
"""

import json
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from paddock.engine.request import RequestRefused
from paddock.engine.thinking import Thinking
from paddock.records import Grammar
from paddock.text import Special, Tokenizer


class Constraint:
    """Which tokens may come next, for one reply.

    It begins when the reply is done thinking and then moves by exactly the tokens that were
    written: looking ahead along drafts is taken back at once.
    """

    def __init__(self, matcher: Any, never_V: Tensor, thinking: Thinking | None) -> None:
        self._matcher, self._never_V = matcher, never_V
        self._close_id = thinking.close_id if thinking is not None and thinking.is_open else None

    @property
    def active(self) -> bool:
        return self._close_id is None

    @property
    def satisfiable(self) -> bool:
        """Whether there is anything to begin with, now or when the reply is done thinking."""
        return bool(self._matcher.is_terminated() or self._mask().any())

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to say."""
        return self.active and bool(self._matcher.is_terminated())

    def masks(self, drafts: list[int]) -> list[Tensor | None]:
        """What is allowed after none, one, two, ... of the drafts; shorter if one of them is not
        allowed itself, since nothing is sampled behind it."""
        masks: list[Tensor | None] = [self._mask() if self.active else None]
        active, accepted = self.active, 0
        for draft in drafts:
            if not active:
                active = draft == self._close_id
            elif not self._matcher.accept_token(draft):
                break
            else:
                accepted += 1
                if self._matcher.is_terminated():
                    break
            masks.append(self._mask() if active else None)
        if accepted:
            self._matcher.rollback(accepted)
        return masks

    def push(self, token: int) -> bool:
        """The reply goes on with `token`; whether the language allows it."""
        if self.active:
            return bool(self._matcher.accept_token(token))
        if token == self._close_id:
            self._close_id = None
        return True

    def _mask(self) -> Tensor:
        vocab = len(self._never_V)
        words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(words)
        bits = (words.view(-1, 1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[:vocab].bool() & ~self._never_V


class Grammars:
    """Languages, compiled for one tokenizer; the same one only once."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise RequestRefused(
                "grammars need xgrammar, which is not installed: pip install 'paddock[grammar]'"
            ) from None
        kind, blank_first = _vocabulary_kind(tokenizer)
        self._mute = _mute(tokenizer)
        spellings = (tokenizer.token_of(token) or "" for token in range(tokenizer.vocab_size))
        info = xgrammar.TokenizerInfo(
            ["" if token in self._mute else text for token, text in enumerate(spellings)],
            xgrammar.VocabType[kind],
            vocab_size=vocab,
            stop_token_ids=list(tokenizer.specials.stops) or None,
            add_prefix_space=blank_first,
        )
        self._xgrammar, self._vocab = xgrammar, vocab
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._lock = Lock()

    def constraint(
        self, grammar: Grammar, stop_ids: Iterable[int], thinking: Thinking | None
    ) -> Constraint:
        """Refuses what is no grammar. Compiling may take a while: not for the engine's thread."""
        compilers: dict[str, Callable[[str], Any]] = {
            "json_schema": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
            "structural_tag": self._compiler.compile_structural_tag,
        }
        stops = sorted(stop_ids)
        try:
            with self._lock:
                compiled = compilers[grammar.kind](grammar.text)
            matcher = self._xgrammar.GrammarMatcher(
                compiled,
                override_stop_tokens=stops or None,
                terminate_without_stop_token=not stops,
            )
        except Exception as error:  # the library raises whatever its parts raise
            why = str(error).strip().splitlines()
            raise RequestRefused(f"the {grammar.kind} is no grammar: {why[-1:]}") from None
        never_V = torch.zeros(self._vocab, dtype=torch.bool)
        never_V[sorted(self._mute - set(stops))] = True  # the library lets some of them through
        constraint = Constraint(matcher, never_V, thinking)
        if not constraint.satisfiable:  # the library compiles rules that only name each other
            raise RequestRefused(f"the {grammar.kind} allows no reply at all")
        return constraint


def _vocabulary_kind(tokenizer: Tokenizer) -> tuple[str, bool]:
    """How the tokens of this tokenizer spell bytes, and whether a text begins with a blank."""
    rules = json.loads(tokenizer.files["tokenizer.json"])
    decoder, cut = rules["decoder"] or {}, rules["pre_tokenizer"] or {}
    decoders = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    schemes = {step.get("prepend_scheme") for step in cut.get("pretokenizers", [cut])}
    if "ByteLevel" in decoders:
        return "BYTE_LEVEL", False
    if "ByteFallback" in decoders:
        return "BYTE_FALLBACK", bool(schemes & {"always", "first"})
    return "RAW", False


def _mute(tokenizer: Tokenizer) -> set[int]:
    """Tokens that no language may spell: roles, ends and the marks of thinking."""
    rules = json.loads(tokenizer.files["tokenizer.json"])
    mute = {int(token["id"]) for token in rules["added_tokens"] if token["special"]}
    marks = (tokenizer.id_of(token) for token in (Special.THINK_OPEN, Special.THINK_CLOSE))
    return mute | {token for token in marks if token is not None}
