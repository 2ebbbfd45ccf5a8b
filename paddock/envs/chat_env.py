"""An environment that is a conversation: replies, tools that answer them, a grade at the end."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from paddock.envs.tools import Tool, execute_tool_calls
from paddock.records import Message, Task, ToolSpec, Verdict

ToolsFactory = Callable[[], AbstractAsyncContextManager[Sequence[Tool]]]  # the tools of one attempt
ScoreFunc = Callable[[tuple[Message, ...]], Awaitable[Verdict]]


class ChatEnv:
    """One attempt in which the first reply that calls no tool is the last. `grade` gets the whole
    conversation. What `lend` opens is closed with the environment; a world whose tools need no
    set-up gives them as `tools`."""

    def __init__(
        self,
        task: Task,
        grade: ScoreFunc,
        *,
        tools: Sequence[Tool] = (),
        lend: ToolsFactory | None = None,
    ) -> None:
        self.task = task
        self.messages = list(task.messages)
        self._grade, self._tools, self._lend = grade, tuple(tools), lend
        self._open = AsyncExitStack()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools)

    async def reset(self) -> None:
        if self._lend is not None:
            self._tools += tuple(await self._open.enter_async_context(self._lend()))

    async def step(self, reply: Message) -> tuple[Message, ...]:
        answers = await execute_tool_calls(self._tools, reply)
        self.messages += [reply, *answers]
        return answers

    async def score(self) -> Verdict:
        return await self._grade(tuple(self.messages))

    async def close(self) -> None:
        await self._open.aclose()
