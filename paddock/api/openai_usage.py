"""Tokens counted as OpenAI counts them."""

from collections.abc import Sequence
from typing import Any

from paddock.api.delta_parser import RequestOutputLike


def openai_usage(
    answers: Sequence[RequestOutputLike], *, prompts: int = 1, scores_only: bool = False
) -> dict[str, Any]:
    """Of answers to `prompts` prompts, as many to each: a prompt answered twice counts once. Where
    only the prompt's scores were wanted, nothing was written."""
    each = max(1, len(answers) // prompts)
    prompt = sum(answer.prompt_tokens for answer in answers[::each])
    written = 0 if scores_only else sum(len(a.completion.token_ids) for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in answers[::each])},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in answers)},
    }
