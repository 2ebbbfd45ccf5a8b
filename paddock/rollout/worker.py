"""One attempt at a task: a world on one side, a session and an engine on the other.

The same session code serves agents that come over HTTP (gateway.py); here the agent is the loop of
`envs.play`, and no text travels further than it must.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddock.api import DeltaParser, RequestOutputLike
from paddock.envs import RolloutFailed, RolloutTrace, Taskset, convert_errors, run_rollout
from paddock.records import Message, SamplingParams, Task, ToolSpec, Trajectory
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    OverlongPromptError,
    RequestRejectedError,
    final_delta,
    turn_seed,
)
from paddock.rollout.context_management import ContextFilter, ContextStrategy, keep_all
from paddock.rollout.prefix_matcher import LOOSE, PrefixMatcher
from paddock.rollout.session import PRESERVED, Session, TurnPrompt
from paddock.text import Renderer, ThinkingKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """An attempt, as the world saw it and in tokens."""

    episode: RolloutTrace
    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorker:
    """How attempts are played: by which engine, in whose words."""

    client: InferenceClient
    renderer: Renderer
    thinking: ThinkingKwargs = PRESERVED
    matcher: PrefixMatcher = LOOSE
    context: ContextStrategy = keep_all
    context_length: int | None = (
        None  # tokens that a prompt and its reply may have; None: the engine says
    )

    async def rollout(
        self,
        world: Taskset,
        task: Task,
        sampling: SamplingParams,
        *,
        session_id: str,
        group_id: str,
    ) -> tuple[Trajectory, ...]:
        """The branches of one attempt, all with its outcome; at least one, which has no turn if
        the world failed before the first.

        What goes wrong with the world, the engine or the clock is an outcome. Only a bug raises.
        """
        played = await self.run_episode(world, task, sampling, session_id)
        return played.session.trajectories(
            task_id=task.id, group_id=group_id, outcome=played.episode.outcome
        )

    async def run_episode(
        self, world: Taskset, task: Task, sampling: SamplingParams, session_id: str
    ) -> RolloutResult:
        session = Session(session_id, self.renderer, self.matcher)
        policy = SessionPolicy(session, self, sampling)
        try:
            with convert_errors("world", "open"):
                env = world.make_env(task)
            episode = await run_rollout(env, policy, trouble=self.client.unavailable_reason)
        except RolloutFailed as stop:  # there was nothing to play in
            episode = RolloutTrace(
                task=task, messages=task.messages, outcome=stop.failure, turns=0, seconds=0.0
            )
        finally:
            self.client.end_session(session_id)
        return RolloutResult(episode=episode, session=session)


class SessionPolicy:
    """A policy for `envs.play` whose every token is on record."""

    def __init__(self, session: Session, player: RolloutWorker, sampling: SamplingParams) -> None:
        self.session, self.player, self.sampling = session, player, sampling
        self._show: ContextFilter = player.context()
        self._turns = 0

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        shown = self._show(messages, self.session.num_tokens)
        opening = self.session.begin_turn(shown, tools=tools, thinking=self.player.thinking)
        answer = await self._answer(opening)
        reading = DeltaParser(
            self.session.renderer.tokenizer,
            tools=tools,
            prompt=opening.prompt,
            stops=self.sampling.stop,
            call_id=f"call_{self._turns}_{{}}".format,
        )
        reading.feed(final_delta(answer))
        self._turns += 1
        self.session.record(opening, answer.completion, reading.message)
        if answer.completion.finish == "length" and reading.message.tool_calls:
            # Answered, they would pay: a policy that never ends its turn would learn to go on.
            what = f"cut off after {len(answer.completion.token_ids)} tokens: no call is answered"
            raise RolloutFailed("policy", "reply", what)
        return reading.message

    async def _answer(self, opening: TurnPrompt) -> RequestOutputLike:
        ask = InferenceRequest(
            token_ids=opening.prompt,
            sampling_params=self._fitted(len(opening.prompt)),
            session_id=self.session.id,
            id=f"{self.session.id}/{self._turns}",
        )
        try:
            answer = await self.player.client.generate(ask)
        except OverlongPromptError as error:
            raise RolloutFailed("policy", "context", str(error)) from error
        except (
            RequestRejectedError
        ) as error:  # settings that do not fit each other: nothing it could help
            raise RolloutFailed("infrastructure", "request", str(error)) from error
        except EngineUnavailableError as error:
            raise RolloutFailed("infrastructure", "engine", str(error)) from error
        if answer.completion.finish == "abort":
            why = answer.abort_reason or "aborted"
            raise RolloutFailed("infrastructure", "engine", f"the reply was broken off: {why}")
        return answer

    def _fitted(self, prompt: int) -> SamplingParams:
        """This turn's sampling: its own luck, and no more tokens than there is room for."""
        sampling = replace(self.sampling, seed=turn_seed(self.sampling.seed, self._turns))
        if self.player.context_length is None:
            return sampling
        room = self.player.context_length - prompt
        if room < 1:
            what = f"{prompt} tokens leave no room for a reply in {self.player.context_length}"
            raise RolloutFailed("policy", "context", what)
        most = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
        return replace(
            sampling, max_new_tokens=most, min_new_tokens=min(most, sampling.min_new_tokens)
        )
