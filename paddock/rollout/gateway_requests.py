"""Bodies of the gateway's own routes: a new session, its verdict and its export."""

from typing import Annotated, Any

from annotated_types import Gt, Le

from paddock.api import (
    RequestBody,
    SamplingFields,
    ThinkingOptions,
    from_template_kwargs,
    parse_response_format,
    parse_sampling_params,
)
from paddock.config import ConfigError, Recipe, resolve
from paddock.records import ApiError, Failure, Outcome, Verdict, json_codec
from paddock.rollout.context_management import ContextSettings
from paddock.rollout.prefix_matcher import MATCHERS
from paddock.rollout.session_manager import SessionConfig

MAX_IDLE_S = 30 * 86400.0


class SessionBody(SamplingFields):
    """Sampling of a new session; see `SessionConfig`."""

    id: str | None = None
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None  # of every reply
    matcher: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    idle_timeout_s: Annotated[float, Gt(0), Le(MAX_IDLE_S)] | None = None


class VerdictBody(RequestBody):
    """A reward, or the failure that took its place."""

    reward: float | None = None
    parts: dict[str, float] | None = None
    note: str | None = None
    kind: str | None = None
    where: str | None = None
    what: str | None = None


class ExportBody(RequestBody):
    task_id: str | None = None
    group_id: str | None = None
    outcome: dict[str, Any] | None = None
    format: str | None = None
    tokens: bool | None = None


def session_config(body: SessionBody, own: SessionConfig) -> SessionConfig:
    """The configuration of a new session; `own` holds the defaults of the service."""
    matcher = own.matcher if body.matcher is None else MATCHERS.get(body.matcher)
    if matcher is None:
        raise ApiError(f"matcher must be one of {', '.join(MATCHERS)}", param="matcher")
    limit = own.sampling_params.max_new_tokens if body.max_tokens is None else body.max_tokens
    sampling = parse_sampling_params(
        body,
        max_new_tokens=limit,
        defaults=own.sampling_params,
        grammar=parse_response_format(body.response_format) or own.sampling_params.grammar,
        thinking_budget=own.sampling_params.thinking_budget,
    )
    options = from_template_kwargs(body.chat_template_kwargs).with_fallback(
        ThinkingOptions(thinking=own.thinking)
    )
    return SessionConfig(
        sampling_params=sampling,
        thinking=options.thinking,
        matcher=matcher,
        context_management=own.context_management
        if body.context_management is None
        else _context_settings(body.context_management),
        idle_timeout_s=body.idle_timeout_s,
    )


def parse_outcome(value: dict[str, Any]) -> Outcome:
    """The outcome of a request.

    >>> parse_outcome({"reward": 1.0, "note": None})
    Verdict(reward=1.0, parts={}, note='')
    """
    value = {name: found for name, found in value.items() if found is not None}
    try:
        if "kind" in value:
            return json_codec.decode(Failure, value)
        return json_codec.decode(Verdict, value)
    except json_codec.RecordDecodeError as error:
        raise ApiError(f"outcome: {error}", param="outcome") from None


def _context_settings(values: dict[str, Any]) -> ContextSettings:
    try:
        return resolve(ContextSettings, Recipe(values, {}))
    except ConfigError as error:
        raise ApiError(f"context_management: {error}", param="context_management") from None
