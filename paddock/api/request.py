"""Generation requests, independent of the API that they came from."""

from dataclasses import dataclass, replace

from paddock.records import ApiError, Grammar, Message, SamplingParams, ToolSpec
from paddock.text import (
    DEFAULT_THINKING,
    SpecialToken,
    ThinkingKwargs,
    Tokenizer,
    tool_call_grammar,
)

MAX_REQUEST_ID_CHARS = 256
Prompt = tuple[int, ...] | str  # text is tokenized without a chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """The fields that all generation requests share."""

    model: str | None = None
    id: str | None = None
    sampling: SamplingParams
    stream: bool = False
    priority: int = 0
    salt: str = ""  # requests with different salts share no prefix-cache entries
    session: str | None = None  # requests of one session go to one replica
    replica: int | None = None  # the replica it must go to
    top_logprobs: int | None = None  # None: no log-probabilities; 0: sampled tokens only

    def __post_init__(self) -> None:
        # The id is logged verbatim: a line break in it would forge a log line.
        if self.id is not None and (
            len(self.id) > MAX_REQUEST_ID_CHARS or not self.id.isprintable()
        ):
            raise ApiError(
                f"rid must have at most {MAX_REQUEST_ID_CHARS} printable characters", param="rid"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A chat request: OpenAI Chat Completions and Responses, Anthropic Messages."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()  # in the prompt; empty if calls are not allowed
    skipped_tools: tuple[str, ...] = ()  # types of tools that this server does not run
    thinking: ThinkingKwargs = DEFAULT_THINKING
    prompt_ids: tuple[int, ...] | None = None  # in place of the rendered conversation
    continues: bool = False  # the completion continues the last message
    must_call: bool = False  # a tool call is required
    only_tool: str | None = None  # the only tool that may be called
    fits_context: bool = False  # max_new_tokens is reduced to fit the context instead of rejected
    n: int = 1

    @property
    def thinking_for_reply(self) -> ThinkingKwargs:
        """Thinking is off if the prompt already opens a required call."""
        return replace(self.thinking, enable_thinking=False) if self.must_call else self.thinking

    def tool_call_prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The first tokens of a required call, for gateway sessions, which use no grammar; empty if
        no call is required."""
        if self.tool_call_grammar(tokenizer) is None:
            return ()
        name = self.callable_tools[0].name if len(self.callable_tools) == 1 else ""
        open_id = tokenizer.special_token_ids[SpecialToken.TOOL_CALL_OPEN]
        return (open_id, *tokenizer.encode(name, specials=False))

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that a required call may use."""
        return tuple(tool for tool in self.tools if self.only_tool in (None, tool.name))

    def tool_call_grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        """The grammar of a required call; None if no call is required."""
        if not self.must_call:
            return None
        grammar = tool_call_grammar(tokenizer, self.callable_tools)
        if grammar is None:
            raise ApiError(
                "tool_choice: this model's tool calls have no marker, so none can be required",
                param="tool_choice",
            )
        return grammar


def context_length_error(tokens: str, context_length: int, param: str) -> ApiError:
    return ApiError(
        f"prompt is too long: {tokens} > {context_length - 1} maximum (this model's maximum "
        f"context length is {context_length} tokens, at least one of them for the completion)",
        code="context_length_exceeded",
        param=param,
    )


def fit_to_context(request: ApiRequest, prompt_tokens: int, context_length: int) -> SamplingParams:
    """The sampling parameters, checked to fit prompt and completion into the context.

    Raises ApiError if they do not fit, unless `fits_context` allows a shorter completion.
    """
    sampling, requested = request.sampling, request.sampling.max_new_tokens
    truncate = isinstance(request, ChatRequest) and request.fits_context
    if prompt_tokens >= context_length:
        raise context_length_error(
            f"{prompt_tokens} tokens",
            context_length,
            "messages" if isinstance(request, ChatRequest) else "prompt",
        )
    if requested is not None and prompt_tokens + requested > context_length:
        if truncate:
            min_new_tokens = min(sampling.min_new_tokens, context_length - prompt_tokens)
            return replace(
                sampling,
                max_new_tokens=context_length - prompt_tokens,
                min_new_tokens=min_new_tokens,
            )
        raise ApiError(
            f"this model's maximum context length is {context_length} tokens; "
            f"{prompt_tokens + requested} were requested ({prompt_tokens} in the prompt, "
            f"{requested} in the completion)",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return sampling
