"""Dialogue files: JSON Lines in the OpenAI or the ShareGPT format.

    {"messages": [{"role": "user", "content": "Hi"},
                  {"role": "assistant", "reasoning_content": "Hm.", "content": "Hello.",
                   "tool_calls": [{"function": {"name": "look", "arguments": "{\\"far\\": 2}"}}],
                   "untrained": [{"part": "reasoning", "start": 0, "end": 3}]}],
     "tools": [...], "thinking": "preserved", "weight": 0.5, "id": "...", "source": "..."}

`"untrained": true` on a message (or OpenAI's `"weight": 0`) excludes the whole reply from the loss.
A leading <think>...</think> in the content becomes the reasoning. Unknown keys are ignored, since
data files often carry notes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from paddock.data.sources import DECOMPRESSION_ERRORS, DataError, open_lines
from paddock.records import Dialogue, LossMaskSpan, Message, ThinkingMode, json_codec
from paddock.text import message_to_openai, parse_messages, tool_to_openai
from paddock.text import messages as text_messages

Format = Literal["openai", "sharegpt"]

_OPEN, _CLOSE = "<think>", "</think>"
_SHAREGPT: dict[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def read_dialogues(file: Path, *, thinking: ThinkingMode = "interleaved") -> Iterator[Dialogue]:
    """Read the dialogues of a JSONL file (.gz or not), each line in either format.

    `thinking` applies to dialogues that do not name a mode. DataError names file, line and field.
    """
    with open_lines(file) as lines:
        for number, line in enumerate(_checked_lines(lines, file), 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                yield parse_dialogue(_object(line), where=where, thinking=thinking)
            except (text_messages.MessageError, json_codec.RecordDecodeError) as error:
                raise DataError(f"{where}: {error}") from None
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None


def parse_dialogue(
    raw: Mapping[str, Any], *, where: str = "", thinking: ThinkingMode = "interleaved"
) -> Dialogue:
    """Parse one line. The ValueError for a bad line begins with the name of the bad field.

    >>> question = {"from": "human", "value": "Hi"}
    >>> reply = {"from": "gpt", "value": "<think>Hm.</think>Hello."}
    >>> parse_dialogue({"conversations": [question, reply]}).messages[1].reasoning
    'Hm.'
    >>> parse_dialogue({"prompt": "Hi"})
    Traceback (most recent call last):
    ValueError: expected a list 'messages' (OpenAI) or 'conversations' (ShareGPT)
    """
    if isinstance(raw.get("messages"), list):
        entries = raw["messages"]
    elif isinstance(raw.get("conversations"), list):
        entries = [
            _from_sharegpt(raw["conversations"], i) for i in range(len(raw["conversations"]))
        ]
        if isinstance(raw.get("system"), str) and raw["system"]:
            entries = [{"role": "system", "content": raw["system"]}, *entries]
    else:
        raise ValueError("expected a list 'messages' (OpenAI) or 'conversations' (ShareGPT)")
    messages: list[Message] = []
    untrained: list[LossMaskSpan] = []
    for i, (message, entry) in enumerate(zip(parse_messages(entries), entries, strict=True)):
        moved, removed = _move_leading_thought(message)
        messages.append(moved)
        untrained += _parse_untrained(entry, i, removed)
    return Dialogue(
        messages=tuple(messages),
        tools=text_messages.parse_tools(_tools(raw.get("tools"))),
        thinking=_thinking(raw, thinking),
        untrained=tuple(untrained),
        weight=_weight(raw.get("weight", 1.0)),
        id=str(raw.get("id") or where),
        source=str(raw.get("source") or ""),
    )


def dialogue_to_json(dialogue: Dialogue) -> dict[str, Any]:
    """The dialogue in the OpenAI format that `parse_dialogue` reads."""
    marks: dict[int, list[LossMaskSpan]] = {}
    for span in dialogue.untrained:
        marks.setdefault(span.message, []).append(span)
    found: dict[str, Any] = {
        "messages": [message_to_openai(m) for m in dialogue.messages],
        "thinking": dialogue.thinking,
        "weight": dialogue.weight,
        "id": dialogue.id,
        "source": dialogue.source,
    }
    for i, spans in marks.items():
        found["messages"][i]["untrained"] = [
            {"part": span.part, "start": span.start, "end": span.end} for span in spans
        ]
    if dialogue.tools:
        found["tools"] = [tool_to_openai(tool) for tool in dialogue.tools]
    return found


def _checked_lines(lines: Iterable[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except DECOMPRESSION_ERRORS as error:
        raise DataError(f"{file}: truncated or damaged: {error}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r:.80}")
    return found


def _from_sharegpt(entries: list[Any], i: int) -> dict[str, Any]:
    entry, path = entries[i], f"conversations[{i}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: expected an object, got {entry!r:.80}")
    role = _SHAREGPT.get(str(entry.get("from")))
    if role is None:
        roles = ", ".join(_SHAREGPT)
        raise ValueError(f"{path}.from must be one of {roles}, got {entry.get('from')!r}")
    if not isinstance(entry.get("value"), str):
        raise ValueError(f"{path}.value: expected a string, got {entry.get('value')!r:.80}")
    extra = {name: entry[name] for name in ("untrained", "weight") if name in entry}
    if entry["from"] not in ("function_call", "tool_call"):
        return {"role": role, "content": entry["value"], **extra}
    thought, call = _split_thought(entry["value"])
    try:
        calls = json.loads(call)
    except ValueError as error:
        raise ValueError(f"{path}.value: a call must be JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, "content": "", "reasoning": thought, "tool_calls": calls, **extra}


def _tools(raw: object) -> Any:
    """Tools as a list; ShareGPT stores them as a JSON string."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw) if raw.strip() else []
        except ValueError as error:
            raise ValueError(f"tools: not valid JSON: {error}") from None
    if raw is not None and not isinstance(raw, list):
        raise ValueError(f"tools: expected a list, got {raw!r:.80}")
    return raw


