"""Required tool calls through real clients: run by tool_choice.py, perhaps with another Python.

    PYTHON benchmarks/tool_choice_clients.py URL CASES.json

Prints a JSON object: of each client, how many replies its parser took, of how many, and the first
complaint; or why it was not run. Needs nothing of this repository.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ASK = [{"role": "user", "content": "Say hello."}]
Case = dict[str, Any]


def _extra(case: Case) -> dict[str, Any]:
    thinks = {"enable_thinking": case["thinks"]}
    return {"chat_template_kwargs": thinks, "seed": case["seed"], "temperature": 50.0}


def _function(case: Case) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": case["schema"]}}


def _openai(url: str, case: Case) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[_function(case)],
        tool_choice="required",
        max_tokens=case["most"],
        extra_body=_extra(case),
    ).choices[0]
    assert done.finish_reason == "tool_calls", done.finish_reason
    return json.loads(done.message.tool_calls[0].function.arguments)


def _anthropic(url: str, case: Case) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    done = client.messages.create(
        model="tiny",
        messages=ASK,
        tools=[{"name": "look", "input_schema": case["schema"]}],
        tool_choice={"type": "any"},
        max_tokens=case["most"],
        extra_body={"temperature": 50.0},
        thinking={"type": "enabled", "budget_tokens": 1024}
        if case["thinks"]
        else {"type": "disabled"},
    )
    assert done.stop_reason == "tool_use", done.stop_reason
    return next(block.input for block in done.content if block.type == "tool_use")


def _litellm(url: str, case: Case) -> Any:
    import litellm

    done = litellm.completion(
        model="openai/tiny",
        api_base=f"{url}/v1",
        api_key="x",
        messages=ASK,
        tools=[_function(case)],
        tool_choice="required",
        max_tokens=case["most"],
        extra_body=_extra(case),
    ).choices[0]
    assert done.finish_reason == "tool_calls", done.finish_reason
    return json.loads(done.message.tool_calls[0].function.arguments)


def _instructor(url: str, case: Case) -> Any:
    import instructor
    import openai
    from pydantic import create_model

    model = create_model("look", city=(str, ...), days=(int, ...), note=(str | None, None))
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    client.chat.completions.create(
        model="tiny",
        messages=ASK,
        response_model=model,
        max_retries=0,
        max_tokens=64,
        extra_body=_extra(case),
    )


def _pydantic_ai(url: str, case: Case) -> Any:
    from pydantic import create_model
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    output = create_model("Look", city=(str, ...), days=(list[int], ...))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="x")
    agent = Agent(OpenAIChatModel("tiny", provider=provider), output_type=output, retries=0)
    settings = {"max_tokens": 64, "extra_body": _extra(case)}
    asyncio.run(agent.run("Say hello.", model_settings=settings))


CLIENTS: dict[str, Callable[[str, Case], Any]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "litellm": _litellm,
    "instructor": _instructor,
    "pydantic-ai": _pydantic_ai,
}


def main() -> None:
    url, cases = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, ask in CLIENTS.items():
        package = "pydantic-ai-slim" if name == "pydantic-ai" else name
        try:
            found[name] = {"version": version(package), "taken": 0, "asked": 0, "complaint": ""}
        except PackageNotFoundError:
            found[name] = {"version": None}
            continue
        for case in cases:
            found[name]["asked"] += 1
            try:
                arguments = ask(url, case)
                if arguments is not None:
                    _validate(case["schema"], arguments)
                found[name]["taken"] += 1
            except Exception as error:
                complaint = f"seed {case['seed']}: {type(error).__name__}: {error}"[:300]
                found[name]["complaint"] = found[name]["complaint"] or complaint
    print(json.dumps(found))


def _validate(schema: dict[str, Any], arguments: Any) -> None:
    try:
        import jsonschema_rs
    except ImportError:
        import jsonschema

        jsonschema.validate(arguments, schema)
    else:
        jsonschema_rs.validate(schema, arguments)


if __name__ == "__main__":
    main()
