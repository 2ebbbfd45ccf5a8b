"""SGLang's `/generate`: how it answers."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.delta_parser import (
    HeldBackText,
    OutputDeltaLike,
    RequestOutputLike,
    truncate_at_stop,
)
from paddock.api.sglang_request import GenerateRequest
from paddock.api.token_decoder import TokenDecoder, TokenLogprobLike
from paddock.text import IncrementalDetokenizer, Tokenizer, parse_events

LogprobEntry = list[Any]  # [log-probability, token id, text or null]


@dataclass(frozen=True, slots=True)
class GenerateFormatter:
    """How one generate request is answered."""

    ask: GenerateRequest
    prompt: tuple[int, ...]
    tokenizer: Tokenizer
    spelling: TokenDecoder
    replica: int
    label: Callable[[int], str] = str  # what clients call a version of the weights

    def format_response(self, answer: RequestOutputLike) -> dict[str, Any]:
        """The reply, all of it."""
        ids = () if self.ask.scores_only else answer.completion.token_ids
        return {
            "text": self._text(ids, answer),
            "output_ids": list(ids),
            "meta_info": self.format_meta_info(answer),
        }

    def format_chunk(self, said: "GenerateChunk", version: int) -> dict[str, Any]:
        """Some of the reply, before it is finished."""
        meta: dict[str, Any] = {
            "id": self.ask.id,
            "finish_reason": None,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": said.total,
            "weight_version": self.label(version),
            "dp_rank": self.replica,
        }
        if self.ask.top_logprobs is not None:
            meta["output_token_logprobs"] = self._entries(said.logprobs, said.ids)
            meta["output_token_logprobs_length"] = len(said.ids)
            if self.ask.top_logprobs:
                meta["output_top_logprobs"] = [self._likely(each) for each in said.top]
        return {"text": said.text, "output_ids": list(said.ids), "meta_info": meta}

    def format_meta_info(self, answer: RequestOutputLike) -> dict[str, Any]:
        done = answer.completion
        ids = () if self.ask.scores_only else done.token_ids
        starts, first = [], 0
        for segment in done.versions:
            starts.append([first, self.label(segment.version)])
            first += segment.tokens
        meta: dict[str, Any] = {
            "id": self.ask.id or answer.id,
            "finish_reason": sglang_finish_reason(answer, len(ids)),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": answer.cached_tokens,
            "reasoning_tokens": answer.reasoning_tokens,
            "weight_version": starts[-1][1] if starts else None,
            "weight_versions": starts,
            "forced_positions": list(done.forced),
            "num_retractions": answer.preemptions,
            "dp_rank": self.replica,
            "e2e_latency": answer.e2e_latency_s,
        }
        if self.ask.shows_prompt:
            meta["prompt_token_ids"] = list(self.prompt)
        return meta | self._scores(answer, ids) | self._replay(answer) | _speculation(answer)

    def _scores(self, answer: RequestOutputLike, ids: Sequence[int]) -> dict[str, Any]:
        if self.ask.top_logprobs is None:
            return {}
        kept = len(ids)
        found: dict[str, Any] = {
            "output_token_logprobs": self._entries(answer.completion.logprobs[:kept], ids),
            "output_token_logprobs_length": kept,
            "input_token_logprobs": [],
        }
        start = self.ask.prompt_logprobs_from
        if start is not None:
            scored = self.prompt[start:]
            found["input_token_logprobs"] = self._entries(answer.prompt_logprobs, scored)
        if self.ask.top_logprobs:
            found["output_top_logprobs"] = [
                self._likely(each) for each in answer.top_logprobs[:kept]
            ]
            found["input_top_logprobs"] = [
                self._likely(each) for each in answer.prompt_top_logprobs
            ]
        if self.ask.ask_ids:
            found["output_token_ids_logprobs"] = [
                self._likely(x) for x in answer.requested_logprobs[:kept]
            ]
            found["input_token_ids_logprobs"] = [
                self._likely(x) for x in answer.prompt_requested_logprobs
            ]
        return found

    def _replay(self, answer: RequestOutputLike) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if answer.routing is None:
            return found
        if self.ask.experts_from is not None and answer.routing.expert_TLK is not None:
            found["routed_experts"] = _b64(answer.routing.expert_TLK[self.ask.experts_from :])
        if self.ask.indexer and answer.routing.index_TLK is not None:
            found["indexer_topk"] = _b64(answer.routing.index_TLK)
        return found

    def _text(self, ids: Sequence[int], answer: RequestOutputLike) -> str:
        matched = answer.matched_stop if self.ask.trims_stop else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        growing = self.new_detokenizer()
        text = growing.push_all(ids) + growing.flush()
        return truncate_at_stop(text, matched) if isinstance(matched, str) else text

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """The reply's text: what it adds to the prompt's."""
        skip = self.ask.skip_special
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip, behind=self.prompt)

    def _entries(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[LogprobEntry]:
        return [self._entry(*pair) for pair in zip(logprobs, ids, strict=True)]

    def _likely(self, likely: TokenLogprobLike | None) -> list[LogprobEntry] | None:
        if likely is None:
            return None
        return [self._entry(*pair) for pair in zip(likely.logprobs, likely.token_ids, strict=True)]

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        return [logprob, token_id, self.spelling.text(token_id) if self.ask.shows_text else None]


@dataclass(slots=True)
class GenerateChunk:
    """Some of a reply, as it is streamed."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TokenLogprobLike] = field(default_factory=list)
    total: int = 0  # tokens of the reply so far


