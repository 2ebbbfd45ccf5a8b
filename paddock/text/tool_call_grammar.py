"""Grammar that allows exactly one tool call, as an xgrammar structural tag.

Special tokens are matched as tokens. A call has the form that completion_parser.py reads: GLM's
arguments one by one, string-only arguments as plain text and all others as JSON; or, if the
vocabulary lacks GLM's special tokens, one JSON object as in Qwen.
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
_MAX_DEPTH = 16  # of nested references
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"  # name of an argument that is not in the schema
# Text that cannot be parsed as JSON or a Python literal, so it stays a string.
_PLAIN_TEXT = r"[A-EGHJ-MO-SU-Za-eg-mo-ru-z][\s\S]*"
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
    """The grammar of a completion that is one call of one of `tools`, up to its closing token; None
    if the vocabulary has no tool-call tokens."""
    specials = tokenizer.special_token_ids
    if SpecialToken.TOOL_CALL_OPEN not in specials or SpecialToken.TOOL_CALL_CLOSE not in specials:
        return None
    make_call = _glm_call if all(marker in specials for marker in _ARGUMENT) else _json_call
    # With a space-prefixing tokenizer the space after a special token is not part of the text.
    first = tokenizer.id_to_token(tokenizer.encode("a", specials=False)[0]) or ""
    blank = " " if first.startswith("\u2581") else ""
    calls = [make_call(specials, tool, blank) for tool in tools]
    begin, end = (
        _token(specials, m) for m in (SpecialToken.TOOL_CALL_OPEN, SpecialToken.TOOL_CALL_CLOSE)
    )
    whole = _sequence(begin, _any_of(calls), end)
    tag = {"type": "structural_tag", "format": whole}
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False), must_complete=True)


def _json_call(_: SpecialTokenIds, tool: ToolSpec, blank: str) -> StructuralTagFormat:
    name = json.dumps(tool.name, ensure_ascii=False)
    schema = {"type": "object"} | dict(tool.parameters)
    return _sequence(
        _const(f'{blank}\n{{"name": {name}, "arguments": '), _json(schema), _const("}\n")
    )


def _glm_call(specials: SpecialTokenIds, tool: ToolSpec, blank: str) -> StructuralTagFormat:
    root = tool.parameters
    top = _resolve(root, root)
    required = set(top.get("required") or ())
    properties = top.get("properties") or {}
    parts = [_const(blank + tool.name)]
    for key, schema in properties.items():
        value = _after_blank(blank, _value(root, key, schema))
        part = _argument(specials, _const(blank + key), value)
        parts.append(part if key in required else {"type": "optional", "content": part})
    more = top.get("additionalProperties", not properties)
    if not properties and more is not False:
        value = _after_blank(blank, _value(root, "", more))
        name = _after_blank(blank, {"type": "regex", "pattern": _KEY})
        parts.append({"type": "star", "content": _argument(specials, name, value)})
    return _sequence(*parts)


def _after_blank(blank: str, value: StructuralTagFormat) -> StructuralTagFormat:
    return value if not blank or value == _ANY else _sequence(_const(blank), value)


def _argument(
    specials: SpecialTokenIds, key: StructuralTagFormat, value: StructuralTagFormat
) -> StructuralTagFormat:
    key_open, key_close, value_open, value_close = (_token(specials, m) for m in _ARGUMENT)
    return _sequence(key_open, key, key_close, value_open, value, value_close)


def _value(root: Schema, key: str, schema: object) -> StructuralTagFormat:
    """The value of one argument, such that the parser reads a value of the schema."""
    kinds = allowed_json_types(root, key)
    texts, others = _split_text_options(schema, root, _MAX_DEPTH)
    if not kinds and (others or not _accepts_anything(schema)):
        return _json(_with_definitions(schema, root))  # the type is that of the JSON value
    if not others:
        return _any_of(texts or [_ANY])
    safe = [option for text in texts if (option := _unambiguous_text(text, kinds))]
    return _any_of([*safe, *(_json(_with_definitions(other, root)) for other in others)])


def _split_text_options(
    schema: object, root: Schema, levels: int
) -> tuple[list[StructuralTagFormat], list[Schema]]:
    """The string options of a schema, and the schemas of the other options."""
    plain = _resolve(schema, root)
    options = plain.get("anyOf") or plain.get("oneOf")
    if options and levels:
        both = [_split_text_options(option, root, levels - 1) for option in options]
        return [t for texts, _ in both for t in texts], [o for _, others in both for o in others]
    if "const" in plain or "enum" in plain:
        values = [plain["const"]] if "const" in plain else plain["enum"]
        texts = [_const(value) for value in values if isinstance(value, str)]
        rest = [value for value in values if not isinstance(value, str)]
        return texts, [{"enum": rest}] if rest else []
    declared = plain.get("type")
    kinds = list(declared) if isinstance(declared, list) else [declared] if declared else []
    rest = [kind for kind in kinds if kind != "string"]
    if not kinds:
        return ([_ANY], []) if _accepts_anything(plain) else ([], [plain])
    return (
        [_text(plain)] if "string" in kinds else [],
        [{**plain, "type": rest if len(rest) > 1 else rest[0]}] if rest else [],
    )


def _text(schema: Schema) -> StructuralTagFormat:
    """An unquoted string."""
    pattern, string_format = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        return {"type": "regex", "pattern": pattern}
    if isinstance(string_format, str) and string_format in _FORMATS:
        return {"type": "regex", "pattern": _FORMATS[string_format]}
    min_length, max_length = schema.get("minLength"), schema.get("maxLength")
    if min_length or max_length is not None:
        count = f"{min_length or 0},{'' if max_length is None else max_length}"
        return {"type": "regex", "pattern": r"[\s\S]{" + count + "}"}
    return _ANY


def _unambiguous_text(
    text: StructuralTagFormat, kinds: frozenset[str]
) -> StructuralTagFormat | None:
    """String options next to other types: only strings that the parser does not convert."""
    if text == _ANY:
        return {"type": "regex", "pattern": _PLAIN_TEXT}
    if text["type"] == "const_string" and coerce_argument(text["value"], kinds) != (
        text["value"],
        True,
    ):
        return None
    return text


def _resolve(schema: object, root: Schema) -> Schema:
    """The schema with `$ref` and `allOf` resolved."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference, all_of = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            found = _resolve_reference(reference, root)
            schema = {**found, **rest} if isinstance(found, Mapping) else {}
        elif isinstance(all_of, list):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            for each in all_of:
                rest = dict(_merge_schemas(rest, _resolve(each, root)))
            schema = rest
        else:
            return schema
    return {}


