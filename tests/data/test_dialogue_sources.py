"""Dialogue sources: demonstrations, shards with loss masks, and batches."""

import json
import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from pydantic import ValidationError

from paddock.data import (
    CorpusSettings,
    DataLoaderSettings,
    PackedDataLoader,
    SourceContext,
    TokenizerSettings,
    corpus_key,
    dialogue_to_json,
    iterate_once,
    open_tokenizer,
    prepare_corpus,
)
from paddock.data.dialogue_sources import (
    DemonstrationSource,
    DialogueSource,
    concat_dialogues,
    load_error_marker,
    text_between_markers,
)
from paddock.data.mixture import MixtureSettings
from paddock.data.reasoning import ReasoningSource
from paddock.data.sources import DataError
from paddock.data.tokenize_dialogue import tokenize_dialogue
from paddock.envs import make
from paddock.envs.nano import DemonstrationStyle
from paddock.envs.nano.language import is_held_out
from paddock.records import Dialogue, LossMaskSpan, Message
from paddock.text import ChatTemplate, get_renderer, with_chat_template
from paddock.text.glm_renderer import GlmRenderer
from tests.data.tiny import byte_tokenizer


def chain(**changes):
    return DemonstrationSource(**({"name": "c", "env": "nano-chain", "count": 200} | changes))


def tools(**changes):
    kinds = {"kinds": ["follow", "plus", "file", "search"]}
    defaults = {"name": "t", "env": "nano-tools", "args": kinds, "count": 200}
    return DemonstrationSource(**(defaults | changes))


def write(folder, *dialogues):
    file = folder / "talk.jsonl"
    file.write_text("".join(json.dumps(d) + "\n" for d in dialogues))
    return DialogueSource(name="talk", path=str(file))


def question_and_answer(i, **more):
    answer = {"role": "assistant", "content": f"The answer is {i}."}
    return {"messages": [{"role": "user", "content": f"Number {i}?"}, answer], **more}


def ids_of(documents, number):
    return documents.token_ids(number, 0, documents.length(number)).tolist()


# --- demonstrations -------------------------------------------------------------------------------


def test_demonstrations_are_the_same_every_time_and_change_with_the_seed():
    assert list(chain().dialogues()) == list(chain().dialogues())
    assert list(chain(seed=1).dialogues()) != list(chain().dialogues())


def test_fractions_of_styles_modes_and_mistakes_are_kept():
    source = chain(
        count=2000,
        styles={"worked": 0.3, "terse": 0.7},
        thinking={"interleaved": 0.8, "off": 0.2},
        mistake_rate=0.5,
    )
    found = list(source.dialogues())
    modes = Counter(d.thinking for d in found)
    reasonings = [d.messages[1].reasoning for d in found if d.thinking == "interleaved"]
    worked = [t for t in reasonings if t != "easy"]
    assert modes["off"] / 2000 == pytest.approx(0.2, abs=0.03)
    assert len(worked) / len(reasonings) == pytest.approx(0.3, abs=0.03)
    assert sum("no" in t for t in worked) / len(worked) == pytest.approx(0.5, abs=0.06)
    assert all(d.messages[1].reasoning is None for d in found if d.thinking == "off")


def test_several_tasks_make_one_dialogue_with_the_tools_of_all():
    source = tools(count=100, tasks_per_dialogue=(2, 3), mistake_rate=1.0, styles={"full": 1.0})
    for found in source.dialogues():
        users = [m for m in found.messages if m.role == "user"]
        assert 2 <= len(users) <= 3
        assert len(found.untrained) == len(users)  # each with its wrong lookup
        for mark in found.untrained:
            assert found.messages[mark.message + 1].content.startswith("no entry")
        names = [tool.name for tool in found.tools]
        used = {call.name for m in found.messages for call in m.tool_calls}
        assert names == sorted(names) and used <= set(names)


def test_turns_switch_thinking_on_and_off():
    found = chain(count=50, tasks_per_dialogue=(4, 4), thinking={"turns": 1.0}).dialogues()
    patterns = {tuple(m.reasoning is None for m in d.messages[1::2]) for d in found}
    assert len(patterns) > 8