class GenerateStream:
    """A reply delta by delta: a payload holds all of it so far or, `incremental`, what is new."""

    def __init__(self, form: GenerateFormatter, *, incremental: bool) -> None:
        self._form, self._incremental = form, incremental
        self._text = form.new_detokenizer()
        self._held = HeldBackText(form.ask.sampling.stop if form.ask.trims_stop else ())
        self._said, self._before = GenerateChunk(), 0

    def push(self, delta: OutputDeltaLike) -> dict[str, Any] | None:
        """The next payload; None if there is nothing to say."""
        answer = delta.output
        if self._form.ask.scores_only and answer is None:
            return None
        if answer is not None:
            return self._last(delta, answer)
        said = self._said = (
            GenerateChunk(total=self._said.total) if self._incremental else self._said
        )
        for event in self._held.feed(
            [parse_events.ContentDelta(self._text.push(i)) for i in delta.token_ids]
        ):
            assert isinstance(event, parse_events.ContentDelta)
            said.text += event.text
            self._before += len(event.text)
        said.ids += delta.token_ids
        said.logprobs += delta.logprobs
        said.top += delta.top_logprobs
        said.total += len(delta.token_ids)
        return self._form.format_chunk(said, delta.version)

    def _last(self, delta: OutputDeltaLike, answer: RequestOutputLike) -> dict[str, Any]:
        whole = self._form.format_response(answer)
        if self._incremental:
            new = 0 if self._form.ask.scores_only else len(delta.token_ids)
            whole["text"] = whole["text"][self._before :]
            for owner, name in (
                (whole, "output_ids"),
                (whole["meta_info"], "output_token_logprobs"),
                (whole["meta_info"], "output_top_logprobs"),
            ):
                if name in owner:
                    owner[name] = owner[name][len(owner[name]) - new :]
        return whole


def sglang_finish_reason(answer: RequestOutputLike, tokens: int) -> dict[str, Any]:
    match answer.completion.finish:
        case "stop":
            return {"type": "stop", "matched": answer.matched_stop}
        case "length":
            return {"type": "length", "length": tokens}
        case "abort":
            return {
                "type": "abort",
                "message": answer.abort_reason,
                "status_code": None,
                "err_type": None,
            }


def _speculation(answer: RequestOutputLike) -> dict[str, Any]:
    if not answer.draft_tokens:
        return {}
    steps = max(1, answer.verify_steps)
    return {
        "spec_verify_ct": answer.verify_steps,
        "spec_accept_length": len(answer.completion.token_ids) / steps,
        "spec_accept_rate": answer.accepted_draft_tokens / answer.draft_tokens,
        "spec_num_correct_drafts": answer.accepted_draft_tokens,
        "spec_num_proposed_drafts": answer.draft_tokens,
    }


def _b64(array: Any) -> str:
    """The bytes of an array of whole numbers, as little-endian int32."""
    return b64encode(array.astype("<i4").tobytes()).decode()
