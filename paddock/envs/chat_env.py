"""An Env for one conversation with tools and a score at the end."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from paddock.envs.tools import Tool, execute_tool_calls
from paddock.records import Message, Task, ToolSpec, Verdict

ToolsFactory = Callable[[], AbstractAsyncContextManager[Sequence[Tool]]]  # the tools of one rollout
ScoreFunc = Callable[[tuple[Message, ...]], Awaitable[Verdict]]


class ChatEnv:
    """Ends with the first reply without tool calls; `score` gets the whole conversation.

    `tools` need no setup; `tools_factory` opens tools for one rollout, closed with the environment.
    """

    def __init__(
        self,
        task: Task,
        score: ScoreFunc,
        *,
        tools: Sequence[Tool] = (),
        tools_factory: ToolsFactory | None = None,
    ) -> None:
        self.task = task
        self.messages = list(task.messages)
        self._score, self._tools, self._tools_factory = score, tuple(tools), tools_factory
        self._stack = AsyncExitStack()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools)

    async def reset(self) -> None:
        if self._tools_factory is not None:
            self._tools += tuple(await self._stack.enter_async_context(self._tools_factory()))

    async def step(self, reply: Message) -> tuple[Message, ...]:
        results = await execute_tool_calls(self._tools, reply)
        self.messages += [reply, *results]
        return results

    async def score(self) -> Verdict:
        return await self._score(tuple(self.messages))

    async def close(self) -> None:
        await self._stack.aclose()