def _merge_schemas(one: Schema, other: Schema) -> Schema:
    found = {**one, **other}
    if "properties" in one and "properties" in other:
        found["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        found["required"] = [*one["required"], *other["required"]]
    return found


def _resolve_reference(reference: str, root: Schema) -> object:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _accepts_anything(schema: object) -> bool:
    """Whether the schema has no constraints."""
    annotations = {"title", "description", "default", "examples", "deprecated", "$comment"}
    return not isinstance(schema, Mapping) or schema.keys() <= annotations


def _with_definitions(schema: object, root: Schema) -> Schema:
    """A subschema of `root`, with `root` as its definitions if it contains references."""
    if not isinstance(schema, Mapping):
        return {}
    moved = _rebase_references(schema)
    if '"$ref"' not in json.dumps(moved):
        return dict(moved)
    return {**moved, "$defs": {"root": _rebase_references(root)}}


def _rebase_references(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase_references(value)
            for key, value in schema.items()
        }
    return [_rebase_references(each) for each in schema] if isinstance(schema, list) else schema


_ANY: StructuralTagFormat = {"type": "any_text"}


def _const(text: str) -> StructuralTagFormat:
    return {"type": "const_string", "value": text} if text else _sequence()


def _json(schema: Schema) -> StructuralTagFormat:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _token(specials: SpecialTokenIds, marker: SpecialToken) -> StructuralTagFormat:
    return {"type": "token", "token": specials[marker]}


def _sequence(*elements: StructuralTagFormat) -> StructuralTagFormat:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _any_of(options: Sequence[StructuralTagFormat]) -> StructuralTagFormat:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}
