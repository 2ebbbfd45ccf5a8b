"""OpenAI's `/v1/completions`: a prompt as it is, with echo and log-probabilities for scoring."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api.delta_parser import (
    HeldBackText,
    OutputDeltaLike,
    RequestOutputLike,
    truncate_at_stop,
)
from paddock.api.errors import check_completion_count
from paddock.api.request import ApiRequest, Prompt
from paddock.api.sampling_fields import (
    RoutingFields,
    SamplingFields,
    parse_response_format,
    parse_sampling_params,
)
from paddock.api.token_decoder import TokenDecoder, TokenLogprobLike
from paddock.records import ApiError, SamplingParams
from paddock.text import DETOKENIZE_CONTEXT_TOKENS, IncrementalDetokenizer, Tokenizer, parse_events

DEFAULT_MAX_TOKENS = 16  # tokens, where nothing is said


class CompletionBody(RoutingFields, SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """One prompt, answered `n` times."""

    prompt: Prompt
    n: int = 1
    echo: bool = False
    scores_only: bool = False  # no token of a reply is wanted
    skip_special: bool = True
    shows_ids: bool = False
    shows_usage: bool = False  # at the end of a stream


def parse_completion_requests(
    body: CompletionBody, defaults: SamplingParams, *, most: int
) -> list[CompletionRequest]:
    """What is asked, prompt by prompt. More than `most` replies are refused."""
    length = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    n = 1 if body.n is None else body.n
    if n < 1 or n > 128:
        raise ApiError(f"n: {n} is not in [1, 128]", param="n")
    if body.logprobs is not None and body.logprobs < 0:
        raise ApiError(f"logprobs: {body.logprobs} is negative", param="logprobs")
    if body.suffix:
        raise ApiError("suffix: this server cannot fill in the middle", param="suffix")
    prompts = _prompts(body.prompt)
    check_completion_count(n * len(prompts), most)
    if length == 0 and not body.echo:
        raise ApiError("max_tokens: 0 makes sense with echo alone", param="max_tokens")
    sampling = parse_sampling_params(
        body,
        most=1 if length == 0 else length,
        defaults=defaults,
        grammar=parse_response_format(body.response_format),
    )
    return [
        CompletionRequest(
            model=body.model,
            id=body.rid or body.request_id,
            prompt=prompt,
            n=n,
            sampling=sampling,
            scores_only=length == 0,
            stream=bool(body.stream),
            priority=body.priority or 0,
            salt=body.cache_salt or "",
            session=body.session_id or body.user,
            replica=body.routed_dp_rank,
            top_logprobs=body.logprobs,
            echo=bool(body.echo),
            skip_special=body.skip_special_tokens is not False,
            shows_ids=bool(body.return_token_ids),
            shows_usage=bool((body.stream_options or {}).get("include_usage")),
        )
        for prompt in prompts
    ]


def _prompts(said: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    if isinstance(said, str):
        return [said]
    if said and isinstance(said[0], int):
        return [tuple(said)]  # type: ignore[arg-type]
    return [each if isinstance(each, str) else tuple(each) for each in said]  # type: ignore[arg-type]


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionFormatter:
    """How one prompt is answered."""

    ask: CompletionRequest
    prompt: tuple[int, ...]
    tokenizer: Tokenizer
    spelling: TokenDecoder

    def format_choice(self, answer: RequestOutputLike, index: int) -> dict[str, Any]:
        done = answer.completion
        ids = () if self.ask.scores_only else done.token_ids
        found: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text() + self._text(ids, answer),
            "logprobs": self._logprobs(answer, ids) if self.ask.top_logprobs is not None else None,
            "finish_reason": self.finish_reason(answer),
            "matched_stop": answer.matched_stop,
        }
        if self.ask.shows_ids:
            found |= {"prompt_token_ids": list(self.prompt), "token_ids": list(ids)}
        return found

    def finish_reason(self, answer: RequestOutputLike) -> str:
        return "length" if self.ask.scores_only else answer.completion.finish

    def _prompt_text(self) -> str:
        if not self.ask.echo:
            return ""
        if isinstance(self.ask.prompt, str):
            return self.ask.prompt
        return self.tokenizer.decode(list(self.prompt), skip_special=False)

    def _text(self, ids: Sequence[int], answer: RequestOutputLike) -> str:
        matched = answer.matched_stop
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        growing = self.new_detokenizer()
        text = growing.push_all(ids) + growing.flush()
        return truncate_at_stop(text, matched) if isinstance(matched, str) else text

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """The continuation's text: what it adds to the prompt's."""
        skip = self.ask.skip_special
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip, behind=self.prompt)

    def _logprobs(self, answer: RequestOutputLike, ids: Sequence[int]) -> dict[str, Any]:
        all_ids, behind = list(ids), self.prompt
        logprobs: list[float | None] = list(answer.completion.logprobs[: len(ids)])
        top: list[TokenLogprobLike | None] = list(answer.top_logprobs[: len(ids)])
        if self.ask.echo:
            all_ids, behind = [*self.prompt, *all_ids], ()
            logprobs = [*answer.prompt_logprobs, *logprobs]
            top = [*answer.prompt_top_logprobs, *top]
        if not self.ask.top_logprobs:  # of the chosen tokens alone
            top = []
        return self.format_logprobs(all_ids, logprobs, top, 0, behind)

    def format_logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TokenLogprobLike | None],
        offset: int,
        behind: Sequence[int],
    ) -> dict[str, Any]:
        """The four parallel lists; the text begins at character `offset`, its tokens `behind`
        others."""
        text = IncrementalDetokenizer(self.tokenizer, behind=behind)
        pieces = [text.push(i) for i in ids]
        offsets, at = [], offset
        for piece in pieces:
            offsets.append(at)
            at += len(piece)
        tops = top or [None] * len(ids)
        return {
            "tokens": [
                piece or self.spelling.text(i) for piece, i in zip(pieces, ids, strict=True)
            ],
            "token_logprobs": list(logprobs),
            "top_logprobs": [self._table(*row) for row in zip(ids, logprobs, tops, strict=True)],
            "text_offset": offsets,
        }

    def _table(
        self, token_id: int, logprob: float | None, likely: TokenLogprobLike | None
    ) -> dict[str, float] | None:
        """The likeliest tokens, and always the one that stands here."""
        if logprob is None:
            return None
        pairs = {token_id: logprob}
        if likely is not None:
            pairs |= dict(zip(likely.token_ids, likely.logprobs, strict=True))
        return dict(zip(self.spelling.unique_texts(pairs), pairs.values(), strict=True))


class CompletionStream:
    """One choice, delta by delta."""

    def __init__(self, form: CompletionFormatter, index: int) -> None:
        self._form, self._index, self._at = form, index, 0
        self._text, self._said = (
            form.new_detokenizer(),
            list(form.prompt[-DETOKENIZE_CONTEXT_TOKENS:]),
        )
        self._held = HeldBackText(form.ask.sampling.stop)
        self._before = form._prompt_text()

    def push(self, delta: OutputDeltaLike) -> dict[str, Any]:
        """The next choice object."""
        form, answer = self._form, delta.output
        ids = () if form.ask.scores_only else delta.token_ids
        pieces = [parse_events.ContentDelta(self._text.push(i)) for i in ids]
        if answer is None:
            events = self._held.feed(pieces)
        else:
            matched = answer.matched_stop if isinstance(answer.matched_stop, str) else None
            events = self._held.finish(
                [*pieces, parse_events.ContentDelta(self._text.flush())], matched
            )
        new = "".join(
            event.text for event in events if isinstance(event, parse_events.ContentDelta)
        )
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._before + new,
            "logprobs": None,
            "finish_reason": None if answer is None else form.finish_reason(answer),
        }
        if answer is not None:
            choice["matched_stop"] = answer.matched_stop
        if form.ask.top_logprobs is not None:
            at = self._at + len(self._before)
            scores = delta.logprobs[: len(ids)], delta.top_logprobs[: len(ids)]
            choice["logprobs"] = form.format_logprobs(ids, *scores, at, self._said)
        if form.ask.shows_ids:
            choice["token_ids"] = list(ids)
        self._at += len(choice["text"])
        self._said = [*self._said, *ids][-DETOKENIZE_CONTEXT_TOKENS:]
        self._before = ""
        return choice