def test_held_out_demonstrations_are_of_test_tasks_alone():
    (aside,) = (chain().held_out_source(0.1),)
    assert aside.count == 20
    for source, test in ((chain(), False), (aside, True)):
        for found in source.dialogues():
            assert is_held_out(found.messages[0].content) is test
    assert aside.held_out_source(0.1) is None


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"env": "moon"}, "environment 'moon' not found"),
        (
            {"styles": {"loud": 1.0}},
            "nano-chain has no style 'loud'; it must be one of worked, terse",
        ),
        ({"styles": {"worked": 0.0}}, "styles: at least one weight must be positive"),
        ({"tasks_per_dialogue": (3, 2)}, "tasks_per_dialogue: 3 must not be greater than 2"),
        ({"args": {"min_step": 1}}, "did you mean 'min_steps'"),
    ],
)
def test_invalid_demonstration_settings_are_rejected(wrong, complaint):
    with pytest.raises(ValidationError, match=complaint):
        chain(**wrong)


def test_a_taskset_with_only_a_solver_is_demonstrated_by_it():
    source = DemonstrationSource(name="m", env="math", count=10, thinking={"preserved": 1.0})
    found = list(source.dialogues())
    assert len({d.messages[0].content for d in found}) > 5
    for dialogue in found:
        assert dialogue.messages[-1].role == "assistant" and dialogue.messages[-1].content


def test_concatenating_dialogues_shifts_the_loss_mask_spans():
    reply = Message(role="assistant", content="a")
    one = Dialogue(messages=(Message(role="user", content="?"), reply))
    two = Dialogue(messages=one.messages, untrained=(LossMaskSpan(message=1),))
    assert concat_dialogues([one, two]).untrained == (LossMaskSpan(message=3),)


# --- the tokenizer --------------------------------------------------------------------------------


def test_extra_sources_add_their_words_to_the_tokenizer(tmp_path):
    corpus = CorpusSettings(sources=(ReasoningSource(name="f", family="facts", count=200),))
    settings = TokenizerSettings(
        vocab_size=960, pre_tokenizer="words", extra_sources=(tools(count=600, mistake_rate=0.2),)
    )
    tokenizer = open_tokenizer(settings, corpus, tmp_path / "own")
    whole = {
        tokenizer.id_to_token(i) for d in tools(seed=5).dialogues() for i in _ids(tokenizer, d)
    }
    pieces = {piece for d in tools(seed=5).dialogues() for piece in text_between_markers(d)}
    words = {word for piece in pieces if "\n" not in piece for word in piece.split()}
    assert {f"\u2581{word}" for word in words} <= whole
    lines = {line for line in whole if line.endswith("\n")}
    assert any('"name":\u2581"search"' in line for line in lines)  # a tool in one token
    assert ChatTemplate.from_tokenizer(tokenizer) is None  # this corpus has no dialogues


def _ids(tokenizer, dialogue):
    return [i for row in tokenize_dialogue(dialogue, GlmRenderer(tokenizer)) for i in row.token_ids]


def test_a_corpus_of_dialogues_gives_its_tokenizer_the_template(tmp_path):
    corpus = CorpusSettings(sources=(chain(count=20),), chat_template="5.1")
    folder = tmp_path / "given"
    byte_tokenizer().save(folder)
    tokenizer = open_tokenizer(TokenizerSettings(path=str(folder)), corpus, tmp_path / "own")
    assert get_renderer(tokenizer).version == "5.1"
    again = open_tokenizer(TokenizerSettings(), corpus, tmp_path / "own")
    assert get_renderer(again).version == "5.1"


# --- shards and batches ---------------------------------------------------------------------------


def test_rows_round_trip_with_loss_mask_and_weight(tmp_path):
    source = write(tmp_path, *[question_and_answer(i, weight=i % 2 + 0.5) for i in range(40)])
    settings = CorpusSettings(sources=(source,), held_out_fraction=0.2, tokens_per_shard=100)
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    renderer = GlmRenderer(byte_tokenizer())
    wanted = {}
    for dialogue in source.dialogues():
        for row in tokenize_dialogue(dialogue, renderer):
            wanted[row.token_ids] = (row.loss_mask, dialogue.weight)
    seen = 0
    for split in ("train", "held_out"):
        documents = corpus.documents("talk", split)
        assert len(documents)
        for number in range(len(documents)):
            length = documents.length(number)
            trained, weight = wanted.pop(tuple(ids_of(documents, number)))
            assert documents.loss_mask(number, 0, length).tolist() == list(trained)
            assert documents.loss_mask(number, 3, length - 1).tolist() == list(trained[3:-1])
            assert documents.loss_weight(number) == weight
            seen += 1
    assert seen == 40 and not wanted


