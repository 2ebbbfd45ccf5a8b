"""Random JSON schemas of tools, and the smallest call that satisfies one."""

import json
import random
from typing import Any

from paddock.records import ToolCall
from paddock.text import SpecialToken, Tokenizer

WORDS = ("city", "days", "größe", "цена", "名前", "is_on", "level", "note", "emoji_😀", "a-b")


def random_schema(rng: random.Random, levels: int = 3) -> dict[str, Any]:
    """An object with nested objects, arrays, enums, unicode keys, unions and `$ref`."""
    defs = {"Place": _object(rng, 1), "Colour": {"enum": ["red", "grün", "青"]}}
    schema = _object(rng, levels)
    names = [key for key in rng.sample(WORDS, 2) if key not in schema["properties"]]
    for key in names:
        schema["properties"][key] = {"$ref": f"#/$defs/{rng.choice(list(defs))}"}
    if rng.random() < 0.3:
        schema["properties"]["children"] = {"type": "array", "items": {"$ref": "#"}}
    schema["required"] += names[:1]
    return {**schema, "$defs": defs}


def _object(rng: random.Random, levels: int) -> dict[str, Any]:
    keys = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: _any(rng, levels - 1) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _any(rng: random.Random, levels: int) -> dict[str, Any]:
    flat = (
        lambda: {"type": "string"},
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": 9},
        lambda: {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
        lambda: {"type": "integer"},
        lambda: {"type": "integer", "minimum": 3, "maximum": 40},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"enum": ["north", "süd", 7, None]},
        lambda: {"const": "x y"},
        lambda: {"anyOf": [{"type": "string"}, {"type": "null"}]},
        lambda: {"type": ["integer", "null"]},
    )
    deep = (
        lambda: _object(rng, levels),
        lambda: {"type": "array", "items": _any(rng, levels - 1), "minItems": rng.randint(0, 2)},
    )
    return rng.choice(flat + deep if levels > 0 else flat)()


def smallest(tokenizer: Tokenizer, name: str, schema: dict[str, Any]) -> int:
    """Tokens of a small call, its required arguments alone, as the chat template writes it."""
    call = ToolCall(id="a", name=name, arguments=instance(schema, schema))
    specials, count = tokenizer.special_token_ids, 2 + len(tokenizer.encode(name, specials=False))
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        count += 4 * (SpecialToken.ARG_KEY_OPEN in specials)
        count += len(tokenizer.encode(key, specials=False))
        count += len(tokenizer.encode(text, specials=False))
    return count


def instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A small value of a schema that `random_schema` made."""
    if "$ref" in schema:
        path = schema["$ref"].removeprefix("#").split("/")[1:]
        found: Any = root
        for step in path:
            found = found[step]
        return instance(found, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return min(schema["enum"], key=lambda value: len(json.dumps(value)))
    if "anyOf" in schema:
        return None
    match schema["type"]:
        case "object":
            return {key: instance(schema["properties"][key], root) for key in schema["required"]}
        case "array":
            return [instance(schema["items"], root)] * schema.get("minItems", 0)
        case "string":
            return "aa-0" if "pattern" in schema else "a" * schema.get("minLength", 0)
        case "boolean":
            return True
    return schema.get("minimum", 0) if isinstance(schema["type"], str) else 0
