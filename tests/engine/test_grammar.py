"""Grammar-constrained decoding, with and without drafts and thinking."""

import json
import re
from threading import Event, Timer

import pytest

from paddock.engine import EngineQueueFullError, InvalidRequestError, Request
from paddock.engine.grammar import GrammarCache
from paddock.engine.grammar_worker import compile_workers
from paddock.records import Grammar, SamplingParams
from paddock.text import SpecialToken
from tests.engine.networks import engine, network
from tests.engine.test_requests import ids, serving, tokenizer

pytest.importorskip("xgrammar", reason="the extra 'grammar' is not installed")

STOP = tokenizer().special_token_ids[SpecialToken.ENDOFTEXT]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<tool_call>",
        "content": {"type": "regex", "pattern": "[ab]{2}"},
        "end": "</tool_call>",
    },
}
REGEX = r"[ab]{3,6}-(yes|no)"


def constrained(grammar, seed, prompt="hello", **changes):
    defaults = {"max_new_tokens": 60, "seed": seed, "temperature": 1.0, "grammar": grammar}
    return Request(token_ids=ids(prompt), sampling_params=SamplingParams(**(defaults | changes)))


def text_of(answer):
    """The text without its stop token."""
    return tokenizer().decode([t for t in answer.completion.token_ids if t != STOP])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("stops", [(STOP,), ()])
def test_every_reply_matches_its_grammar(steps, stops):
    regex, schema = Grammar("regex", REGEX), Grammar("json_schema", json.dumps(SCHEMA))
    ebnf = Grammar("ebnf", 'root ::= "(" root ")" | "x"')
    tag = Grammar("structural_tag", json.dumps(TAG))
    with serving(num_speculative_tokens=steps, stop_token_ids=stops) as engine:
        requests = [constrained(g, seed) for seed in range(5) for g in (regex, schema, ebnf, tag)]
        answers = engine.generate_outputs(requests)
        for request, answer in zip(requests, answers, strict=True):
            if answer.completion.finish == "length":
                continue  # cut off: nothing to check
            match request.sampling_params.grammar.kind:
                case "regex":
                    assert re.fullmatch(REGEX, text_of(answer))
                case "json_schema":
                    value = json.loads(text_of(answer))
                    assert value["city"] in ("Oslo", "Bergen")
                    assert isinstance(value["days"], int)
                case "ebnf":
                    assert re.fullmatch(r"\(*x\)*", text_of(answer))
                case "structural_tag":
                    assert re.fullmatch("<tool_call>[ab]{2}</tool_call>", text_of(answer))
        ended = [a for a in answers if a.completion.finish == "stop"]
        assert len(ended) >= 8
        assert engine.healthy
        assert engine.audit() == []


def test_drafts_do_not_change_constrained_replies():
    requests = [
        constrained(Grammar("regex", REGEX), seed, frequency_penalty=0.3) for seed in range(12)
    ]
    replies = []
    for steps in (0, 1, 4):
        with serving(num_speculative_tokens=steps, stop_token_ids=(STOP,)) as engine:
            replies.append([a.completion.token_ids for a in engine.generate_outputs(requests)])
    assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize("steps", [0, 3])
def test_the_grammar_applies_after_thinking(steps):
    specials = tokenizer().special_token_ids
    with serving(num_speculative_tokens=steps, stop_token_ids=(STOP,)) as engine:
        requests = [
            constrained(
                Grammar("regex", REGEX),
                seed,
                prompt="<|user|>hi<|assistant|><think>",
                thinking_budget=4,
                temperature=1.5,
            )
            for seed in range(8)
        ]
        for answer in engine.generate_outputs(requests):
            reply = answer.completion.token_ids
            close = reply.index(specials[SpecialToken.THINK_CLOSE])
            assert close <= 4
            rest = tokenizer().decode([t for t in reply[close + 1 :] if t != STOP])
            if answer.completion.finish == "stop":
                assert re.fullmatch(REGEX, rest)


def test_a_completed_grammar_ends_the_reply_before_min_new_tokens():
    with serving(stop_token_ids=(STOP,)) as engine:
        request = constrained(Grammar("regex", "abc"), 0, min_new_tokens=20)
        answer = engine.generate_output(request)
        assert text_of(answer) == "abc"
        assert answer.completion.finish == "stop"


def test_role_markers_cannot_be_generated():
    mute = {tokenizer().special_token_ids[token] for token in SpecialToken if token.is_special}
    with serving(stop_token_ids=(STOP,)) as engine:
        requests = [
            constrained(Grammar("regex", r"[^x]{12}"), seed, temperature=3.0) for seed in range(8)
        ]
        for answer in engine.generate_outputs(requests):
            assert not mute & {t for t in answer.completion.token_ids if t != STOP}


