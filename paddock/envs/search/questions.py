"""Questions that take several look-ups, and the three filters they must pass."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from paddock.envs.search.bm25 import BM25Index
from paddock.envs.search.knowledge_graph import Fact, Hop, Kind, KnowledgeGraph
from paddock.envs.search.pages import parse_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHopQuestion:
    """What is reached from `start` by the steps, each of which leads to one thing."""

    start: str
    steps: tuple[Hop, ...]
    names: tuple[str, ...]  # of what each step leads to; the last is the answer

    @property
    def text(self) -> str:
        said = self.start
        for step in self.steps:
            said = step.describe(said)
        return f"What is the name of {said}?"

    @property
    def answer(self) -> str:
        return self.names[-1]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What one must know."""
        here, found = self.start, []
        for step, there in zip(self.steps, self.names, strict=True):
            pair = (here, there) if step.ahead else (there, here)
            found.append(Fact(pair[0], step.relation, pair[1]))
            here = there
        return tuple(found)


def generate_questions(
    rng: Random, graph: KnowledgeGraph, *, hops: int, count: int, uses: int = 3
) -> list[MultiHopQuestion]:
    """Up to `count` questions of so many hops that start from what is rarely mentioned. No fact is
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
        ways = [way for way in graph.unique_hops(here) if way[1] not in (start, *names)]
        if not ways:
            return None
        step, here = rng.choice(ways)
        steps.append(step)
        names.append(here)
    return MultiHopQuestion(start=start, steps=tuple(steps), names=tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionProbe:
    """How a question fared with players that should fail it: answers given without any tool, and
    what an early agent answered after how many tool calls."""

    guesses: tuple[str, ...]
    agent_answer: str
    agent_calls: int


def filter_reason(
    question: MultiHopQuestion, trial: QuestionProbe, stated: KnowledgeGraph, *, few: int = 3
) -> str | None:
    """Why a question is not worth asking; None: it is. The filters of the paper: a player without
    tools knows the answer in any of its tries; an early agent finds it within a few calls; or it
    does not hold when checked both ways against what the pages state."""
    if question.answer in trial.guesses:
        return "known without tools"
    if trial.agent_answer == question.answer and trial.agent_calls <= few:
        return f"found within {trial.agent_calls} calls"
    return find_inconsistency(question, stated)


def find_inconsistency(question: MultiHopQuestion, stated: KnowledgeGraph) -> str | None:
    """The check both ways, in a graph that was read back from the pages. Ahead: from the start
    every step must lead to the one thing it should. Back: of all candidates of the right kind only
    the answer may lead back to the start."""
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
    """Whether the steps, taken back from a candidate, can end at the start. A step taken back may
    lead to many; it is enough that one of them fits."""
    here = {candidate}
    for step in reversed(question.steps):
        back = Hop(step.relation, not step.ahead)
        here = {there for name in here for there in stated.neighbours(name, back)}
    return question.start in here


def prior_guesses(graph: KnowledgeGraph, kind: Kind, tries: int = 8) -> tuple[str, ...]:
    """What one who knows the region by hearsay would say: its best-known names of that kind."""
    known = [name for name, _ in graph.mentions.most_common() if graph.kinds[name] == kind]
    return tuple(known[:tries])


def shallow_search_agent(
    index: BM25Index, question: MultiHopQuestion, calls: int = 3
) -> tuple[str, int]:
    """What one finds who searches for the whole question, opens the best pages, and takes the first
    thing of the right kind that a page says of what was asked last."""
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
    """The questions that pass all three filters, tried by the scripted players above."""
    known = {kind: prior_guesses(stated, kind) for kind in set(stated.kinds.values())}
    for question in questions:
        answer, made = shallow_search_agent(index, question)
        trial = QuestionProbe(
            guesses=known[question.steps[-1].leads_to()],
            agent_answer=answer,
            agent_calls=made,
        )
        if filter_reason(question, trial, stated) is None:
            yield question
