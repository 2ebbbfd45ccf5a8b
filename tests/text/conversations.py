"""Random conversations as clients send them, in every allowed shape."""

import json

WORDS = (
    *("", " ", "\n", "a", "pony", "don't", "12 C.", "x = {'a': 1}\n", "  indented", "trailing \n"),
    *("\u00e9", "e\u0301", "\u65e5\u672c\u8a9e", "\U0001f40e", "\U0001f469\u200d\U0001f680"),
    *("\u0645\u0631\u062d\u0628\u0627", "\x00", "\ufeff", "\u2028", '"quoted"', "\\n", "<b>", "{}"),
    *("<", "</", "think>", "| user |", "None", "null", "\ufffd", "\u00a0", "\t\r\n"),
)
MARKERS = (
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<think>"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "<tool_response>", "/nothink"),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather, \u00e9galement",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "near": {"type": ["number", "null"]},
                    "options": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "sure": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time."}},
    {"type": "function", "function": {"name": "ponies", "parameters": {"type": "object"}}},
]


def text(rng, words=WORDS, max_words=5):
    gap = rng.choice(["", " ", "\n"])
    return gap.join(rng.choices(words, k=rng.randint(0, max_words)))


def value(rng, words=WORDS, depth=0):
    """A JSON value, nested up to three levels."""
    kinds = ["text", "int", "float", "bool", "null"] + ["list", "dict"] * (depth < 3)
    match rng.choice(kinds):
        case "text":
            return text(rng, words)
        case "int":
            return rng.randint(-(10**12), 10**12)
        case "float":
            return rng.choice([0.5, -1e-7, 3e20, 2.0])
        case "bool":
            return rng.random() < 0.5
        case "null":
            return None
        case "list":
            return [value(rng, words, depth + 1) for _ in range(rng.randint(0, 3))]
        case _:
            keys = (text(rng, words, 2) for _ in range(rng.randint(0, 3)))
            return {key: value(rng, words, depth + 1) for key in keys}


def content(rng, words=WORDS):
    """Content as text, parts, null, or missing."""
    body = text(rng, words)
    match rng.randrange(6):
        case 0:
            parts = [{"type": "text", "text": text(rng, words)} for _ in range(2)]
            return {"content": [*parts, body]}
        case 1:
            return {"content": None}
        case 2:
            return {}
        case _:
            return {"content": body}


def reply(rng, number, words=WORDS):
    message = {"role": "assistant", **content(rng, words)}
    match rng.randrange(5):
        case 0:
            message["reasoning_content"] = text(rng, words)
        case 1 | 2:
            message["reasoning_content"] = f"Hm. {text(rng, words)}"
        case 3 if isinstance(message.get("content"), str) and rng.random() < 0.5:
            opener = rng.choice(["<think>", "\n<think>\n", ""])
            thought = text(rng, [word for word in words if "think>" not in word])
            message["content"] = f"{opener}{thought}</think>{message['content']}"
    calls = []
    for n in range(rng.choice([0, 0, 1, 1, 2, 3])):
        keys = ["city", "days", "options", "tags", "\u00fcber", "a b"]
        given = {key: value(rng, words) for key in rng.sample(keys, rng.randint(0, 3))}
        as_text = rng.random() < 0.5
        function = {
            "name": rng.choice(["get_weather", "now", "ponies"]),
            "arguments": json.dumps(given, ensure_ascii=rng.random() < 0.5) if as_text else given,
        }
        calls.append({"id": f"call_{number}_{n}", "type": "function", "function": function})
    if calls or rng.random() < 0.1:
        message["tool_calls"] = calls or None
    return message


def conversation(rng, words=WORDS):
    """Messages in OpenAI's format, with or without tools."""
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", **content(rng, words)})
    for number in range(rng.randint(1, 5)):
        if rng.random() < 0.7 or not number:
            messages.append({"role": "user", **content(rng, words)})
        if rng.random() < 0.05:
            messages.append({"role": "system", **content(rng, words)})
        if rng.random() < 0.9:
            messages.append(reply(rng, number, words))
            calls = messages[-1].get("tool_calls") or []
            results = [
                {"role": "tool", "tool_call_id": call["id"], **content(rng, words)}
                for call in calls
                if rng.random() < 0.95
            ]
            rng.shuffle(results)
            messages += results
    tools = rng.sample(TOOLS, rng.randint(1, 3)) if rng.random() < 0.6 else None
    return messages, tools


def without_null(messages):
    """With empty strings for null content, which published templates would render as a word."""
    return [{**m, "content": "" if m.get("content") is None else m["content"]} for m in messages]
