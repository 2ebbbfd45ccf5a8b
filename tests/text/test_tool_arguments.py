import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.records import ToolCall
from paddock.records.json_codec import RecordDecodeError, replace_lone_surrogates, to_json_value
from paddock.text.tool_arguments import (
    allowed_json_types,
    coerce_argument,
    parse_arguments,
    parse_json_value,
)

NUMBER, TEXT = frozenset({"number"}), frozenset({"string"})
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("given_", "arguments"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": {"b": [null, "\\u00e9"]}}', {"a": {"b": [None, "\u00e9"]}}),
        (None, {}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ([1, 2], {"arguments": "[1, 2]"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": 1e999}', {"arguments": '{"a": 1e999}'}),
        ({"a": float("inf")}, {"arguments": "{'a': inf}"}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ("9" * 5000, {"arguments": "9" * 5000}),
    ],
)
def test_arguments_in_any_shape_become_an_object_that_a_record_carries(given_, arguments):
    assert parse_arguments(given_) == arguments
    assert ToolCall(id="a", name="f", arguments=arguments).arguments == arguments


@pytest.mark.parametrize("text", ["[" * 5000, '{"a":' * 5000, "[" * 500 + "]" * 500])
def test_too_deeply_nested_json_is_text(text):
    assert parse_arguments(text) == {"arguments": text}
    assert coerce_argument(text, frozenset({"array"})) == (text, False)


def test_invalid_json_is_rejected_by_name():
    with pytest.raises(RecordDecodeError, match="value"):
        to_json_value({"a": object()})
    with pytest.raises(RecordDecodeError, match="levels deep"):
        to_json_value(json.loads("[" * 200 + "]" * 200))


@given(st.text() | st.text(st.characters(codec=None, categories=["Cs", "Lu"])))
def test_repaired_text_can_always_be_encoded(text):
    assert replace_lone_surrogates(text).encode().decode() == replace_lone_surrogates(text)
    assert replace_lone_surrogates(replace_lone_surrogates(text)) == replace_lone_surrogates(text)


@given(JSON)
def test_any_json_value_is_read_back(value):
    assert parse_json_value(json.dumps(value)) == value


# --- types ----------------------------------------------------------------------------------------

SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "array"}]}]},
        "pick": {"enum": ["a", 2]},
        "one": {"const": True},
        "city": {"$ref": "#/$defs/City"},
        "all": {"allOf": [{"$ref": "#/$defs/City"}]},
        "loop": {"$ref": "#/properties/loop"},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "odd": {"type": [{"type": "string"}], "anyOf": 3},
        "no": False,
    },
    "$defs": {"City": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("text", {"string"}),
        ("maybe", {"string", "null"}),
        ("any", {"integer", "array"}),
        ("pick", {"string", "integer"}),
        ("one", {"boolean"}),
        ("city", {"object"}),
        ("all", {"object"}),
        ("loop", set()),
        ("lost", set()),
        ("odd", set()),
        ("no", set()),
        ("unheard of", set()),
    ],
)
def test_types_are_found_anywhere_in_a_schema(key, kinds):
    assert allowed_json_types(SCHEMA, key) == kinds


def test_a_recursive_schema_is_visited_once():
    class Watched(dict):
        looks = 0

        def get(self, *key):
            Watched.looks += 1
            return super().get(*key)

    knot = Watched(anyOf=[{"$ref": "#/$defs/Knot"}] * 3 + [{"type": "string"}])
    schema = {"properties": {"x": {"$ref": "#/$defs/Knot"}}, "$defs": {"Knot": knot}}
    assert allowed_json_types(schema, "x") == {"string"}
    assert Watched.looks < 10


def test_other_arguments_may_have_a_type_too():
    assert allowed_json_types({"additionalProperties": {"type": "string"}}, "x") == {"string"}
    assert allowed_json_types({"properties": 3, "additionalProperties": True}, "x") == set()


@pytest.mark.parametrize(
    ("text", "kinds", "value", "fits"),
    [
        ("12", "string", "12", True),
        (' {"a": 1}', "string", ' {"a": 1}', True),
        ("12", "integer", 12, True),
        (" 12\n", "integer", 12, True),
        ("12.0", "integer", 12, True),
        ("12.5", "integer", 12.5, False),
        ("12", "number", 12, True),
        ("1e3", "number", 1000.0, True),
        ("true", "integer", True, False),
        ("true", "boolean", True, True),
        ("True", "boolean", True, True),
        ("yes", "boolean", "yes", False),
        ("None", "null", None, True),
        ("{'a': [None, 'x']}", "object", {"a": [None, "x"]}, True),
        ("{1: 2}", "object", "{1: 2}", False),
        ("(1, 2)", "array", "(1, 2)", False),
        ("__import__('os')", "object", "__import__('os')", False),
        ("null", "string null", None, True),
        ("nul", "string null", "nul", True),
        ('"x"', "string null", '"x"', True),
        ("5", "string integer", 5, True),
        ("five", "string integer", "five", True),
        ('"5"', "integer", "5", False),
        # No type is known: parsed as JSON if valid.
        ("5", "", 5, True),
        ('"x"', "", "x", True),
        ("[1", "", "[1", True),
        ("None", "", "None", True),
        ("", "", "", True),
        ("", "integer", "", False),
        ("\x00", "object", "\x00", False),
    ],
)
def test_text_is_converted_to_an_allowed_type(text, kinds, value, fits):
    found = coerce_argument(text, frozenset(kinds.split()))
    assert found == (value, fits) and type(found[0]) is type(value)


@given(st.text(), st.sets(st.sampled_from(["string", "integer", "object", "null", "odd"])))
def test_any_text_has_a_value(text, kinds):
    value, fits = coerce_argument(text, frozenset(kinds))
    assert to_json_value(value) == value
    assert fits or kinds
