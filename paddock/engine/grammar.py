"""Grammar-constrained decoding (structured outputs) with xgrammar (the extra `grammar`).

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
    GrammarQueueFullError,
    GrammarTooSlowError,
    GrammarWorkerCrashError,
    GrammarWorkerUnavailableError,
    SerializedGrammar,
    SerializedTokenizerInfo,
    compile_workers,
)
from paddock.engine.request import EngineError, EngineQueueFullError, InvalidRequestError
from paddock.engine.settings import EngineSettings
from paddock.engine.thinking_budget import ThinkingBudget
from paddock.records import Grammar
from paddock.text import SpecialToken, Tokenizer

MAX_REJECTED_CACHED = 256  # invalid grammars remembered
MAX_STEP_S = 1.0  # a request whose grammar takes longer for one token is aborted
MARKER_TOKENS = (
    *(SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE),
    *(SpecialToken.ARG_KEY_OPEN, SpecialToken.ARG_KEY_CLOSE),
    *(SpecialToken.ARG_VALUE_OPEN, SpecialToken.ARG_VALUE_CLOSE),
)


class GrammarConstraint:
    """Grammar state of one sequence: which tokens may come next.

    It starts after the reasoning and then advances by exactly the tokens that were appended:
    lookahead along drafts is rolled back at once. During reasoning, tokens that would end it other
    than </think> (stop tokens, tool calls) are forbidden.
    """

    def __init__(
        self,
        matcher: Any,
        forbidden_V: Tensor,
        thinking: ThinkingBudget | None,
        *,
        forbidden_in_reasoning: Iterable[int] = (),
        pushdown: PushdownState | None = None,
    ) -> None:
        self._matcher, self._forbidden_V = matcher, forbidden_V
        self._close_id = thinking.close_id if thinking is not None and thinking.is_open else None
        self._reasoning_V: Tensor | None = None
        if self._close_id is not None:
            self._reasoning_V = torch.ones_like(forbidden_V)
            self._reasoning_V[sorted(forbidden_in_reasoning)] = False
        self._pushdown = pushdown
        self._path: list[int] | None = None  # shortest completion, if it was needed
        self.slowest_s = 0.0  # max time for one token

    @property
    def active(self) -> bool:
        """Whether the reasoning is over, so that the grammar applies."""
        return self._close_id is None

    @property
    def satisfiable(self) -> bool:
        """Whether the grammar allows any first token (after the reasoning)."""
        return bool(self._matcher.is_terminated() or self._mask().any())

    @property
    def finished(self) -> bool:
        """Whether the grammar is complete and allows no further token."""
        return self.active and bool(self._matcher.is_terminated())

    @property
    def must_complete(self) -> bool:
        """Whether the output must complete the grammar within `max_new_tokens`."""
        return self._pushdown is not None

    def shortest_completion(self) -> list[int]:
        """Tokens of the shortest completion; raises InvalidRequestError if there is none."""
        assert self._pushdown is not None
        path = self._pushdown.shortest_path()
        matcher = self._matcher.fork()
        if path is None or not all(map(matcher.accept_token, path)) or not matcher.is_terminated():
            raise InvalidRequestError(
                "the grammar has no completion that this vocabulary can spell"
            )
        self._path = path
        return path

    def token_towards_completion(self, token: int, left: int) -> int:
        """The token to append: `token` if the grammar can still complete within `left` more tokens
        after it, else the next token of the shortest completion."""
        if self._pushdown is None or not self.active:
            return token
        after = self._pushdown.advance(token)
        if after is not None and after.max_tokens_to_accept <= left:
            self._path = None  # recomputed when needed
            return token
        path = None if after is None else after.shortest_path()
        if path is not None and len(path) <= left:
            return token
        self._path = self._path or self._pushdown.shortest_path()
        return self._path[0] if self._path else token

    def allowed_masks(self, drafts: list[int]) -> list[Tensor | None]:
        """Masks of allowed tokens after 0, 1, 2, ... drafts; shorter if a draft is forbidden, since
        nothing is sampled after it."""
        started = time.thread_time()
        mask = self._mask() if self.active else self._reasoning_V
        masks, active, accepted = [mask], self.active, 0
        for draft in drafts:
            if not active:
                active = draft == self._close_id
            # The mask first: the matcher prints to stderr for some rejected tokens.
            elif not (mask is not None and mask[draft] and self._matcher.accept_token(draft)):
                break
            else:
                accepted += 1
                if self._matcher.is_terminated():
                    break
            mask = self._mask() if active else self._reasoning_V
            masks.append(mask)
        if accepted:
            self._matcher.rollback(accepted)
        self.slowest_s = max(self.slowest_s, (time.thread_time() - started) / len(masks))
        return masks

    def accept_token(self, token: int) -> str | None:
        """Advance by an appended token; returns an error message if that is impossible."""
        if not self._advance(token):
            return "its grammar allows no further token"
        return "its grammar takes too long at every token" if self.slowest_s > MAX_STEP_S else None

    def _advance(self, token: int) -> bool:
        if self.active:
            if self._pushdown is not None:
                self._pushdown = self._pushdown.advance(token)
                path, self._path = self._path, None
                if path and path[0] == token:
                    self._path = path[1:]
            return bool(self._matcher.accept_token(token))
        if token == self._close_id:
            self._close_id = None
        return True

    def _mask(self) -> Tensor:
        vocab = len(self._forbidden_V)
        words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(words)
        bits = (words.view(-1, 1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[:vocab].bool() & ~self._forbidden_V


class GrammarBackend:
    """Compiles and caches grammars for one tokenizer, in killable processes (grammar_worker.py)."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, settings: EngineSettings) -> None:
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequestError(
                "grammars need xgrammar, which is not installed: pip install 'paddock[grammar]'"
            ) from None
        self._xgrammar, self._vocab, self._settings = xgrammar, vocab, settings
        self._tokenizer, self._unspellable = tokenizer, frozenset(_unspellable(tokenizer))
        specials = tokenizer.special_token_ids
        self._markers = frozenset(specials[each] for each in MARKER_TOKENS if each in specials)
        self._info = {hidden: self._tokenizer_info(hidden) for hidden in (False, True)}
        self._vocabulary = {hidden: _serialized_info(info) for hidden, info in self._info.items()}
        self._decoded_vocab = DecodedVocab(
            self._info[True].decoded_vocab, self._markers, self._unspellable
        )
        self._workers = compile_workers(settings.grammar_timeout_s, settings.grammar_memory_bytes)
        self._cache = GrammarCache(settings.grammar_cache_bytes)
        self._rejected: OrderedDict[Grammar, str] = OrderedDict()

    def make_constraint(
        self,
        grammar: Grammar,
        stop_ids: Iterable[int],
        thinking: ThinkingBudget | None,
        cancelled: Event | None = None,
    ) -> GrammarConstraint:
        """The constraint of a new sequence. Blocks while the grammar is compiled, so it must not be
        called on the engine thread; stops when `cancelled` is set. Raises InvalidRequestError for
        an invalid grammar or one that takes too much time or memory to compile."""
        compiled, automaton = self._cache.get(grammar) or self._compile(grammar, cancelled)
        stops = () if grammar.must_complete else tuple(sorted(stop_ids))
        matcher = self._xgrammar.GrammarMatcher(
            compiled,
            override_stop_tokens=list(stops) or None,
            terminate_without_stop_token=not stops,
        )
        forbidden_V = torch.zeros(self._vocab, dtype=torch.bool)
        forbidden_V[sorted(self._unspellable.difference(stops))] = (
            True  # xgrammar allows some of them
        )
        call_id = self._tokenizer.special_token_ids.ids.get(SpecialToken.TOOL_CALL_OPEN)
        forbidden_in_reasoning = {*stop_ids, *self._unspellable} - {
            thinking.close_id if thinking else None
        }
        constraint = GrammarConstraint(
            matcher,
            forbidden_V,
            thinking,
            forbidden_in_reasoning=forbidden_in_reasoning
            | ({call_id} if call_id is not None else set()),
            pushdown=None if automaton is None else PushdownState(automaton, self._decoded_vocab),
        )
        if not constraint.satisfiable:  # xgrammar accepts rules that only refer to each other
            raise InvalidRequestError(f"the {grammar.kind} allows no output at all")
        if grammar.must_complete and not constraint.must_complete:
            raise InvalidRequestError(f"the {grammar.kind} is too complex for must_complete")
        return constraint

    def _compile(self, grammar: Grammar, cancelled: Event | None) -> "GrammarCacheEntry":
        size, limit = len(grammar.text.encode(errors="replace")), self._settings.max_grammar_bytes
        if size > limit:
            raise InvalidRequestError(f"the {grammar.kind} has {size} bytes, more than {limit}")
        if grammar in self._rejected:
            raise InvalidRequestError(self._rejected[grammar])
        try:
            found = self._run_worker(grammar, cancelled)
        except (
            GrammarCompileError,
            GrammarCompileTimeoutError,
            GrammarWorkerCrashError,
            GrammarTooSlowError,
        ) as error:
            why = _rejection(grammar, error, self._settings.grammar_timeout_s)
            self._rejected[grammar] = why
            while len(self._rejected) > MAX_REJECTED_CACHED:
                self._rejected.popitem(last=False)
            raise InvalidRequestError(why) from None
        except GrammarCompileCancelledError:
            raise InvalidRequestError("the client disconnected") from None
        except GrammarQueueFullError as error:
            raise EngineQueueFullError(str(error)) from None
        except GrammarWorkerUnavailableError as error:
            raise EngineError(str(error)) from None
        info = self._info[grammar.must_complete]
        compiled = self._xgrammar.CompiledGrammar.deserialize_json(found.serialized, info)
        return self._cache.put(grammar, (compiled, found.automaton), len(found.serialized))

    def _run_worker(self, grammar: Grammar, cancelled: Event | None) -> SerializedGrammar:
        fast, slow = self._workers
        vocabulary = self._vocabulary[grammar.must_complete]
        try:
            return fast.compile(grammar, vocabulary, cancelled)
        except GrammarCompileTimeoutError:
            return slow.compile(grammar, vocabulary, cancelled)

    def _tokenizer_info(self, hide_markers: bool) -> Any:
        """xgrammar's TokenizerInfo. With `hide_markers` no text spells a marker token: its piece is
        the byte 0xFF, which never occurs in text."""
        kind, prefix_space = _vocabulary_kind(self._tokenizer)
        count = self._tokenizer.vocab_size
        pieces: list[Any] = [self._tokenizer.id_to_token(i) or "" for i in range(count)]
        for token in self._unspellable:
            pieces[token] = ""
        for token in self._markers if hide_markers else ():
            pieces[token] = {"BYTE_LEVEL": "\xff", "BYTE_FALLBACK": "<0xFF>"}.get(kind, b"\xff")
        return self._xgrammar.TokenizerInfo(
            pieces,
            self._xgrammar.VocabType[kind],
            vocab_size=self._vocab,
            stop_token_ids=list(self._tokenizer.special_token_ids.stop_token_ids) or None,
            add_prefix_space=prefix_space,
        )


