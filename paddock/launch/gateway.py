"""The gateway alone: sessions of agents over a loaded model, kept as trajectories."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.engines import default_sampling, in_process_client
from paddock.launch.errors import UserError
from paddock.launch.serve import SHUTDOWN_TIMEOUT_S, LoadedEngines, ServeOptions, open_engines
from paddock.launch.settings import StrPath

if TYPE_CHECKING:
    from paddock.rollout import gateway as rollout_gateway

IDLE_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayInfo:
    """A gateway that is ready for requests."""

    url: str
    model_name: str
    context_length: int
    startup_s: float


def run_gateway(
    folder: StrPath,
    options: ServeOptions,
    *,
    out: StrPath | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    on_ready: Callable[[GatewayInfo], None] | None = None,
) -> None:
    """Serve sessions of agents over a checkpoint or a run's newest one, until interrupted.

    `options.admin_key` opens, scores, exports and closes sessions. Every branch of a session that
    is closed, or still open at the end, is appended to the JSONL file `out`. A session that nobody
    uses for `idle_timeout_s` is closed.
    """
    import uvicorn

    from paddock.http import uvicorn_config
    from paddock.rollout import gateway as rollout_gateway

    if not options.admin_key:
        raise UserError("the gateway needs an admin key: without one no session can be opened")
    with ExitStack() as stack:
        keep = stack.enter_context(open_session_file(Path(out))) if out is not None else _forget
        loaded = stack.enter_context(open_engines(Path(folder), options))
        sessions, rules = _sessions(loaded, options, keep, idle_timeout_s)
        app = rollout_gateway.build_gateway(sessions, rules, admin_key=options.admin_key)
        config = uvicorn_config(app, lifespan="on", timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S)
        loaded.sock.listen(config.backlog)  # connections are accepted as soon as on_ready is called
        info = GatewayInfo(
            url=loaded.url,
            model_name=sessions.settings.served_model_name,
            context_length=loaded.engines[0].capacity.context_length,
            startup_s=time.monotonic() - loaded.started,
        )
        if on_ready is not None:
            on_ready(info)
        with suppress(KeyboardInterrupt):  # uvicorn has shut down and raises the signal again
            uvicorn.Server(config).run(sockets=[loaded.sock])
        for live in list(sessions):
            sessions.close(live)


def _sessions(
    loaded: LoadedEngines,
    options: ServeOptions,
    keep: "Callable[[rollout_gateway.LiveSession], None]",
    idle_timeout_s: float,
) -> "tuple[rollout_gateway.SessionManager, rollout_gateway.SessionConfig]":
    from paddock.records import SamplingParams
    from paddock.rollout import gateway as rollout_gateway

    (engine,), model = loaded.engines, loaded.model
    names = options.served_model_names or (model.folder.resolve().name,)
    settings = rollout_gateway.GatewaySettings(
        served_model_name=names[0],
        context_length=engine.capacity.context_length,
        idle_timeout_s=idle_timeout_s,
    )
    sessions = rollout_gateway.SessionManager(
        in_process_client(engine), model.renderer, settings, keep
    )
    sampling = SamplingParams(**default_sampling(model.folder))
    return sessions, rollout_gateway.SessionConfig(sampling_params=sampling)


def _forget(_: "rollout_gateway.LiveSession") -> None:
    """Keep nothing of a closed session."""


@contextmanager
def open_session_file(out: Path) -> "Iterator[Callable[[rollout_gateway.LiveSession], None]]":
    """Appends closed sessions to a JSONL file, one line per branch: a dialogue for fine-tuning,
    with its reward and its tokens."""
    from paddock.journal import JsonlWriter

    out.parent.mkdir(parents=True, exist_ok=True)
    lines = JsonlWriter(out)

    def keep(live: "rollout_gateway.LiveSession") -> None:
        if live.session.tree.nodes:
            for line in session_lines(live):
                lines.append(line)

    try:
        yield keep
    finally:
        lines.close()


def session_lines(live: "rollout_gateway.LiveSession") -> Iterator[dict[str, Any]]:
    """The branches of a session, each as a dialogue with its reward and its trajectory."""
    from paddock.records import Verdict, json_codec
    from paddock.text import message_to_openai, tool_to_openai

    session = live.session
    reward = live.outcome.reward if isinstance(live.outcome, Verdict) else None
    every = session.trajectories(task_id=session.id, group_id=session.id, outcome=live.outcome)
    tools = [tool_to_openai(tool) for tool in session.tools]
    thinking = "off" if live.rules.thinking.enable_thinking is False else "preserved"
    for trajectory, leaf in zip(every, session.tree.leaves(), strict=True):
        turns = [node.messages() for node in leaf.path()]
        messages = [message for new, reply in turns for message in (*new, reply)]
        yield {
            "id": f"{session.id}/{trajectory.branch}",
            "messages": [message_to_openai(message) for message in messages],
            "thinking": thinking,
            **({"tools": tools} if tools else {}),
            "source": "gateway",
            "reward": reward,
            "trajectory": json_codec.encode(trajectory),
        }
