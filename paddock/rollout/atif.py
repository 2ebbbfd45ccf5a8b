"""ATIF export ("ATIF-v1.8", Agent Trajectory Interchange Format) of a session.

Each branch is one trajectory. Turns shared with an earlier branch, and replies that this session
did not sample, are marked as copied context: they are not training data.
"""

from typing import Any

from paddock import __version__
from paddock.records import Message, ToolSpec
from paddock.rollout.session import Session
from paddock.rollout.session_tree import TurnNode

SCHEMA = "ATIF-v1.8"
AtifStep = dict[str, Any]


def to_atif(
    session: Session, branch: int, *, tokens: bool = True, model: str | None = None
) -> dict[str, Any]:
    """One branch. With `tokens` every sampled step has prompt ids (the whole prompt, as the format
    requires), completion ids and log-probabilities."""
    leaves = list(session.tree.leaves())
    path = leaves[branch].path()
    earlier = {node.number for leaf in leaves[:branch] for node in leaf.path()}
    steps: list[AtifStep] = []
    for node in path:
        new_messages, reply = node.messages()
        for message in new_messages:
            _add_message(steps, message)
        steps.append(_sampled_step(node, reply, copied=node.number in earlier, tokens=tokens))
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    agent: dict[str, Any] = {"name": "paddock", "version": __version__}
    if model is not None:
        agent["model_name"] = model
    if session.tools:
        agent["tool_definitions"] = [_tool_definition(tool) for tool in session.tools]
    return {
        "schema_version": SCHEMA,
        "session_id": session.id,
        "trajectory_id": f"{session.id}/{branch}",
        "agent": agent,
        "steps": [{"step_id": step.pop("step_id"), **step} for step in steps],
        "final_metrics": {
            "total_prompt_tokens": sum(node.tokens - len(node.ids) for node in path),
            "total_completion_tokens": sum(len(node.ids) for node in path),
            "total_steps": len(steps),
        },
    }


def _add_message(steps: list[AtifStep], message: Message) -> None:
    """Add a message that this session did not sample."""
    if message.role == "tool" and steps and steps[-1]["source"] == "agent":
        observation = steps[-1].setdefault("observation", {"results": []})
        result = {"source_call_id": message.tool_call_id, "content": message.content}
        observation["results"].append(result)
        return
    if message.role == "assistant":
        step = {"source": "agent", "message": message.content, "llm_call_count": 0}
        steps.append(step | _tool_calls(message) | {"is_copied_context": True})
        return
    source = "system" if message.role == "system" else "user"
    steps.append({"source": source, "message": message.content})


def _sampled_step(node: TurnNode, reply: Message, *, copied: bool, tokens: bool) -> AtifStep:
    metrics: dict[str, Any] = {
        "prompt_tokens": node.tokens - len(node.ids),
        "completion_tokens": len(node.ids),
    }
    if tokens:
        metrics["prompt_token_ids"] = node.token_ids()[: node.tokens - len(node.ids)].tolist()
        metrics["completion_token_ids"] = node.ids.tolist()
        metrics["logprobs"] = node.logprobs.tolist()
    step: AtifStep = {"source": "agent", "message": reply.content, "llm_call_count": 1}
    if reply.reasoning:
        step["reasoning_content"] = reply.reasoning
    step |= _tool_calls(reply)
    step["metrics"] = metrics
    step["extra"] = {
        "finish": node.finish,
        "weight_versions": [[segment.version, segment.tokens] for segment in node.versions],
        "forced_positions": list(node.forced),
    }
    if copied:
        step["is_copied_context"] = True
    return step


def _tool_calls(message: Message) -> AtifStep:
    if not message.tool_calls:
        return {}
    return {
        "tool_calls": [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": dict(call.arguments),
            }
            for call in message.tool_calls
        ]
    }


def _tool_definition(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }
