"""SGLang's `/generate`: how it answers."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.api.native import Generate
from paddock.api.reply import Answer, Delta, Held, cut
from paddock.api.spelling import Likely, Spelling
from paddock.text import IncrementalDetokenizer, Tokenizer
from paddock.text.parse_events import ContentDelta

Entry = list[Any]  # [log-probability, token id, text or null]


@dataclass(frozen=True, slots=True)
class Format:
    """How one generate request is answered."""

    ask: Generate
    prompt: tuple[int, ...]
    tokenizer: Tokenizer
    spelling: Spelling
    replica: int
    label: Callable[[int], str] = str  # what clients call a version of the weights

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply, all of it."""
        ids = () if self.ask.scores_only else answer.completion.token_ids
        return {
            "text": self._text(ids, answer),
            "output_ids": list(ids),
            "meta_info": self.meta(answer),
        }

    def part(self, said: "Said", version: int) -> dict[str, Any]:
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

    def meta(self, answer: Answer) -> dict[str, Any]:
        done = answer.completion
        ids = () if self.ask.scores_only else done.token_ids
        starts, first = [], 0
        for segment in done.versions:
            starts.append([first, self.label(segment.version)])
            first += segment.tokens
        meta: dict[str, Any] = {
            "id": self.ask.id or answer.id,
            "finish_reason": finish_reason(answer, len(ids)),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": answer.cached_tokens,
            "reasoning_tokens": answer.reasoning_tokens,
            "weight_version": starts[-1][1] if starts else None,
            "weight_versions": starts,
            "forced_positions": list(done.forced),
            "num_retractions": answer.retractions,
            "dp_rank": self.replica,
            "e2e_latency": answer.total_s,
        }
        if self.ask.shows_prompt:
            meta["prompt_token_ids"] = list(self.prompt)
        return meta | self._scores(answer, ids) | self._replay(answer) | _speculation(answer)

    def _scores(self, answer: Answer, ids: Sequence[int]) -> dict[str, Any]:
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
            found["output_top_logprobs"] = [self._likely(each) for each in answer.top[:kept]]
            found["input_top_logprobs"] = [self._likely(each) for each in answer.prompt_top]
        if self.ask.ask_ids:
            found["output_token_ids_logprobs"] = [self._likely(x) for x in answer.asked[:kept]]
            found["input_token_ids_logprobs"] = [self._likely(x) for x in answer.prompt_asked]
        return found

    def _replay(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if answer.replay is None:
            return found
        if self.ask.experts_from is not None and answer.replay.expert_TLK is not None:
            found["routed_experts"] = _b64(answer.replay.expert_TLK[self.ask.experts_from :])
        if self.ask.indexer and answer.replay.index_TLK is not None:
            found["indexer_topk"] = _b64(answer.replay.index_TLK)
        return found

    def _text(self, ids: Sequence[int], answer: Answer) -> str:
        matched = answer.matched if self.ask.trims_stop else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        growing = self.growing()
        text = growing.push_all(ids) + growing.flush()
        return cut(text, matched) if isinstance(matched, str) else text

    def growing(self) -> IncrementalDetokenizer:
        """The reply's text: what it adds to the prompt's."""
        skip = self.ask.skip_special
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip, behind=self.prompt)

    def _entries(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[Entry]:
        return [self._entry(*pair) for pair in zip(logprobs, ids, strict=True)]

    def _likely(self, likely: Likely | None) -> list[Entry] | None:
        if likely is None:
            return None
        return [self._entry(*pair) for pair in zip(likely.logprobs, likely.token_ids, strict=True)]

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        return [logprob, token_id, self.spelling.text(token_id) if self.ask.shows_text else None]


@dataclass(slots=True)
class Said:
    """Some of a reply, as it is streamed."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Likely] = field(default_factory=list)
    total: int = 0  # tokens of the reply so far


class GenerateStream:
    """A reply delta by delta: a payload holds all of it so far or, `incremental`, what is new."""

    def __init__(self, form: Format, *, incremental: bool) -> None:
        self._form, self._incremental = form, incremental
        self._text = form.growing()
        self._held = Held(form.ask.sampling.stop if form.ask.trims_stop else ())
        self._said, self._before = Said(), 0

    def push(self, delta: Delta) -> dict[str, Any] | None:
        """The next payload; None if there is nothing to say."""
        answer = delta.answer
        if self._form.ask.scores_only and answer is None:
            return None
        if answer is not None:
            return self._last(delta, answer)
        said = self._said = Said(total=self._said.total) if self._incremental else self._said
        for event in self._held.feed([ContentDelta(self._text.push(i)) for i in delta.token_ids]):
            assert isinstance(event, ContentDelta)
            said.text += event.text
            self._before += len(event.text)
        said.ids += delta.token_ids
        said.logprobs += delta.logprobs
        said.top += delta.top
        said.total += len(delta.token_ids)
        return self._form.part(said, delta.version)

    def _last(self, delta: Delta, answer: Answer) -> dict[str, Any]:
        whole = self._form.whole(answer)
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


def finish_reason(answer: Answer, tokens: int) -> dict[str, Any]:
    match answer.completion.finish:
        case "stop":
            return {"type": "stop", "matched": answer.matched}
        case "length":
            return {"type": "length", "length": tokens}
        case "abort":
            return {
                "type": "abort",
                "message": answer.message,
                "status_code": None,
                "err_type": None,
            }


def _speculation(answer: Answer) -> dict[str, Any]:
    if not answer.drafts_proposed:
        return {}
    steps = max(1, answer.verify_steps)
    return {
        "spec_verify_ct": answer.verify_steps,
        "spec_accept_length": len(answer.completion.token_ids) / steps,
        "spec_accept_rate": answer.drafts_accepted / answer.drafts_proposed,
        "spec_num_correct_drafts": answer.drafts_accepted,
        "spec_num_proposed_drafts": answer.drafts_proposed,
    }


def _b64(array: Any) -> str:
    """The bytes of an array of whole numbers, as little-endian int32."""
    return b64encode(array.astype("<i4").tobytes()).decode()
