"""Python agents from the package index, unchanged; run by real_agents.py with another Python.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... PYTHON benchmarks/real_agents_python.py AGENT KIND

Imports nothing of this repository.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

ASK, RULES = "What is 1 and 2?", "Add numbers with the tool."


def openai_agents(kind: str, streamed: bool) -> Any:
    import agents

    model = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="Adder",
        instructions=RULES,
        tools=[agents.function_tool(add)],
        model=model[kind]("policy", agents.AsyncOpenAI()),
    )
    if not streamed:
        return agents.Runner.run_sync(agent, ASK, max_turns=30).final_output

    async def run() -> Any:
        result = agents.Runner.run_streamed(agent, ASK, max_turns=30)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def pydantic_ai(kind: str, streamed: bool) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
    agent = Agent(model[kind]("policy"), instructions=RULES, tools=[add])
    if not streamed:
        return agent.run_sync(ASK).output

    async def run() -> Any:
        async with agent.run_stream(ASK) as result:
            return await result.get_output()

    return asyncio.run(run())


def smolagents(kind: str, streamed: bool) -> Any:
    from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(
        "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = {"tools": ToolCallingAgent, "code": CodeAgent}[kind]
    return agent(tools=[tool(add)], model=model, max_steps=8, stream_outputs=streamed).run(ASK)


def mini_swe_agent(kind: str, streamed: bool) -> Any:  # noqa: ARG001
    import minisweagent
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    textual = kind == "litellm_textbased"
    file = "mini_textbased.yaml" if textual else "mini.yaml"
    own = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / file).read_text())
    for key in ("mode", "confirm_exit"):  # of the interactive agent
        own["agent"].pop(key, None)
    model = get_model("openai/policy", own["model"] | {"model_class": kind})
    agent = DefaultAgent(model, LocalEnvironment(), **own["agent"] | {"step_limit": 30})
    return agent.run("Say hi.")["exit_status"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


if __name__ == "__main__":
    agent, kind, *stream = sys.argv[1:]
    print(globals()[agent](kind, bool(stream)))
