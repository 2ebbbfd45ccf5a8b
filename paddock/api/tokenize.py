"""/tokenize, /detokenize, /apply-template and /tokenizer_info."""

import json
from typing import Any

from pydantic import Field

from paddock.api import thinking_options
from paddock.api.body import RequestBody
from paddock.api.openai_chat_request import parse_function_tools, parse_request_messages
from paddock.api.request import ChatRequest
from paddock.records import ApiError, SamplingParams
from paddock.text import Tokenizer


class TokenizeBody(RequestBody):
    """Either `prompt` (one string or several) or `messages`."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(RequestBody):
    tokens: list[int] | list[list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class ApplyTemplateBody(RequestBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_template_request(
    body: TokenizeBody | ApplyTemplateBody, server: thinking_options.ThinkingOptions
) -> ChatRequest:
    """The conversation to render."""
    if body.messages is None:
        raise ApiError("either 'prompt' or 'messages' is required", param="prompt")
    options = thinking_options.merge_thinking_options(
        thinking_options.from_template_kwargs(body.chat_template_kwargs), server
    )
    tools, skipped = parse_function_tools(body.tools)
    return ChatRequest(
        messages=parse_request_messages(body.messages),
        tools=tools,
        skipped_tools=skipped,
        thinking=options.thinking,
        continues=body.add_generation_prompt is False,
        sampling=SamplingParams(),
    )


def tokenizer_info(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """tokenizer_config.json with eos, bos and pad token as strings."""
    config: dict[str, Any] = json.loads(tokenizer.files[Tokenizer.CONFIG_FILE])
    named = {
        name: _token_text(config.get(name)) for name in ("eos_token", "bos_token", "pad_token")
    }
    config.pop("added_tokens_decoder", None)
    return config | named | {"chat_template": template, "vocab_size": tokenizer.vocab_size}


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
