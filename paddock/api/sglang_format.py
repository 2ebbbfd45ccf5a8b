"""SGLang `/generate`: responses and stream chunks."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.delta_parser import HeldBackText, truncate_at_stop
from paddock.api.sglang_request import GenerateRequest
from paddock.api.token_decoder import TokenDecoder
from paddock.records import OutputDelta, RequestOutput, TokenLogprob
from paddock.text import IncrementalDetokenizer, Tokenizer, parse_events

LogprobEntry = list[Any]  # [log-probability, token id, text or null]


@dataclass(frozen=True, slots=True)
class GenerateFormatter:
    """Formats the response of one generate request."""

    request: GenerateRequest
    prompt: tuple[int, ...]
    tokenizer: Tokenizer
    token_decoder: TokenDecoder
    replica: int
    label: Callable[[int], str] = str  # label of a weight version

    def format_response(self, output: RequestOutput) -> dict[str, Any]:
        """The complete response."""
        ids = () if self.request.scores_only else output.completion.token_ids
        return {
            "text": self._text(ids, output),
            "output_ids": list(ids),
            "meta_info": self.format_meta_info(output),
        }

    def format_chunk(self, chunk: "GenerateChunk", version: int) -> dict[str, Any]:
        """A chunk of an unfinished completion."""
        meta: dict[str, Any] = {
            "id": self.request.id,
            "finish_reason": None,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": chunk.total,
            "weight_version": self.label(version),
            "dp_rank": self.replica,
        }
        if self.request.top_logprobs is not None:
            meta["output_token_logprobs"] = self._entries(chunk.logprobs, chunk.ids)
            meta["output_token_logprobs_length"] = len(chunk.ids)
            if self.request.top_logprobs:
                meta["output_top_logprobs"] = [self._candidates(each) for each in chunk.top]
        return {"text": chunk.text, "output_ids": list(chunk.ids), "meta_info": meta}

    def format_meta_info(self, output: RequestOutput) -> dict[str, Any]:
        done = output.completion
        ids = () if self.request.scores_only else done.token_ids
        starts, first = [], 0
        for segment in done.versions:
            starts.append([first, self.label(segment.version)])
            first += segment.tokens
        meta: dict[str, Any] = {
            "id": self.request.id or output.id,
            "finish_reason": sglang_finish_reason(output, len(ids)),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": output.cached_tokens,
            "reasoning_tokens": output.reasoning_tokens,
            "weight_version": starts[-1][1] if starts else None,
            "weight_versions": starts,
            "forced_positions": list(done.forced),
            "num_retractions": output.preemptions,
            "dp_rank": self.replica,
            "e2e_latency": output.e2e_latency_s,
        }
        if self.request.return_prompt_token_ids:
            meta["prompt_token_ids"] = list(self.prompt)
        return meta | self._logprobs(output, ids) | self._routing(output) | _speculation(output)

    def _logprobs(self, output: RequestOutput, ids: Sequence[int]) -> dict[str, Any]:
        if self.request.top_logprobs is None:
            return {}
        count = len(ids)
        found: dict[str, Any] = {
            "output_token_logprobs": self._entries(output.completion.logprobs[:count], ids),
            "output_token_logprobs_length": count,
            "input_token_logprobs": [],
        }
        start = self.request.prompt_logprobs_start
        if start is not None:
            scored = self.prompt[start:]
            found["input_token_logprobs"] = self._entries(output.prompt_logprobs, scored)
        if self.request.top_logprobs:
            found["output_top_logprobs"] = [
                self._candidates(each) for each in output.top_logprobs[:count]
            ]
            found["input_top_logprobs"] = [
                self._candidates(each) for each in output.prompt_top_logprobs
            ]
        if self.request.logprob_token_ids:
            found["output_token_ids_logprobs"] = [
                self._candidates(x) for x in output.requested_logprobs[:count]
            ]
            found["input_token_ids_logprobs"] = [
                self._candidates(x) for x in output.prompt_requested_logprobs
            ]
        return found

    def _routing(self, output: RequestOutput) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if output.routing is None:
            return found
        if self.request.routed_experts_start is not None and output.routing.expert_TLK is not None:
            found["routed_experts"] = _b64(
                output.routing.expert_TLK[self.request.routed_experts_start :]
            )
        if self.request.return_indexer_topk and output.routing.index_TLK is not None:
            found["indexer_topk"] = _b64(output.routing.index_TLK)
        return found

    def _text(self, ids: Sequence[int], output: RequestOutput) -> str:
        matched = output.matched_stop if self.request.trim_stop else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        detokenizer = self.new_detokenizer()
        text = detokenizer.push_all(ids) + detokenizer.flush()
        return truncate_at_stop(text, matched) if isinstance(matched, str) else text

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for the text that follows the prompt."""
        skip = self.request.skip_special
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip, behind=self.prompt)

    def _entries(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[LogprobEntry]:
        return [self._entry(*pair) for pair in zip(logprobs, ids, strict=True)]

    def _candidates(self, candidates: TokenLogprob | None) -> list[LogprobEntry] | None:
        if candidates is None:
            return None
        return [
            self._entry(*pair)
            for pair in zip(candidates.logprobs, candidates.token_ids, strict=True)
        ]

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        return [
            logprob,
            token_id,
            self.token_decoder.text(token_id) if self.request.return_text_in_logprobs else None,
        ]


@dataclass(slots=True)
class GenerateChunk:
    """Part of a completion, as it is streamed."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TokenLogprob] = field(default_factory=list)
    total: int = 0  # completion tokens so far


class GenerateStream:
    """Stream payloads of one completion: cumulative or, with `incremental`, only what is new."""

    def __init__(self, formatter: GenerateFormatter, *, incremental: bool) -> None:
        self._formatter, self._incremental = formatter, incremental
        self._text = formatter.new_detokenizer()
        self._held_back = HeldBackText(
            formatter.request.sampling.stop if formatter.request.trim_stop else ()
        )
        self._chunk, self._sent_chars = GenerateChunk(), 0

    def push(self, delta: OutputDelta) -> dict[str, Any] | None:
        """The next payload; None if there is nothing to send."""
        output = delta.output
        if self._formatter.request.scores_only and output is None:
            return None
        if output is not None:
            return self._final_payload(delta, output)
        chunk = self._chunk = (
            GenerateChunk(total=self._chunk.total) if self._incremental else self._chunk
        )
        for event in self._held_back.feed(
            [parse_events.ContentDelta(self._text.push(i)) for i in delta.token_ids]
        ):
            assert isinstance(event, parse_events.ContentDelta)
            chunk.text += event.text
            self._sent_chars += len(event.text)
        chunk.ids += delta.token_ids
        chunk.logprobs += delta.logprobs
        chunk.top += delta.top_logprobs
        chunk.total += len(delta.token_ids)
        return self._formatter.format_chunk(chunk, delta.version)

    def _final_payload(self, delta: OutputDelta, output: RequestOutput) -> dict[str, Any]:
        response = self._formatter.format_response(output)
        if self._incremental:
            new = 0 if self._formatter.request.scores_only else len(delta.token_ids)
            response["text"] = response["text"][self._sent_chars :]
            for owner, name in (
                (response, "output_ids"),
                (response["meta_info"], "output_token_logprobs"),
                (response["meta_info"], "output_top_logprobs"),
            ):
                if name in owner:
                    owner[name] = owner[name][len(owner[name]) - new :]
        return response


def sglang_finish_reason(output: RequestOutput, tokens: int) -> dict[str, Any]:
    match output.completion.finish:
        case "stop":
            return {"type": "stop", "matched": output.matched_stop}
        case "length":
            return {"type": "length", "length": tokens}
        case "abort":
            return {
                "type": "abort",
                "message": output.abort_reason,
                "status_code": None,
                "err_type": None,
            }


def _speculation(output: RequestOutput) -> dict[str, Any]:
    if not output.draft_tokens:
        return {}
    steps = max(1, output.verify_steps)
    return {
        "spec_verify_ct": output.verify_steps,
        "spec_accept_length": len(output.completion.token_ids) / steps,
        "spec_accept_rate": output.accepted_draft_tokens / output.draft_tokens,
        "spec_num_correct_drafts": output.accepted_draft_tokens,
        "spec_num_proposed_drafts": output.draft_tokens,
    }


def _b64(array: Any) -> str:
    """An integer array as base64 of little-endian int32."""
    return b64encode(array.astype("<i4").tobytes()).decode()
