import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.envs import EnvError, make, run_rollout
from paddock.envs.search.bm25 import K1, B, BM25Index, PageError, WebPage, tokenize_words
from paddock.envs.search.knowledge_graph import Fact, Hop, KnowledgeGraph, generate_graph
from paddock.envs.search.pages import parse_facts, parse_graph, write_pages
from paddock.envs.search.questions import (
    MultiHopQuestion,
    QuestionProbe,
    filter_reason,
    find_inconsistency,
    generate_questions,
)
from paddock.envs.search.tools import CHARS_PER_VIEW, search_tools
from paddock.envs.tools import execute_tool_calls
from paddock.records import Message, ToolCall
from tests.envs.soundness import check_sound, check_tasks, constant_policy, pass_rate, rewards

text_of = st.lists(
    st.sampled_from(["oak", "elm", "fir", "ash", "yew", "box"]), min_size=1, max_size=9
)


def pages_of(texts):
    return [WebPage(id=f"p{n}", title="", text=" ".join(text)) for n, text in enumerate(texts)]


def by_definition(pages, query):
    """BM25 by its definition: the score of each page."""
    lists = [tokenize_words(f"{page.title} {page.text}") for page in pages]
    mean = sum(map(len, lists)) / len(lists)
    scores = {}
    for page, found in zip(pages, lists, strict=True):
        count = Counter(found)
        norm = K1 * (1 - B + B * len(found) / mean)
        scores[page.id] = 0.0
        for term in tokenize_words(query):
            holders = sum(term in other for other in lists)
            idf = math.log(1 + (len(lists) - holders + 0.5) / (holders + 0.5))
            scores[page.id] += idf * count[term] * (K1 + 1) / (count[term] + norm)
    return scores


@given(st.lists(text_of, min_size=1, max_size=12), text_of, st.integers(1, 5), st.integers(1, 5))
def test_search_is_bm25_in_any_order_of_insertion(texts, query, batch, k):
    pages, query = pages_of(texts), " ".join(query)
    index = BM25Index()
    for start in range(0, len(pages), batch):
        index.add(pages[start : start + batch])
    scores = by_definition(pages, query)
    found = index.search(query, k)
    best = sorted((score for score in scores.values() if score > 0), reverse=True)[:k]
    assert [hit.score for hit in found] == pytest.approx(best)
    assert [hit.score for hit in found] == pytest.approx([scores[hit.page.id] for hit in found])
    index.compact()
    assert index.search(query, k) == found


def test_an_index_on_disk_can_be_extended_and_reopened(tmp_path):
    pages = pages_of([["oak"], ["oak", "elm"], ["fir"]])
    index = BM25Index(tmp_path / "index")
    index.add(pages[:1])
    index.add(pages[1:])
    found = [(hit.page, hit.score) for hit in index.search("oak fir", 3)]
    again = BM25Index(tmp_path / "index")
    assert len(again) == 3
    assert [(hit.page, hit.score) for hit in again.search("oak fir", 3)] == found
    again.compact()
    assert len(list((tmp_path / "index").iterdir())) == 1
    third = BM25Index(tmp_path / "index")
    assert [(hit.page, hit.score) for hit in third.search("oak fir", 3)] == found
    third.add([WebPage(id="new", title="", text="yew")])
    assert BM25Index(tmp_path / "index").page("new") == WebPage(id="new", title="", text="yew")


def test_duplicate_pages_partial_batches_and_broken_folders(tmp_path):
    index = BM25Index(tmp_path)
    index.add(pages_of([["oak"]]))
    with pytest.raises(PageError, match="page 'p0' is already in the index"):
        index.add(pages_of([["elm"]]))
    (tmp_path / ".000002").mkdir()  # a writer that was killed
    assert len(BM25Index(tmp_path)) == 1
    BM25Index(tmp_path).add([WebPage(id="b", title="", text="elm")])
    (tmp_path / "000001" / "terms.json").write_text("{")
    with pytest.raises(PageError, match="000001 is not an index segment"):
        BM25Index(tmp_path)