def _split_thought(text: str) -> tuple[str | None, str]:
    head, closed, rest = text.partition(_CLOSE)
    if not closed or not head.lstrip().startswith(_OPEN):
        return None, text
    return head.lstrip().removeprefix(_OPEN).strip(), rest.lstrip("\n")


def _move_leading_thought(message: Message) -> tuple[Message, int]:
    """Move a leading <think> block from the content to the reasoning.

    Returns the message and the number of characters removed from the front of the content.
    """
    if message.role != "assistant" or message.reasoning is not None:
        return message, 0
    thought, content = _split_thought(message.content)
    if thought is None:
        return message, 0
    moved = Message(
        role="assistant", content=content, reasoning=thought, tool_calls=message.tool_calls
    )
    return moved, len(message.content) - len(content)


def _parse_untrained(entry: Mapping[str, Any], i: int, removed: int) -> Iterator[LossMaskSpan]:
    path = f"messages[{i}].untrained"
    given = entry.get("untrained")
    if given is True or (entry.get("role") == "assistant" and entry.get("weight") == 0):
        yield LossMaskSpan(message=i)
        return
    if given in (None, False):
        return
    if not isinstance(given, list):
        raise ValueError(f"{path}: expected true or a list of spans, got {given!r:.80}")
    for j, span in enumerate(given):
        if not isinstance(span, dict):
            raise ValueError(f"{path}[{j}]: expected an object, got {span!r:.80}")
        try:
            found = json_codec.decode(LossMaskSpan, {"message": i, **span})
        except json_codec.RecordDecodeError as error:
            raise ValueError(f"{path}[{j}]: {error}") from None
        if removed and found.part == "content":
            raise ValueError(
                f"{path}[{j}]: the content begins with <think>, so offsets into it are ambiguous; "
                "give the reasoning as reasoning_content"
            )
        yield found


def _thinking(raw: Mapping[str, Any], default: ThinkingMode) -> Any:
    given = raw.get("thinking")
    return default if given is None else given


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"weight: expected a number, got {value!r:.80}")
    return float(value)
