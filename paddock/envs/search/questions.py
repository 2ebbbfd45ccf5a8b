"""Multi-hop questions and the three filters they must pass."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from paddock.envs.search.bm25 import BM25Index
from paddock.envs.search.knowledge_graph import Fact, Hop, Kind, KnowledgeGraph
from paddock.envs.search.pages import parse_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHopQuestion:
    """The entity reached from `start` by the hops, each of which leads to exactly one entity."""

    start: str
    steps: tuple[Hop, ...]
    names: tuple[str, ...]  # entity after each hop; the last is the answer

    @property
    def text(self) -> str:
        description = self.start
        for step in self.steps:
            description = step.describe(description)
        return f"What is the name of {description}?"

    @property
    def answer(self) -> str:
        return self.names[-1]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The facts needed to answer."""
        here, found = self.start, []
        for step, there in zip(self.steps, self.names, strict=True):
            pair = (here, there) if step.ahead else (there, here)
            found.append(Fact(pair[0], step.relation, pair[1]))
            here = there
        return tuple(found)


def generate_questions(
    rng: Random, graph: KnowledgeGraph, *, hops: int, count: int, uses: int = 3
) -> list[MultiHopQuestion]:
    """Up to `count` questions of `hops` hops that start from rarely mentioned entities. No fact is
    used by more than `uses` of them."""
    mentions = graph.mentions
    median = sorted(mentions.values())[len(mentions) // 2]
    starts = [name for name in graph.kinds if mentions[name] <= median]
    used: Counter[Fact] = Counter()
    seen: set[str] = set()
    questions: list[MultiHopQuestion] = []
    for _ in range(10 * count):
        if len(questions) == count:
            break
        question = _walk(rng, graph, rng.choice(starts), hops)
        if question is None or question.text in seen:
            continue
        if max(used[fact] for fact in question.facts) < uses:
            used.update(question.facts)
            seen.add(question.text)
            questions.append(question)
    return questions


def _walk(rng: Random, graph: KnowledgeGraph, start: str, hops: int) -> MultiHopQuestion | None:
    here = start
    steps: list[Hop] = []
    names: list[str] = []
    for _ in range(hops):
        choices = [hop for hop in graph.unique_hops(here) if hop[1] not in (start, *names)]
        if not choices:
            return None
        step, here = rng.choice(choices)
        steps.append(step)
        names.append(here)
    return MultiHopQuestion(start=start, steps=tuple(steps), names=tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionProbe:
    """Results of weak baselines that should fail: guesses without tools, and the answer of a
    shallow search agent with its number of tool calls."""

    guesses: tuple[str, ...]
    agent_answer: str
    agent_calls: int


def filter_reason(
    question: MultiHopQuestion, probe: QuestionProbe, stated: KnowledgeGraph, *, few: int = 3
) -> str | None:
    """Why a question is dropped; None if it passes. The filters of the GLM-5 paper: the answer is
    among the guesses without tools; a shallow agent finds it within a few calls; or it fails the
    bidirectional check against what the pages state."""
    if question.answer in probe.guesses:
        return "known without tools"
    if probe.agent_answer == question.answer and probe.agent_calls <= few:
        return f"found within {probe.agent_calls} calls"
    return find_inconsistency(question, stated)


def find_inconsistency(question: MultiHopQuestion, stated: KnowledgeGraph) -> str | None:
    """The bidirectional check, in a graph parsed from the pages. Forward: every hop must lead to
    exactly the expected entity. Backward: among all candidates of the right kind, only the answer
    may lead back to the start."""
    here = question.start
    for step, name in zip(question.steps, question.names, strict=True):
        reached = stated.neighbours(here, step)
        if name not in reached:
            return f"the pages do not say that {step.describe(here)} is {name}"
        if len(reached) > 1:
            return f"{step.describe(here)} is not one but {len(reached)}"
        here = name
    kind = question.steps[-1].leads_to()
    candidates = [name for name, its in stated.kinds.items() if its == kind]
    fit = [name for name in candidates if _leads_back(stated, question, name)]
    return None if fit == [question.answer] else f"candidates that fit: {', '.join(fit)}"


def _leads_back(stated: KnowledgeGraph, question: MultiHopQuestion, candidate: str) -> bool:
    """Whether the hops, followed backward from a candidate, can reach the start. A backward hop may
    lead to many entities; one of them is enough."""
    here = {candidate}
    for step in reversed(question.steps):
        back = Hop(step.relation, not step.ahead)
        here = {there for name in here for there in stated.neighbours(name, back)}
    return question.start in here


def prior_guesses(graph: KnowledgeGraph, kind: Kind, tries: int = 8) -> tuple[str, ...]:
    """Guesses from prior knowledge: the most mentioned entities of that kind."""
    known = [name for name, _ in graph.mentions.most_common() if graph.kinds[name] == kind]
    return tuple(known[:tries])


def shallow_search_agent(
    index: BM25Index, question: MultiHopQuestion, calls: int = 3
) -> tuple[str, int]:
    """Searches for the whole question, opens the best pages, and answers with the first entity that
    a page states for the last relation. Returns the answer and the number of calls."""
    last = question.steps[-1]
    made = 1
    for hit in index.search(question.text, k=calls - 1):
        made += 1
        for fact in parse_facts(hit.page.text):
            if fact.relation == last.relation:
                return (fact.object if last.ahead else fact.subject), made
    return "", made


def filter_questions(
    questions: Iterable[MultiHopQuestion], index: BM25Index, stated: KnowledgeGraph
) -> Iterator[MultiHopQuestion]:
    """The questions that pass all three filters, probed by the baselines above."""
    known = {kind: prior_guesses(stated, kind) for kind in set(stated.kinds.values())}
    for question in questions:
        answer, made = shallow_search_agent(index, question)
        probe = QuestionProbe(
            guesses=known[question.steps[-1].leads_to()],
            agent_answer=answer,
            agent_calls=made,
        )
        if filter_reason(question, probe, stated) is None:
            yield question
