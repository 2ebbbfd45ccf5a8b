"""OpenAI Completions (`/v1/completions`): raw prompts, with echo and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.api.delta_parser import HeldBackText, truncate_at_stop
from paddock.api.errors import check_completion_count
from paddock.api.request import ApiRequest, Prompt
from paddock.api.sampling_fields import (
    RoutingFields,
    SamplingFields,
    parse_response_format,
    parse_sampling_params,
)
from paddock.api.token_decoder import TokenDecoder
from paddock.records import ApiError, OutputDelta, RequestOutput, SamplingParams, TokenLogprob
from paddock.text import DETOKENIZE_CONTEXT_TOKENS, IncrementalDetokenizer, Tokenizer, parse_events

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


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
    """One prompt with `n` completions."""

    prompt: Prompt
    n: int = 1
    echo: bool = False
    scores_only: bool = False  # only prompt log-probabilities are requested
    skip_special: bool = True
    return_token_ids: bool = False
    include_usage: bool = False  # at the end of a stream


def parse_completion_requests(
    body: CompletionBody, defaults: SamplingParams, *, max_completions: int
) -> list[CompletionRequest]:
    """One request per prompt. Raises ApiError for more than `max_completions` completions."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    n = 1 if body.n is None else body.n
    if n < 1 or n > 128:
        raise ApiError(f"n must be in [1, 128], got {n}", param="n")
    if body.logprobs is not None and body.logprobs < 0:
        raise ApiError(f"logprobs must not be negative, got {body.logprobs}", param="logprobs")
    if body.suffix:
        raise ApiError(
            "suffix is not supported: this model cannot fill in the middle", param="suffix"
        )
    prompts = _prompts(body.prompt)
    check_completion_count(n * len(prompts), max_completions)
    if max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens may be 0 only with echo", param="max_tokens")
    sampling = parse_sampling_params(
        body,
        max_new_tokens=1 if max_tokens == 0 else max_tokens,
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
            scores_only=max_tokens == 0,
            stream=bool(body.stream),
            priority=body.priority or 0,
            salt=body.cache_salt or "",
            session=body.session_id or body.user,
            replica=body.routed_dp_rank,
            top_logprobs=body.logprobs,
            echo=bool(body.echo),
            skip_special=body.skip_special_tokens is not False,
            return_token_ids=bool(body.return_token_ids),
            include_usage=bool((body.stream_options or {}).get("include_usage")),
        )
        for prompt in prompts
    ]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]  # type: ignore[arg-type]
    return [each if isinstance(each, str) else tuple(each) for each in prompt]  # type: ignore[arg-type]