@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", "{"), Grammar("regex", "("), Grammar("ebnf", "root ::= (")]
)
def test_an_invalid_grammar_is_rejected(grammar):
    with serving() as engine:
        with pytest.raises(InvalidRequestError, match="is not a valid grammar") as error:
            engine.generate_output(constrained(grammar, 0))
        assert ".cc" not in str(error.value), "no path of the library's build"
        assert engine.generate(ids("hello"), SamplingParams(max_new_tokens=2)).finish == "length"
        assert engine.audit() == []


@pytest.mark.parametrize("stops", [(STOP,), ()])
@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", '{"$ref": "#"}'), Grammar("ebnf", "root ::= root")]
)
def test_an_empty_language_is_rejected(grammar, stops):
    with serving(stop_token_ids=stops) as engine:
        with pytest.raises(InvalidRequestError, match="allows no output"):
            engine.generate_output(constrained(grammar, 0))
        empty = engine.generate_output(
            constrained(Grammar("regex", "a?"), 0)
        )  # the empty string matches
        assert text_of(empty) in ("", "a")


# 4 KB whose first token takes minutes on any machine: 64 optional copies of the next rule, 27 deep.
_RULES = ["root", *"abcdefghijklmnopqrstuvwxyz"]
EXPLODING = Grammar(
    "ebnf",
    "\n".join(
        f"{rule} ::= {' '.join([item] * 64)}"
        for rule, item in zip(_RULES, [*_RULES[1:], "[a-z]?"], strict=True)
    ),
)


def test_a_grammar_that_explodes_is_rejected_without_blocking_others():
    with serving(
        stop_token_ids=(STOP,), grammar_timeout_s=2.0, grammar_memory_bytes=1 << 28
    ) as engine:
        for _ in range(2):  # the second time without compiling
            with pytest.raises(InvalidRequestError, match=r"takes (more than 2 s|too long)|memory"):
                engine.generate_output(constrained(EXPLODING, 0))
        assert text_of(engine.generate_output(constrained(Grammar("regex", "abc"), 0))) == "abc"
        assert engine.audit() == []


def test_compilation_is_cancelled_when_the_client_disconnects():
    left = Event()
    with serving(
        stop_token_ids=(STOP,), grammar_timeout_s=500.0, grammar_memory_bytes=1 << 28
    ) as engine:
        Timer(0.3, left.set).start()
        with pytest.raises(InvalidRequestError, match="disconnected"):
            engine.submit(constrained(EXPLODING, 0), lambda _: None, cancelled=left)
        assert text_of(engine.generate_output(constrained(Grammar("regex", "abc"), 0))) == "abc"


def test_too_many_waiting_grammars_are_rejected(monkeypatch):
    with serving(stop_token_ids=(STOP,)) as engine:
        for lane in compile_workers(
            engine.settings.grammar_timeout_s, engine.settings.grammar_memory_bytes
        ):
            monkeypatch.setattr(lane, "max_waiting", 0)
        with pytest.raises(EngineQueueFullError, match="0 grammars are waiting to be compiled"):
            engine.generate_output(constrained(Grammar("regex", "full"), 0))
        monkeypatch.undo()
        assert text_of(engine.generate_output(constrained(Grammar("regex", "full"), 0))) == "full"
        assert engine.audit() == []


def test_a_too_long_grammar_is_rejected_without_parsing():
    long = Grammar("ebnf", f'root ::= "{"a" * 99}"')
    error = pytest.raises(InvalidRequestError, match="has 110 bytes, more than 64")
    with serving(max_grammar_bytes=64) as engine, error:
        engine.generate_output(constrained(long, 0))


def test_the_cache_of_grammars_is_bounded():
    cache = GrammarCache(100)
    one, two, vast = (Grammar("regex", text) for text in "abc")
    for grammar, size in ((one, 60), (two, 60), (vast, 101)):
        cache.put(grammar, (grammar.text, None), size)
    assert (cache.get(one), cache.get(two), cache.get(vast)) == (None, ("b", None), None)
    assert cache.size == 60


@pytest.mark.parametrize("limits", [{"minLength": 8}, {"minLength": 3, "maxLength": 40}])
def test_json_strings_hold_no_raw_control_characters(limits):
    schema = Grammar("json_schema", json.dumps({"type": "string", **limits}))
    with serving(stop_token_ids=(STOP,)) as engine:
        requests = [constrained(schema, seed, temperature=50.0) for seed in range(40)]
        texts = [text_of(answer) for answer in engine.generate_outputs(requests)]
    assert not [text for text in texts if any(ord(char) < 32 for char in text.strip())]


@pytest.mark.parametrize(
    "pattern", ["a\\nb", "^[\\n\\t]+$", '^"[^x]{3}$', r"^\d{1,9}\\w$", "^\\x07{2}$", '(?:"é)+']
)
def test_json_strings_by_a_pattern_escape_what_json_must(pattern):
    schema = Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    with serving(stop_token_ids=(STOP,)) as engine:
        answers = engine.generate_outputs(
            [constrained(schema, seed, temperature=50.0) for seed in range(10)]
        )
        texts = [text_of(answer) for answer in answers if answer.completion.finish == "stop"]
    assert texts and all(re.search(pattern, json.loads(text)) for text in texts)


def test_without_a_tokenizer_there_is_no_grammar():
    params = SamplingParams(grammar=Grammar("regex", "a"))
    error = pytest.raises(InvalidRequestError, match="need an engine with a tokenizer")
    with engine(network("sparse")) as plain, error:
        plain.generate((1, 2), params)
