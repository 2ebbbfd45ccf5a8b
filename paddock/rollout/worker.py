"""Rollout worker: runs an environment against a session and an inference client.

The same session code serves agents over HTTP (gateway.py); here the agent is `envs.run_rollout` in
this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddock.api import DeltaParser
from paddock.envs import RolloutFailed, RolloutTrace, Taskset, convert_errors, run_rollout
from paddock.records import Message, RequestOutput, SamplingParams, Task, ToolSpec, Trajectory
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    OverlongPromptError,
    RequestRejectedError,
    final_delta,
    turn_seed,
)
from paddock.rollout.context_management import KEEP_ALL, ContextManager, ContextSettings
from paddock.rollout.prefix_matcher import LOOSE, PrefixMatcher
from paddock.rollout.session import PRESERVED, Session, TurnPrompt
from paddock.text import Renderer, ThinkingKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A rollout as messages (`episode`) and as tokens (`session`)."""

    episode: RolloutTrace
    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorker:
    """Runs rollouts with a client, a renderer and context management."""

    client: InferenceClient
    renderer: Renderer
    thinking: ThinkingKwargs = PRESERVED
    matcher: PrefixMatcher = LOOSE
    context_management: ContextSettings = KEEP_ALL
    context_length: int | None = None  # tokens of prompt and completion; None: the engine checks

    async def rollout(
        self,
        taskset: Taskset,
        task: Task,
        sampling: SamplingParams,
        *,
        session_id: str,
        group_id: str,
    ) -> tuple[Trajectory, ...]:
        """Run one rollout; its branches, all with its outcome.

        There is at least one branch, without turns if the environment failed before the first.
        Errors of the environment or engine and timeouts are outcomes; only a bug raises.
        """
        result = await self.run_episode(taskset, task, sampling, session_id)
        return result.session.trajectories(
            task_id=task.id, group_id=group_id, outcome=result.episode.outcome
        )

    async def run_episode(
        self, taskset: Taskset, task: Task, sampling: SamplingParams, session_id: str
    ) -> RolloutResult:
        session = Session(session_id, self.renderer, self.matcher)
        policy = SessionPolicy(session, self, sampling)
        try:
            with convert_errors("world", "open"):
                env = taskset.make_env(task)
            episode = await run_rollout(env, policy, trouble=self.client.unavailable_reason)
        except RolloutFailed as stop:  # the environment could not be created
            episode = RolloutTrace(
                task=task, messages=task.messages, outcome=stop.failure, turns=0, seconds=0.0
            )
        finally:
            self.client.end_session(session_id)
        return RolloutResult(episode=episode, session=session)


class SessionPolicy:
    """Policy for `envs.run_rollout` that records every token in a session."""

    def __init__(self, session: Session, worker: RolloutWorker, sampling: SamplingParams) -> None:
        self.session, self.worker, self.sampling = session, worker, sampling
        self._context = ContextManager(worker.context_management)
        self._turns = 0

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        prompt = self._prompt(messages, tools)
        if self._context.restart(messages, len(prompt.prompt)):
            prompt = self._prompt(messages, tools)
        output = await self._generate(prompt)
        parser = DeltaParser(
            self.session.renderer.tokenizer,
            tools=tools,
            prompt=prompt.prompt,
            stops=self.sampling.stop,
            call_id=f"call_{self._turns}_{{}}".format,
        )
        parser.feed(final_delta(output))
        self._turns += 1
        self.session.record(prompt, output.completion, parser.message)
        if output.completion.finish == "length" and parser.message.tool_calls:
            # Executing them would reward a policy that never ends its turn.
            count = len(output.completion.token_ids)
            what = f"truncated after {count} tokens: its tool calls are not executed"
            raise RolloutFailed("policy", "reply", what)
        return parser.message

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> TurnPrompt:
        shown = self._context.visible(messages)
        return self.session.begin_turn(shown, tools=tools, thinking=self.worker.thinking)

    async def _generate(self, prompt: TurnPrompt) -> RequestOutput:
        request = InferenceRequest(
            token_ids=prompt.prompt,
            sampling_params=self._limited_sampling(len(prompt.prompt)),
            session_id=self.session.id,
            id=f"{self.session.id}/{self._turns}",
        )
        try:
            output = await self.worker.client.generate(request)
        except OverlongPromptError as error:
            raise RolloutFailed("policy", "context", str(error)) from error
        except RequestRejectedError as error:  # inconsistent settings, not the policy's fault
            raise RolloutFailed("infrastructure", "request", str(error)) from error
        except EngineUnavailableError as error:
            raise RolloutFailed("infrastructure", "engine", str(error)) from error
        if output.completion.finish == "abort":
            why = output.abort_reason or "aborted"
            raise RolloutFailed("infrastructure", "engine", f"the request was aborted: {why}")
        return output

    def _limited_sampling(self, prompt_tokens: int) -> SamplingParams:
        """Sampling parameters of this turn: its own seed, tokens limited by the context length."""
        sampling = replace(self.sampling, seed=turn_seed(self.sampling.seed, self._turns))
        if self.worker.context_length is None:
            return sampling
        left = self.worker.context_length - prompt_tokens
        if left < 1:
            what = (
                f"the prompt has {prompt_tokens} tokens, the context length is "
                f"{self.worker.context_length}: no room for a reply"
            )
            raise RolloutFailed("policy", "context", what)
        limit = left if sampling.max_new_tokens is None else min(left, sampling.max_new_tokens)
        return replace(
            sampling, max_new_tokens=limit, min_new_tokens=min(limit, sampling.min_new_tokens)
        )