# --- responses ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionFormatter:
    """Formats the completions of one prompt."""

    request: CompletionRequest
    prompt: tuple[int, ...]
    tokenizer: Tokenizer
    token_decoder: TokenDecoder

    def format_choice(self, output: RequestOutput, index: int) -> dict[str, Any]:
        done = output.completion
        ids = () if self.request.scores_only else done.token_ids
        found: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text() + self._text(ids, output),
            "logprobs": self._logprobs(output, ids)
            if self.request.top_logprobs is not None
            else None,
            "finish_reason": self.finish_reason(output),
            "matched_stop": output.matched_stop,
        }
        if self.request.return_token_ids:
            found |= {"prompt_token_ids": list(self.prompt), "token_ids": list(ids)}
        return found

    def finish_reason(self, output: RequestOutput) -> str:
        return "length" if self.request.scores_only else output.completion.finish

    def _prompt_text(self) -> str:
        if not self.request.echo:
            return ""
        if isinstance(self.request.prompt, str):
            return self.request.prompt
        return self.tokenizer.decode(list(self.prompt), skip_special=False)

    def _text(self, ids: Sequence[int], output: RequestOutput) -> str:
        matched = output.matched_stop
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        detokenizer = self.new_detokenizer()
        text = detokenizer.push_all(ids) + detokenizer.flush()
        return truncate_at_stop(text, matched) if isinstance(matched, str) else text

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for the text that follows the prompt."""
        skip = self.request.skip_special
        return IncrementalDetokenizer(self.tokenizer, skip_special=skip, behind=self.prompt)

    def _logprobs(self, output: RequestOutput, ids: Sequence[int]) -> dict[str, Any]:
        all_ids, behind = list(ids), self.prompt
        logprobs: list[float | None] = list(output.completion.logprobs[: len(ids)])
        top: list[TokenLogprob | None] = list(output.top_logprobs[: len(ids)])
        if self.request.echo:
            all_ids, behind = [*self.prompt, *all_ids], ()
            logprobs = [*output.prompt_logprobs, *logprobs]
            top = [*output.prompt_top_logprobs, *top]
        if not self.request.top_logprobs:  # log-probabilities of the sampled tokens only
            top = []
        return self.format_logprobs(all_ids, logprobs, top, 0, behind)

    def format_logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TokenLogprob | None],
        offset: int,
        behind: Sequence[int],
    ) -> dict[str, Any]:
        """The four parallel lists of `logprobs`. The text starts at character `offset`; its tokens
        follow the tokens `behind`."""
        text = IncrementalDetokenizer(self.tokenizer, behind=behind)
        pieces = [text.push(i) for i in ids]
        offsets, at = [], offset
        for piece in pieces:
            offsets.append(at)
            at += len(piece)
        tops = top or [None] * len(ids)
        return {
            "tokens": [
                piece or self.token_decoder.text(i) for piece, i in zip(pieces, ids, strict=True)
            ],
            "token_logprobs": list(logprobs),
            "top_logprobs": [
                self._top_logprobs(*row) for row in zip(ids, logprobs, tops, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top_logprobs(
        self, token_id: int, logprob: float | None, candidates: TokenLogprob | None
    ) -> dict[str, float] | None:
        """The top tokens and always the actual one."""
        if logprob is None:
            return None
        pairs = {token_id: logprob}
        if candidates is not None:
            pairs |= dict(zip(candidates.token_ids, candidates.logprobs, strict=True))
        return dict(zip(self.token_decoder.unique_texts(pairs), pairs.values(), strict=True))


class CompletionStream:
    """Stream chunks of one choice."""

    def __init__(self, formatter: CompletionFormatter, index: int) -> None:
        self._formatter, self._index, self._offset = formatter, index, 0
        self._text, self._sent = (
            formatter.new_detokenizer(),
            list(formatter.prompt[-DETOKENIZE_CONTEXT_TOKENS:]),
        )
        self._held_back = HeldBackText(formatter.request.sampling.stop)
        self._prefix = formatter._prompt_text()

    def push(self, delta: OutputDelta) -> dict[str, Any]:
        """The next choice object."""
        formatter, output = self._formatter, delta.output
        ids = () if formatter.request.scores_only else delta.token_ids
        pieces = [parse_events.ContentDelta(self._text.push(i)) for i in ids]
        if output is None:
            events = self._held_back.feed(pieces)
        else:
            matched = output.matched_stop if isinstance(output.matched_stop, str) else None
            events = self._held_back.finish(
                [*pieces, parse_events.ContentDelta(self._text.flush())], matched
            )
        new = "".join(
            event.text for event in events if isinstance(event, parse_events.ContentDelta)
        )
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._prefix + new,
            "logprobs": None,
            "finish_reason": None if output is None else formatter.finish_reason(output),
        }
        if output is not None:
            choice["matched_stop"] = output.matched_stop
        if formatter.request.top_logprobs is not None:
            at = self._offset + len(self._prefix)
            scores = delta.logprobs[: len(ids)], delta.top_logprobs[: len(ids)]
            choice["logprobs"] = formatter.format_logprobs(ids, *scores, at, self._sent)
        if formatter.request.return_token_ids:
            choice["token_ids"] = list(ids)
        self._offset += len(choice["text"])
        self._sent = [*self._sent, *ids][-DETOKENIZE_CONTEXT_TOKENS:]
        self._prefix = ""
        return choice
