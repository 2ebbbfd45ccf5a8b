"""Required tool calls through real clients; run by tool_choice.py, possibly by another Python.

    PYTHON benchmarks/tool_choice_clients.py URL CASES.json

Prints a JSON object: for each client its version (null: not installed), the number of requests and
of parsed replies, and the first error. Imports nothing of this repository.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

MESSAGES = [{"role": "user", "content": "Say hello."}]
Case = dict[str, Any]
PLAIN = {"string": str, "integer": int, "number": float, "boolean": bool}
LIMITS = {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"}
LIMITS |= {"minimum": "ge", "maximum": "le"}


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
        messages=MESSAGES,
        tools=[_function(case)],
        tool_choice="required",
        max_tokens=case["max_tokens"],
        extra_body=_extra(case),
    ).choices[0]
    assert done.finish_reason == "tool_calls", done.finish_reason
    return json.loads(done.message.tool_calls[0].function.arguments)


def _anthropic(url: str, case: Case) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    done = client.messages.create(
        model="tiny",
        messages=MESSAGES,
        tools=[{"name": "look", "input_schema": case["schema"]}],
        tool_choice={"type": "any"},
        max_tokens=case["max_tokens"],
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
        messages=MESSAGES,
        tools=[_function(case)],
        tool_choice="required",
        max_tokens=case["max_tokens"],
        extra_body=_extra(case),
    ).choices[0]
    assert done.finish_reason == "tool_calls", done.finish_reason
    return json.loads(done.message.tool_calls[0].function.arguments)


def _instructor(url: str, case: Case) -> Any:
    import instructor
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_model=_model(case["schema"]),
        max_retries=0,
        max_tokens=case["max_tokens"],
        extra_body=_extra(case),
    )


def _pydantic_ai(url: str, case: Case) -> Any:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    output = ToolOutput(_model(case["schema"]), name="look")
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="x")
    agent = Agent(OpenAIChatModel("tiny", provider=provider), output_type=output, retries=0)
    settings = {"max_tokens": case["max_tokens"], "extra_body": _extra(case)}
    asyncio.run(agent.run("Say hello.", model_settings=settings))


def _mini(url: str, case: Case) -> None:
    """Three turns, each with a call and its result."""
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
    from minisweagent.models.litellm_model import LitellmModel

    kwargs = {"api_base": f"{url}/v1", "api_key": "x", "tool_choice": "required"}
    kwargs |= {"max_tokens": 64, "extra_body": _extra(case)}
    model = LitellmModel(
        model_name="openai/tiny", cost_tracking="ignore_errors", model_kwargs=kwargs
    )
    messages: list[dict[str, Any]] = list(MESSAGES)
    done = {"output": "done", "returncode": 0, "exception_info": ""}
    for _ in range(3):
        message = model.query(messages)
        results = [done] * len(message["extra"]["actions"])
        messages += [message, *model.format_observation_messages(message, results)]


def _model(schema: Case) -> Any:
    """The schema as a pydantic model, for clients that accept nothing else."""
    # A recursive model has no top-level "properties", which some clients require.
    properties = {key: part for key, part in schema["properties"].items() if key != "children"}
    return _object("look", schema | {"properties": properties}, schema["$defs"])


def _object(name: str, schema: Case, defs: Case) -> Any:
    from pydantic import Field, create_model

    fields: dict[str, Any] = {}
    for i, (key, part) in enumerate(schema["properties"].items()):
        kind, limits = _type(f"{name}_{i}", part, defs)
        if key in schema["required"]:
            fields[f"f{i}"] = (kind, Field(alias=key, **limits))
        else:
            fields[f"f{i}"] = (kind | None, Field(default=None, alias=key, **limits))
    return create_model(name, **fields)


def _type(name: str, schema: Case, defs: Case) -> tuple[Any, dict[str, Any]]:
    """A type, and the constraints of a field of that type."""
    from pydantic import Field

    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        return _type(f"{name}_{target}", defs[target], defs)
    if "enum" in schema or "const" in schema:
        return Literal[tuple(schema.get("enum") or [schema["const"]])], {}
    match schema.get("type"):
        case "object":
            return _object(name, schema, defs), {}
        case "array":
            kind, limits = _type(name, schema["items"], defs)
            return list[Annotated[kind, Field(**limits)]], {"min_length": schema["minItems"]}
        case None | list():
            return (str if "anyOf" in schema else int) | None, {}
        case kind:
            limits = {ours: schema[theirs] for theirs, ours in LIMITS.items() if theirs in schema}
            return PLAIN[kind], limits


CLIENTS: dict[str, Callable[[str, Case], Any]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "litellm": _litellm,
    "instructor": _instructor,
    "pydantic-ai": _pydantic_ai,
    "mini-swe-agent": _mini,
}


def main() -> None:
    url, cases = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, call in CLIENTS.items():
        package = "pydantic-ai-slim" if name == "pydantic-ai" else name
        try:
            found[name] = {"version": version(package), "parsed": 0, "requests": 0, "error": ""}
        except PackageNotFoundError:
            found[name] = {"version": None}
            continue
        for case in cases:
            found[name]["requests"] += 1
            try:
                arguments = call(url, case)
                if arguments is not None:
                    _validate(case["schema"], arguments)
                found[name]["parsed"] += 1
            except Exception as error:
                message = f"seed {case['seed']}: {type(error).__name__}: {error}"[:300]
                found[name]["error"] = found[name]["error"] or message
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
