"""An Env for one conversation with tools and a score at the end."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from paddock.envs.tools import Tool, execute_tool_calls
from paddock.records import Message, Task, ToolSpec, Verdict

ScoreFunc = Callable[[tuple[Message, ...]], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class ToolsFactory:
    """Tools that need setup: `open` gives those of one rollout."""

    specs: tuple[ToolSpec, ...]
    open: Callable[[], AbstractAsyncContextManager[Sequence[Tool]]]


class ChatEnv:
    """Ends with the first reply without tool calls; `score` gets the whole conversation.

    `tools` need no setup; those of `factories` are opened by `reset`, closed with the environment.
    """

    def __init__(
        self,
        task: Task,
        score: ScoreFunc,
        *,
        tools: Sequence[Tool] = (),
        factories: Sequence[ToolsFactory] = (),
    ) -> None:
        self.task = task
        self.messages = list(task.messages)
        self._score, self._tools, self._factories = score, tuple(tools), factories
        factory_specs = (spec for factory in factories for spec in factory.specs)
        self._specs = (*(tool.spec for tool in tools), *factory_specs)
        self._stack = AsyncExitStack()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._specs

    async def reset(self) -> None:
        for factory in self._factories:
            self._tools += tuple(await self._stack.enter_async_context(factory.open()))

    async def step(self, reply: Message) -> tuple[Message, ...]:
        results = await execute_tool_calls(self._tools, reply)
        self.messages += [reply, *results]
        return results

    async def score(self) -> Verdict:
        return await self._score(tuple(self.messages))

    async def close(self) -> None:
        await self._stack.aclose()