def test_a_dialogue_stays_in_its_split(tmp_path):
    many = [question_and_answer(i) for i in range(60)]
    sides = []
    for order in (many, many[::-1]):
        folder = tmp_path / str(len(sides))
        folder.mkdir()
        settings = CorpusSettings(sources=(write(folder, *order),), held_out_fraction=0.3)
        corpus = prepare_corpus(settings, byte_tokenizer(), folder / "cache")
        held_out = corpus.documents("talk", "held_out")
        sides.append({tuple(ids_of(held_out, n)) for n in range(len(held_out))})
    assert sides[0] == sides[1] and 5 < len(sides[0]) < 40


def test_dialogues_without_trained_tokens_are_dropped_and_counted(tmp_path):
    silent = question_and_answer(1)
    silent["messages"][1]["untrained"] = True
    source = write(tmp_path, question_and_answer(0), silent, question_and_answer(2, weight=0))
    corpus = prepare_corpus(
        CorpusSettings(sources=(source,), held_out_fraction=0), byte_tokenizer(), tmp_path
    )
    assert len(corpus.documents("talk")) == 1
    assert corpus.manifest.sources["talk"].drop_counts == {"no trained tokens": 2}


def test_an_invalid_line_stops_preparation_without_leftovers(tmp_path):
    source = write(tmp_path, question_and_answer(0), {"messages": []})
    with pytest.raises(DataError, match=re.escape("talk.jsonl:2: messages: none of 0")):
        prepare_corpus(CorpusSettings(sources=(source,)), byte_tokenizer(), tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_the_shards_depend_on_the_template():
    settings = CorpusSettings(sources=(chain(),))
    plain = byte_tokenizer()
    keys = {
        corpus_key(settings, plain),
        corpus_key(settings, with_chat_template(plain, "5")),
        corpus_key(settings, with_chat_template(plain, "5.2")),
        corpus_key(settings.model_copy(update={"chat_template": "5.3"}), plain),
    }
    assert len(keys) == 4


def batches(corpus, mode="rows", **changes):
    made = {"packing": mode, "seq_len": 128, "batch_tokens": 512} | changes
    return PackedDataLoader(corpus.split("train"), DataLoaderSettings(**made))


@pytest.mark.parametrize("mode", ["rows", "best_fit"])
def test_batches_have_the_loss_mask_of_the_tokenized_dialogues(tmp_path, mode):
    source = tools(
        count=60,
        mistake_rate=0.5,
        tasks_per_dialogue=(1, 2),
        thinking={"preserved": 0.5, "off": 0.5},
    )
    corpus = prepare_corpus(CorpusSettings(sources=(source,)), byte_tokenizer(), tmp_path)
    renderer = GlmRenderer(byte_tokenizer())
    rows = {
        r.token_ids: r.loss_mask for d in source.dialogues() for r in tokenize_dialogue(d, renderer)
    }
    longest = max(map(len, rows))
    stream = batches(corpus, mode, seq_len=longest, batch_tokens=3 * longest, drop_overlong=True)
    for _ in range(10):
        batch = stream.next_batch()
        ends = np.cumsum(batch.lengths)
        for end, length in zip(ends, batch.lengths, strict=True):
            ids = tuple(batch.token_T[end - length : end].tolist())
            assert batch.loss_mask_T[end - length : end].tolist() == list(rows[ids])
        assert batch.num_targets == batch.loss_mask_T.sum() > 0
        assert batch.loss_weight_T is None


def test_weights_reach_the_batch(tmp_path):
    source = write(tmp_path, *[question_and_answer(i, weight=0.25) for i in range(30)])
    corpus = prepare_corpus(CorpusSettings(sources=(source,)), byte_tokenizer(), tmp_path / "cache")
    assert set(batches(corpus).next_batch().loss_weight_T.tolist()) == {0.25}


def test_truncated_dialogues_are_dropped_with_drop_overlong(tmp_path):
    source = write(tmp_path, question_and_answer(1), question_and_answer("9" * 300))
    corpus = prepare_corpus(
        CorpusSettings(sources=(source,), held_out_fraction=0), byte_tokenizer(), tmp_path / "cache"
    )
    stream = batches(corpus, drop_overlong=True)
    lengths = {length for _ in range(4) for length in stream.next_batch().lengths}
    assert len(lengths) == 1 and stream.counts["left_out"] > 0
    cut = {length for _ in range(4) for length in batches(corpus).next_batch().lengths}
    assert 128 in cut
    with pytest.raises(DataError, match="all documents are longer than a row of 16 tokens"):
        batches(corpus, drop_overlong=True, seq_len=16).next_batch()


def test_a_dataloader_of_dialogues_resumes_at_its_position(tmp_path):
    source = chain(count=40)
    corpus = prepare_corpus(CorpusSettings(sources=(source,)), byte_tokenizer(), tmp_path)
    one, two = batches(corpus, drop_overlong=True), batches(corpus, drop_overlong=True)
    for _ in range(3):
        one.next_batch()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    left, right = one.next_batch(), two.next_batch()
    assert left.token_T.tolist() == right.token_T.tolist()
    assert left.loss_mask_T.tolist() == right.loss_mask_T.tolist()


def test_evaluation_counts_only_trained_tokens(tmp_path):
    corpus = prepare_corpus(
        CorpusSettings(sources=(chain(),), held_out_fraction=0.1), byte_tokenizer(), tmp_path
    )
    (batch,) = iterate_once(corpus.split("held_out"), context=128, batch_tokens=8192)
    assert 0 < batch.num_targets < len(batch.token_T) / 2


def test_sources_mix_by_weights_that_change(tmp_path):
    sources = (chain(), chain(name="d", seed=4))
    corpus = prepare_corpus(CorpusSettings(sources=sources), byte_tokenizer(), tmp_path)
    mixture = MixtureSettings(
        unit="documents", weights={"c": ((0.0, 1.0), (1.0, 0.0)), "d": ((0.0, 0.0), (1.0, 1.0))}
    )
    stream = batches(corpus, mixture=mixture)
    early = Counter(s for _ in range(8) for s in stream.next_batch(progress=0.0).sources)
    late = Counter(s for _ in range(8) for s in stream.next_batch(progress=1.0).sources)
    # Rows that were drawn early and did not fit wait for the next batch.
    assert set(early) == {"c"} and late["d"] > 10 * late["c"]


# --- error markers --------------------------------------------------------------------------------


def test_a_named_error_marker_marks_unmarked_errors(tmp_path):
    reply = {"role": "assistant", "content": "8", "reasoning_content": "3 add 5 is 7 , no , 8"}
    entry = {"messages": [{"role": "user", "content": "?"}, reply]}
    source = write(tmp_path, entry).model_copy(
        update={"mask_errors_with": "paddock.envs.nano.chain:find_wrong_steps"}
    )
    (found,) = source.dialogues()
    assert found.untrained == (LossMaskSpan(message=1, part="reasoning", start=0, end=12),)


def test_a_taskset_can_be_the_error_marker(tmp_path):
    taskset = make("nano-tools")
    entries = []
    for index in range(4):
        task = taskset.task(index)
        manner = DemonstrationStyle(style="full")
        shown = dialogue_to_json(taskset.demonstrate(task, manner, Random(0)))
        shown["id"] = f"{task.id}#{index}"
        if index % 2:
            shown["messages"][-1]["content"] = "wrong"
        entries.append(shown)
    source = write(tmp_path, *entries).model_copy(update={"mask_errors_with": "env:nano-tools"})
    found = list(source.dialogues())
    assert [bool(d.untrained) for d in found] == [False, True, False, True]
    replies = [i for i, m in enumerate(found[1].messages) if m.role == "assistant"]
    assert [mark.message for mark in found[1].untrained] == replies


@pytest.mark.parametrize("name", ["nowhere:judge", "json:judge", "env:moon"])
def test_a_missing_error_marker_is_named(name):
    with pytest.raises(DataError, match=f"mask_errors_with '{name}'"):
        load_error_marker(name)


def test_text_between_markers_is_what_the_tokenizer_encodes():
    (found,) = tools(count=1, styles={"full": 1.0}).dialogues()
    texts = [
        document.text
        for document in tools(count=1, styles={"full": 1.0}).documents(
            SourceContext(count_tokens=len)
        )
    ]
    assert texts == text_between_markers(found)
    assert not any(
        marker in text for text in texts for marker in ("<|user|>", "<think>", "<arg_key>")
    )
