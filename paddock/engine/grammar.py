"""Grammar-constrained decoding with xgrammar (the extra `grammar`).

V vocabulary.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from threading import Event, Lock
from typing import Any

import torch
from torch import Tensor

from paddock.engine.grammar_automaton import DecodedVocab, PushdownState
from paddock.engine.grammar_worker import (
    GrammarCompileCancelledError,
    GrammarCompileError,
    GrammarCompileTimeoutError,
    GrammarTooSlowError,
    GrammarWorkerCrashError,
    GrammarWorkerUnavailableError,
    LaneFull,
    SerializedGrammar,
    SerializedTokenizerInfo,
    compile_workers,
)
from paddock.engine.request import EngineError, EngineQueueFullError, InvalidRequestError
from paddock.engine.settings import EngineSettings
from paddock.engine.thinking_budget import ThinkingBudget
from paddock.records import Grammar
from paddock.text import SpecialToken, Tokenizer

MAX_REJECTED_CACHED = 256  # grammars remembered as such
MAX_STEP_S = 1.0  # a reply whose grammar holds up the engine for longer at one token is ended
MARKER_TOKENS = (
    *(SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE),
    *(SpecialToken.ARG_KEY_OPEN, SpecialToken.ARG_KEY_CLOSE),
    *(SpecialToken.ARG_VALUE_OPEN, SpecialToken.ARG_VALUE_CLOSE),
)


class GrammarConstraint:
    """Which tokens may come next, for one reply.

    It begins when the reply is done thinking and then moves by exactly the tokens that were
    written: looking ahead along drafts is taken back at once. Until then whatever would end the
    thinking otherwise, a stop token or a call, is not allowed.
    """

    def __init__(
        self,
        matcher: Any,
        never_V: Tensor,
        thinking: ThinkingBudget | None,
        *,
        unthinkable: Iterable[int] = (),
        closing: PushdownState | None = None,
    ) -> None:
        self._matcher, self._never_V = matcher, never_V
        self._close_id = thinking.close_id if thinking is not None and thinking.is_open else None
        self._thinking_V: Tensor | None = None
        if self._close_id is not None:
            self._thinking_V = torch.ones_like(never_V)
            self._thinking_V[sorted(unthinkable)] = False
        self._closing = closing
        self._way: list[int] | None = None  # the shortest to the end, if it was needed
        self.slowest_s = 0.0  # of what was done for one token

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

    @property
    def must_complete(self) -> bool:
        """Whether the reply is to be complete within its length."""
        return self._closing is not None

    def shortest_completion(self) -> list[int]:
        """The tokens of the shortest way to the end; refuses a grammar that has none."""
        assert self._closing is not None
        way = self._closing.shortest_path()
        matcher = self._matcher.fork()
        if way is None or not all(map(matcher.accept_token, way)) or not matcher.is_terminated():
            raise InvalidRequestError("the grammar has no ending that this vocabulary can spell")
        self._way = way
        return way

    def token_towards_completion(self, token: int, room: int) -> int:
        """The token to go on with: `token` if the end can still be reached with `room` more behind
        it, else the next one on the shortest way."""
        if self._closing is None or not self.active:
            return token
        after = self._closing.advance(token)
        if after is not None and after.max_tokens_to_accept <= room:
            self._way = None  # to be found when it is needed
            return token
        way = None if after is None else after.shortest_path()
        if way is not None and len(way) <= room:
            return token
        self._way = self._way or self._closing.shortest_path()
        return self._way[0] if self._way else token

    def allowed_masks(self, drafts: list[int]) -> list[Tensor | None]:
        """What is allowed after none, one, two, ... of the drafts; shorter if one of them is not
        allowed itself, since nothing is sampled behind it."""
        started = time.thread_time()
        mask = self._mask() if self.active else self._thinking_V
        masks, active, accepted = [mask], self.active, 0
        for draft in drafts:
            if not active:
                active = draft == self._close_id
            # The mask first: of some refused tokens the matcher writes a line to stderr.
            elif not (mask is not None and mask[draft] and self._matcher.accept_token(draft)):
                break
            else:
                accepted += 1
                if self._matcher.is_terminated():
                    break
            mask = self._mask() if active else self._thinking_V
            masks.append(mask)
        if accepted:
            self._matcher.rollback(accepted)
        self.slowest_s = max(self.slowest_s, (time.thread_time() - started) / len(masks))
        return masks

    def accept_token(self, token: int) -> str | None:
        """The reply goes on with `token`; why it cannot."""
        if not self._push(token):
            return "nothing may follow under its grammar"
        return "its grammar takes too long at every token" if self.slowest_s > MAX_STEP_S else None

    def _push(self, token: int) -> bool:
        if self.active:
            if self._closing is not None:
                self._closing = self._closing.advance(token)
                way, self._way = self._way, None
                if way and way[0] == token:
                    self._way = way[1:]
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


class GrammarBackend:
    """Grammars compiled for one tokenizer, in processes that can be killed (grammar_worker.py)."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, settings: EngineSettings) -> None:
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequestError(
                "grammars need xgrammar, which is not installed: pip install 'paddock[grammar]'"
            ) from None
        self._xgrammar, self._vocab, self._settings = xgrammar, vocab, settings
        self._tokenizer, self._mute = tokenizer, frozenset(_mute(tokenizer))
        specials = tokenizer.special_token_ids
        self._markers = frozenset(specials[each] for each in MARKER_TOKENS if each in specials)
        self._info = {apart: self._tokenizer_info(apart) for apart in (False, True)}
        self._vocabulary = {apart: _vocabulary(info) for apart, info in self._info.items()}
        self._pieces = DecodedVocab(self._info[True].decoded_vocab, self._markers, self._mute)
        self._lanes = compile_workers(settings.grammar_timeout_s, settings.grammar_memory_bytes)
        self._cache = GrammarCache(settings.grammar_cache_bytes)
        self._refused: OrderedDict[Grammar, str] = OrderedDict()

    def make_constraint(
        self,
        grammar: Grammar,
        stop_ids: Iterable[int],
        thinking: ThinkingBudget | None,
        cancelled: Event | None = None,
    ) -> GrammarConstraint:
        """Refuses what is no grammar, or takes too long or too much memory to compile. Blocks
        meanwhile: not for the engine's thread. Given up when `cancelled` is set."""
        compiled, automaton = self._cache.get(grammar) or self._compiled(grammar, cancelled)
        stops = () if grammar.must_complete else tuple(sorted(stop_ids))
        matcher = self._xgrammar.GrammarMatcher(
            compiled,
            override_stop_tokens=list(stops) or None,
            terminate_without_stop_token=not stops,
        )
        never_V = torch.zeros(self._vocab, dtype=torch.bool)
        never_V[sorted(self._mute.difference(stops))] = True  # the library lets some through
        call_id = self._tokenizer.special_token_ids.ids.get(SpecialToken.TOOL_CALL_OPEN)
        unthinkable = {*stop_ids, *self._mute} - {thinking.close_id if thinking else None}
        constraint = GrammarConstraint(
            matcher,
            never_V,
            thinking,
            unthinkable=unthinkable | ({call_id} if call_id is not None else set()),
            closing=None if automaton is None else PushdownState(automaton, self._pieces),
        )
        if not constraint.satisfiable:  # the library compiles rules that only name each other
            raise InvalidRequestError(f"the {grammar.kind} allows no reply at all")
        if grammar.must_complete and not constraint.must_complete:
            raise InvalidRequestError(f"the {grammar.kind} is too complex to be completed in time")
        return constraint

    def _compiled(self, grammar: Grammar, cancelled: Event | None) -> "GrammarCacheEntry":
        size, most = len(grammar.text.encode(errors="replace")), self._settings.max_grammar_bytes
        if size > most:
            raise InvalidRequestError(f"the {grammar.kind} has {size} bytes, more than {most}")
        if grammar in self._refused:
            raise InvalidRequestError(self._refused[grammar])
        try:
            found = self._in_a_lane(grammar, cancelled)
        except (
            GrammarCompileError,
            GrammarCompileTimeoutError,
            GrammarWorkerCrashError,
            GrammarTooSlowError,
        ) as error:
            why = _reason(grammar, error, self._settings.grammar_timeout_s)
            self._refused[grammar] = why
            while len(self._refused) > MAX_REJECTED_CACHED:
                self._refused.popitem(last=False)
            raise InvalidRequestError(why) from None
        except GrammarCompileCancelledError:
            raise InvalidRequestError("the client disconnected") from None
        except LaneFull as error:
            raise EngineQueueFullError(str(error)) from None
        except GrammarWorkerUnavailableError as error:
            raise EngineError(str(error)) from None
        info = self._info[grammar.must_complete]
        compiled = self._xgrammar.CompiledGrammar.deserialize_json(found.serialized, info)
        return self._cache.put(grammar, (compiled, found.automaton), len(found.serialized))

    def _in_a_lane(self, grammar: Grammar, cancelled: Event | None) -> SerializedGrammar:
        quick, slow = self._lanes
        vocabulary = self._vocabulary[grammar.must_complete]
        try:
            return quick.compile(grammar, vocabulary, cancelled)
        except GrammarCompileTimeoutError:
            return slow.compile(grammar, vocabulary, cancelled)

    def _tokenizer_info(self, markers_apart: bool) -> Any:
        """With `markers_apart` no text spells a marker: it is the byte 0xFF, which no text has."""
        kind, blank_first = _vocabulary_kind(self._tokenizer)
        count = self._tokenizer.vocab_size
        spelled: list[Any] = [self._tokenizer.id_to_token(i) or "" for i in range(count)]
        for token in self._mute:
            spelled[token] = ""
        for token in self._markers if markers_apart else ():
            spelled[token] = {"BYTE_LEVEL": "\xff", "BYTE_FALLBACK": "<0xFF>"}.get(kind, b"\xff")
        return self._xgrammar.TokenizerInfo(
            spelled,
            self._xgrammar.VocabType[kind],
            vocab_size=self._vocab,
            stop_token_ids=list(self._tokenizer.special_token_ids.stop_token_ids) or None,
            add_prefix_space=blank_first,
        )