def test_an_empty_index_and_an_unknown_word_find_nothing():
    assert BM25Index().search("oak") == []
    index = BM25Index()
    index.add(pages_of([["oak"]]))
    assert index.search("elm ???") == []


def test_pages_state_the_graph_and_nothing_else():
    rng = random.Random(0)
    graph = generate_graph(rng, 200)
    stated = parse_graph(write_pages(rng, graph))
    assert stated.facts == graph.facts
    assert dict(stated.kinds) == dict(graph.kinds)


def test_a_large_region_does_not_run_out_of_names():
    graph = generate_graph(random.Random(0), 9000)
    assert sum(kind == "town" for kind in graph.kinds.values()) == 1800


def test_questions_start_from_rare_pages_and_share_few_facts():
    rng = random.Random(0)
    graph = generate_graph(rng, 400)
    questions = generate_questions(rng, graph, hops=3, count=100, uses=2)
    assert len(questions) == 100
    mentions = graph.mentions
    median = sorted(mentions.values())[len(mentions) // 2]
    assert all(mentions[question.start] <= median for question in questions)
    assert max(Counter(f for q in questions for f in q.facts).values()) <= 2
    assert all(set(question.facts) <= graph.facts for question in questions)


BORN, SEAT = Hop("born", True), Hop("seat", False)
FACTS = (Fact("Ada Cor", "born", "Oaktown"), Fact("Elm Works", "seat", "Oaktown"))
KINDS = {"Ada Cor": "person", "Oaktown": "town", "Elm Works": "company", "Fir Works": "company"}
GRAPH = KnowledgeGraph(KINDS, frozenset(FACTS))
QUESTION = MultiHopQuestion(start="Ada Cor", steps=(BORN, SEAT), names=("Oaktown", "Elm Works"))
HARD = QuestionProbe(guesses=("Fir Works",) * 8, agent_answer="Fir Works", agent_calls=2)


def test_a_question_describes_its_path():
    assert QUESTION.text == (
        "What is the name of the company that has its seat in the town in which Ada Cor was born?"
    )
    assert QUESTION.facts == FACTS
    assert filter_reason(QUESTION, HARD, GRAPH) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"guesses": ("Fir Works",) * 7 + ("Elm Works",)}, "known without tools"),
        ({"agent_answer": "Elm Works", "agent_calls": 3}, "found within 3 calls"),
        ({"agent_answer": "Elm Works", "agent_calls": 4}, None),
    ],
)
def test_the_first_two_filters(change, reason):
    assert filter_reason(QUESTION, replace(HARD, **change), GRAPH) == reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FACTS[:1], "the pages do not say"),
        ((FACTS[0], Fact("Fir Works", "seat", "Oaktown")), "the pages do not say"),
        ((*FACTS, Fact("Fir Works", "seat", "Oaktown")), "is not one but 2"),
        ((*FACTS, Fact("Ada Cor", "born", "Elmtown")), "is not one but 2"),
    ],
)
def test_the_third_filter_rejects_what_is_not_unique_consistent_or_true(facts, reason):
    assert reason in find_inconsistency(QUESTION, KnowledgeGraph(KINDS, frozenset(facts)))


def test_the_third_filter_checks_every_candidate_backwards():
    other = {**KINDS, "Gone Works": "company"}
    facts = frozenset((*FACTS, Fact("Gone Works", "seat", "Elmtown")))
    assert find_inconsistency(QUESTION, KnowledgeGraph(other, facts)) is None
    unlisted = {name: kind for name, kind in KINDS.items() if name != "Elm Works"}
    assert (
        find_inconsistency(QUESTION, KnowledgeGraph(unlisted, frozenset(FACTS)))
        == "candidates that fit: "
    )


@pytest.fixture(scope="module")
def region():
    return make("search", {"hops": 3})


def test_questions_are_sound(region):
    assert region.size("train") >= 150
    nears = [
        lambda task, n=n: region.scripted_answer(region.example_of(task).near[n]) for n in (0, -1)
    ]
    check_sound(region, 150, nears)
    check_sound(region, 30, split="test")


