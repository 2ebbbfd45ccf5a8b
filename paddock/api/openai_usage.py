"""Token usage as OpenAI counts it."""

from collections.abc import Sequence
from typing import Any

from paddock.records import RequestOutput


def openai_usage(
    outputs: Sequence[RequestOutput], *, prompts: int = 1, scores_only: bool = False
) -> dict[str, Any]:
    """Usage of `outputs`, the same number for each of `prompts` prompts. A prompt with several
    completions counts once; with `scores_only` there are no completion tokens."""
    per_prompt = max(1, len(outputs) // prompts)
    prompt = sum(output.prompt_tokens for output in outputs[::per_prompt])
    completion = 0 if scores_only else sum(len(a.completion.token_ids) for a in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(a.cached_tokens for a in outputs[::per_prompt])
        },
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in outputs)},
    }