GrammarCacheEntry = tuple[Any, Any]  # a compiled grammar and its automaton


class GrammarCache:
    """LRU cache of compiled grammars, up to `max_bytes` of serialized size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.size = max_bytes, 0
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
            if size <= self.max_bytes and grammar not in self._entries:
                self._entries[grammar] = (entry, size)
                self.size += size
            while self.size > self.max_bytes:
                self.size -= self._entries.popitem(last=False)[1][1]
        return entry


def _rejection(grammar: Grammar, error: Exception, seconds: float) -> str:
    match error:
        case GrammarCompileTimeoutError():
            return f"the {grammar.kind} takes more than {seconds:g} s to compile"
        case GrammarWorkerCrashError() | GrammarTooSlowError():
            return f"the {grammar.kind} cannot be used: {error}"
    return f"the {grammar.kind} is not a valid grammar: {error}"


def _serialized_info(info: Any) -> SerializedTokenizerInfo:
    text = info.serialize_json()
    return SerializedTokenizerInfo(sha256(text.encode()).hexdigest(), text)


def _vocabulary_kind(tokenizer: Tokenizer) -> tuple[str, bool]:
    """xgrammar's vocabulary type of this tokenizer, and whether text gets a leading space."""
    rules = json.loads(tokenizer.files["tokenizer.json"])
    decoder, splitter = rules["decoder"] or {}, rules["pre_tokenizer"] or {}
    decoders = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    schemes = {step.get("prepend_scheme") for step in splitter.get("pretokenizers", [splitter])}
    if "ByteLevel" in decoders:
        return "BYTE_LEVEL", False
    if "ByteFallback" in decoders:
        return "BYTE_FALLBACK", bool(schemes & {"always", "first"})
    return "RAW", False


def _unspellable(tokenizer: Tokenizer) -> set[int]:
    """Tokens that no grammar may produce: roles, end tokens, <think> and </think>."""
    rules = json.loads(tokenizer.files["tokenizer.json"])
    special = {int(token["id"]) for token in rules["added_tokens"] if token["special"]}
    marks = (
        tokenizer.token_to_id(token)
        for token in (SpecialToken.THINK_OPEN, SpecialToken.THINK_CLOSE)
    )
    return special | {token for token in marks if token is not None}