def test_the_solver_reads_every_fact_of_its_question(region):
    task = region.task(0)
    rollout = asyncio.run(run_rollout(region.make_env(task), region.solver(task)))
    read = " ".join(m.content for m in rollout.messages if m.role == "tool")
    assert set(region.question(task).facts) <= set(parse_facts(read))


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: make("search", {"hops": 3, "num_entities": 300, "num_questions": 300}), 10)


def test_hops_change_the_pass_rate_of_a_policy_that_follows_two(region):
    short = make("search", {"hops": 2, "num_entities": 300, "num_questions": 200})
    rates = []
    for taskset in (short, region):
        tasks = [taskset.task(index) for index in range(30)]
        rates.append(pass_rate(taskset, tasks, lambda t, w=taskset: w.partial_solver(t, hops=2)))
    assert rates == [1.0, 0.0]


def test_the_top_search_hit_is_never_the_answer(region):
    best = region.index.search("river", 1)[0].page.title
    tasks = [region.task(index) for index in range(50)]
    assert (
        max(rewards(region, tasks, lambda task: constant_policy(f"<answer>{best}</answer>"))) == 0
    )


def call(tools, name, **arguments):
    reply = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="1", name=name, arguments=arguments),)
    )
    return asyncio.run(execute_tool_calls(tools, reply))[0].content


def test_tools_search_open_and_find():
    index = BM25Index()
    long = "Word. " * (CHARS_PER_VIEW // 3) + "The end is Here."
    index.add(
        [
            WebPage(id="a", title="Oak", text="An oak is a tree. It is tall."),
            WebPage(id="b", title="Long", text=long),
        ]
    )
    tools = search_tools(index)
    assert call(tools, "search", query="a tall oak") == "[a] Oak: An oak is a tree."
    assert call(tools, "search", query="zzz") == "nothing was found"
    assert call(tools, "open", page="[a]") == "Oak\n\nAn oak is a tree. It is tall."
    assert call(tools, "open", page="b", part=3).endswith("(part 3 of 3)")
    assert call(tools, "open", page="b", part=4) == "error: page b has 3 parts, not 4"
    assert call(tools, "open", page="z") == "error: there is no page 'z'; search gives ids"
    assert call(tools, "find", page="b", text="here") == "The end is Here."
    assert "nearest: It is tall." in call(tools, "find", page="a", text="tall trunk")
    assert call(tools, "search", query="x", k=0).startswith("error: search: argument 'k' is 0")


def test_a_page_whose_id_has_brackets_can_be_opened():
    index = BM25Index()
    index.add([WebPage(id=name, title=name, text="Oak.") for name in ("list[int]", "[x]")])
    tools = search_tools(index)
    for page_id in ("list[int]", "[list[int]]", " [x]", "[[x]]"):
        assert call(tools, "open", page=page_id).endswith("Oak.")


def test_custom_pages_and_questions(tmp_path):
    pages = [{"id": "a", "title": "Oak", "text": "The oak of Elmtown is 300 years old."}]
    prompts = [{"question": "How old is the oak of Elmtown?", "answer": "300"}]
    for name, entries in (("pages", pages), ("questions", prompts)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, entries)))
    changes = {"pages_file": str(tmp_path / "pages"), "train_file": str(tmp_path / "questions")}
    changes["index_dir"] = str(tmp_path / "index")
    for _ in range(2):  # the second time the page is in the index already
        taskset = make("search-file", changes)
        check_sound(taskset, 1, [lambda task: constant_policy("<answer>3</answer>")])
        assert [spec.name for spec in taskset.make_env(taskset.task(0)).tools] == [
            "search",
            "open",
            "find",
        ]
    with pytest.raises(EnvError, match="'pages_file'"):
        make("search-file", {"train_file": "x"})
    with pytest.raises(EnvError, match="no question of 6 hops"):
        make("search", {"hops": 6, "num_entities": 50, "num_questions": 1})
