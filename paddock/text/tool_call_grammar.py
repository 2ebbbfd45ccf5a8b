"""A grammar for exactly one tool call, as a structural tag of xgrammar.

Markers stand in it as tokens. A call is written as the parser (parse.py) reads it: GLM's arguments
one by one, those that can only be strings as plain text and all others as JSON; or, where the
vocabulary lacks GLM's markers, one JSON object as Qwen's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paddock.records import Grammar, ToolSpec
from paddock.text.special_tokens import SpecialToken, SpecialTokenIds
from paddock.text.tokenizer import Tokenizer
from paddock.text.tool_arguments import allowed_json_types, coerce_argument

_ARGUMENT = (
    *(SpecialToken.ARG_KEY_OPEN, SpecialToken.ARG_KEY_CLOSE),
    *(SpecialToken.ARG_VALUE_OPEN, SpecialToken.ARG_VALUE_CLOSE),
)
_LEVELS = 16  # of schemas that stand for others
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"  # of an argument that the schema does not name
# Text that the parser takes for text where it could be something else: no JSON, no literal.
_WORDS = r"[A-EGHJ-MO-SU-Za-eg-mo-ru-z][\s\S]*"
_DAY = r"[0-9]{3}[1-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_FORMATS = {
    "date": _DAY,
    "time": _TIME + "Z",
    "date-time": f"{_DAY}T{_TIME}Z",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "email": r"[a-z0-9]{1,30}@[a-z0-9]{1,30}\.(com|org|net)",
    "ipv4": r"(1[0-9]{2}|[1-9]?[0-9])(\.(1[0-9]{2}|[1-9]?[0-9])){3}",
}

StructuralTagFormat = dict[str, Any]
Schema = Mapping[str, Any]


def tool_call_grammar(tokenizer: Tokenizer, tools: Sequence[ToolSpec]) -> Grammar | None:
    """For a reply that is one call of one of `tools`, to its closing marker; None where calls have
    no markers."""
    specials = tokenizer.special_token_ids
    if SpecialToken.TOOL_CALL_OPEN not in specials or SpecialToken.TOOL_CALL_CLOSE not in specials:
        return None
    form = _glm_call if all(marker in specials for marker in _ARGUMENT) else _json_call
    # Where every text begins with a blank, the one behind a marker is not part of it.
    first = tokenizer.id_to_token(tokenizer.encode("a", specials=False)[0]) or ""
    blank = " " if first.startswith("\u2581") else ""
    calls = [form(specials, tool, blank) for tool in tools]
    begin, end = (
        _token(specials, m) for m in (SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE)
    )
    whole = _row(begin, _either(calls), end)
    tag = {"type": "structural_tag", "format": whole}
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False), must_complete=True)


def _json_call(_: SpecialTokenIds, tool: ToolSpec, blank: str) -> StructuralTagFormat:
    name = json.dumps(tool.name, ensure_ascii=False)
    schema = {"type": "object"} | dict(tool.parameters)
    return _row(_const(f'{blank}\n{{"name": {name}, "arguments": '), _json(schema), _const("}\n"))


def _glm_call(specials: SpecialTokenIds, tool: ToolSpec, blank: str) -> StructuralTagFormat:
    root = tool.parameters
    top = _plain(root, root)
    required = set(top.get("required") or ())
    properties = top.get("properties") or {}
    parts = [_const(blank + tool.name)]
    for key, schema in properties.items():
        value = _behind(blank, _value(root, key, schema))
        part = _argument(specials, _const(blank + key), value)
        parts.append(part if key in required else {"type": "optional", "content": part})
    more = top.get("additionalProperties", not properties)
    if not properties and more is not False:
        value = _behind(blank, _value(root, "", more))
        name = _behind(blank, {"type": "regex", "pattern": _KEY})
        parts.append({"type": "star", "content": _argument(specials, name, value)})
    return _row(*parts)


def _behind(blank: str, value: StructuralTagFormat) -> StructuralTagFormat:
    return value if not blank or value == _ANY else _row(_const(blank), value)


def _argument(
    specials: SpecialTokenIds, key: StructuralTagFormat, value: StructuralTagFormat
) -> StructuralTagFormat:
    key_open, key_close, value_open, value_close = (_token(specials, m) for m in _ARGUMENT)
    return _row(key_open, key, key_close, value_open, value, value_close)


def _value(root: Schema, key: str, schema: object) -> StructuralTagFormat:
    """One argument's value, so that the parser reads a value of the schema."""
    kinds = allowed_json_types(root, key)
    texts, others = _parted(schema, root, _LEVELS)
    if not kinds and (others or not _is_free(schema)):
        return _json(_rooted(schema, root))  # of whatever type JSON says
    if not others:
        return _either(texts or [_ANY])
    safe = [option for text in texts if (option := _told_apart(text, kinds))]
    return _either([*safe, *(_json(_rooted(other, root)) for other in others)])


