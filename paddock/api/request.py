"""What is asked of us, once a dialect's words are taken away."""

from dataclasses import dataclass, replace

from paddock.records import ApiError, Grammar, Message, SamplingParams, ToolSpec
from paddock.text import (
    DEFAULT_THINKING,
    SpecialToken,
    ThinkingKwargs,
    Tokenizer,
    tool_call_grammar,
)

MAX_REQUEST_ID_CHARS = 256  # characters of a request's id
Prompt = tuple[int, ...] | str  # a text is tokenized as it is, without any template


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """What every request says, whatever it is about."""

    model: str | None = None
    id: str | None = None
    sampling: SamplingParams
    stream: bool = False
    priority: int = 0
    salt: str = ""  # requests with different salts share no cached prefix
    session: str | None = None  # requests of one session go to one replica
    replica: int | None = None  # the replica it must go to
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen tokens alone

    def __post_init__(self) -> None:
        # It stands in the log as it is: a line of its own would look like one of ours.
        if self.id is not None and (
            len(self.id) > MAX_REQUEST_ID_CHARS or not self.id.isprintable()
        ):
            raise ApiError(
                f"rid: must be at most {MAX_REQUEST_ID_CHARS} printable characters", param="rid"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A conversation to be continued: OpenAI's chat and Responses, Anthropic's messages."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()  # shown to the model; empty where it may not call any
    skipped_tools: tuple[str, ...] = ()  # kinds of tools that we do not know
    thinking: ThinkingKwargs = DEFAULT_THINKING
    prompt_ids: tuple[int, ...] | None = None  # in place of the rendered conversation
    continues: bool = False  # the last message is a reply to be gone on with
    must_call: bool = False  # an answer without a call is not wanted
    only_tool: str | None = None  # the one that may be called
    fits_context: bool = False  # a reply longer than the context allows is cut, not refused
    n: int = 1

    @property
    def thinking_for_reply(self) -> ThinkingKwargs:
        """Of a reply whose call the prompt opens: there is no room left for thoughts."""
        return replace(self.thinking, enable_thinking=False) if self.must_call else self.thinking

    def tool_call_prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The beginning of a required call, for sessions, which have no grammar for it: nothing
        where none is required."""
        if self.tool_call_grammar(tokenizer) is None:
            return ()
        name = self.callable_tools[0].name if len(self.callable_tools) == 1 else ""
        opened = tokenizer.special_token_ids[SpecialToken.TOOL_CALL_OPEN]
        return (opened, *tokenizer.encode(name, specials=False))

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that a required call may be of."""
        return tuple(tool for tool in self.tools if self.only_tool in (None, tool.name))

    def tool_call_grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        """Of a reply that must be a call; None where it need not."""
        if not self.must_call:
            return None
        found = tool_call_grammar(tokenizer, self.callable_tools)
        if found is None:
            raise ApiError(
                "tool_choice: this model's calls have no marker, so none can be required",
                param="tool_choice",
            )
        return found


def context_length_error(tokens: str, most: int, param: str) -> ApiError:
    return ApiError(
        f"prompt is too long: {tokens} > {most - 1} maximum (this model's maximum "
        f"context length is {most} tokens, at least one of them for the reply)",
        code="context_length_exceeded",
        param=param,
    )


def fit_to_context(ask: ApiRequest, length: int, most: int) -> SamplingParams:
    """What is to be sampled, if a prompt of `length` tokens and its reply have room in a context of
    `most`; else an error with the numbers."""
    sampling, wanted = ask.sampling, ask.sampling.max_new_tokens
    fits = isinstance(ask, ChatRequest) and ask.fits_context
    if length >= most:
        raise context_length_error(
            f"{length} tokens", most, "messages" if isinstance(ask, ChatRequest) else "prompt"
        )
    if wanted is not None and length + wanted > most:
        if fits:
            kept = min(sampling.min_new_tokens, most - length)
            return replace(sampling, max_new_tokens=most - length, min_new_tokens=kept)
        raise ApiError(
            f"this model's maximum context length is {most} tokens; {length + wanted} were "
            f"requested ({length} in the prompt, {wanted} in the completion)",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return sampling