GrammarCacheEntry = tuple[Any, Any]  # a compiled grammar and its automaton


class GrammarCache:
    """The grammars used last, as many as have room in `most` bytes, serialized."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._entries: OrderedDict[Grammar, tuple[GrammarCacheEntry, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, grammar: Grammar) -> GrammarCacheEntry | None:
        with self._lock:
            if grammar not in self._entries:
                return None
            self._entries.move_to_end(grammar)
            return self._entries[grammar][0]

    def put(self, grammar: Grammar, entry: GrammarCacheEntry, size: int) -> GrammarCacheEntry:
        with self._lock:
            if size <= self.most and grammar not in self._entries:
                self._entries[grammar] = (entry, size)
                self.size += size
            while self.size > self.most:
                self.size -= self._entries.popitem(last=False)[1][1]
        return entry


def _reason(grammar: Grammar, error: Exception, seconds: float) -> str:
    match error:
        case GrammarCompileTimeoutError():
            return f"the {grammar.kind} takes more than {seconds:g} s to compile"
        case GrammarWorkerCrashError() | GrammarTooSlowError():
            return f"the {grammar.kind} cannot be used: {error}"
    return f"the {grammar.kind} is no grammar: {error}"


def _vocabulary(info: Any) -> SerializedTokenizerInfo:
    text = info.serialize_json()
    return SerializedTokenizerInfo(sha256(text.encode()).hexdigest(), text)


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
    marks = (
        tokenizer.token_to_id(token)
        for token in (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE)
    )
    return mute | {token for token in marks if token is not None}