def _parted(
    schema: object, root: Schema, levels: int
) -> tuple[list[StructuralTagFormat], list[Schema]]:
    """What of a schema is text, and the schemas of the rest."""
    plain = _plain(schema, root)
    options = plain.get("anyOf") or plain.get("oneOf")
    if options and levels:
        both = [_parted(option, root, levels - 1) for option in options]
        return [t for texts, _ in both for t in texts], [o for _, others in both for o in others]
    if "const" in plain or "enum" in plain:
        values = [plain["const"]] if "const" in plain else plain["enum"]
        texts = [_const(value) for value in values if isinstance(value, str)]
        rest = [value for value in values if not isinstance(value, str)]
        return texts, [{"enum": rest}] if rest else []
    said = plain.get("type")
    kinds = list(said) if isinstance(said, list) else [said] if said else []
    rest = [kind for kind in kinds if kind != "string"]
    if not kinds:
        return ([_ANY], []) if _is_free(plain) else ([], [plain])
    return (
        [_text(plain)] if "string" in kinds else [],
        [{**plain, "type": rest if len(rest) > 1 else rest[0]}] if rest else [],
    )


def _text(schema: Schema) -> StructuralTagFormat:
    """A string without quotes."""
    pattern, form = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        return {"type": "regex", "pattern": pattern}
    if isinstance(form, str) and form in _FORMATS:
        return {"type": "regex", "pattern": _FORMATS[form]}
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least or most is not None:
        count = f"{least or 0},{'' if most is None else most}"
        return {"type": "regex", "pattern": r"[\s\S]{" + count + "}"}
    return _ANY


def _told_apart(text: StructuralTagFormat, kinds: frozenset[str]) -> StructuralTagFormat | None:
    """The text where a value of another type may stand too: only what stays text."""
    if text == _ANY:
        return {"type": "regex", "pattern": _WORDS}
    if text["type"] == "const_string" and coerce_argument(text["value"], kinds) != (
        text["value"],
        True,
    ):
        return None
    return text


def _plain(schema: object, root: Schema) -> Schema:
    """The schema that this one stands for, with what `allOf` adds."""
    for _ in range(_LEVELS):
        if not isinstance(schema, Mapping):
            return {}
        reference, every = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            found = _referred(reference, root)
            schema = {**found, **rest} if isinstance(found, Mapping) else {}
        elif isinstance(every, list):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            for each in every:
                rest = dict(_joined(rest, _plain(each, root)))
            schema = rest
        else:
            return schema
    return {}


def _joined(one: Schema, other: Schema) -> Schema:
    found = {**one, **other}
    if "properties" in one and "properties" in other:
        found["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        found["required"] = [*one["required"], *other["required"]]
    return found


def _referred(reference: str, root: Schema) -> object:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_free(schema: object) -> bool:
    """Whether anything goes."""
    says = {"title", "description", "default", "examples", "deprecated", "$comment"}
    return not isinstance(schema, Mapping) or schema.keys() <= says


def _rooted(schema: object, root: Schema) -> Schema:
    """A part of `root`, with what it refers to."""
    if not isinstance(schema, Mapping):
        return {}
    moved = _moved(schema)
    if '"$ref"' not in json.dumps(moved):
        return dict(moved)
    return {**moved, "$defs": {"root": _moved(root)}}


def _moved(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(each) for each in schema] if isinstance(schema, list) else schema


_ANY: StructuralTagFormat = {"type": "any_text"}


def _const(text: str) -> StructuralTagFormat:
    return {"type": "const_string", "value": text} if text else _row()


def _json(schema: Schema) -> StructuralTagFormat:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _token(specials: SpecialTokenIds, marker: SpecialToken) -> StructuralTagFormat:
    return {"type": "token", "token": specials[marker]}


def _row(*elements: StructuralTagFormat) -> StructuralTagFormat:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _either(options: Sequence[StructuralTagFormat]) -> StructuralTagFormat:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}
