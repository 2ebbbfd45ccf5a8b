"""The worlds of search: questions about a generated region, or about pages of one's own."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Annotated

from pydantic import Field

from paddock.config import RequiredFile
from paddock.envs.answers import FormName
from paddock.envs.ask import AskSettings, AskWorld, FileSettings, by_plain_text
from paddock.envs.problems import Listed, Problem, Problems, split_of
from paddock.envs.registry import WorldError
from paddock.envs.rows import rows
from paddock.envs.search.follow import Follower
from paddock.envs.search.graph import draw_graph
from paddock.envs.search.index import Index, Page
from paddock.envs.search.pages import read_back, write_pages
from paddock.envs.search.questions import Question, draw_questions, kept
from paddock.envs.search.tools import search_tools
from paddock.envs.world import Policy
from paddock.records import Task


class SearchSettings(AskSettings):
    """A region drawn by chance, its pages, and the questions that are left of `questions` when
    the filters are done with them."""

    shaped_by = (*AskSettings.shaped_by, "entities", "hops", "questions")

    form: FormName = "tag"
    turns: Annotated[int, Field(ge=2)] = 60
    entities: Annotated[int, Field(ge=50, le=20_000)] = 600
    hops: Annotated[int, Field(ge=1, le=6)] = 3
    questions: Annotated[int, Field(ge=1)] = 800

    def world(self) -> "SearchWorld":
        rng = Random(f"{self.seed}/{self.entities}")
        graph = draw_graph(rng, self.entities)
        pages = write_pages(rng, graph)
        index = Index()
        index.add(pages)
        drawn = draw_questions(rng, graph, hops=self.hops, count=self.questions)
        found = {question.text: question for question in kept(drawn, index, read_back(pages))}
        if not found:
            raise WorldError(f"no question of {self.hops} hops is left; more entities may help")
        problems = [_problem(question) for question in found.values()]
        train, test = (
            [problem for problem in problems if split_of(problem.question) == split]
            for split in ("train", "test")
        )
        listed = Listed(train, test, seed=self.seed)
        asking = self.asking("search", listed, by_plain_text, tools=search_tools(index))
        taken = {each.name: getattr(asking, each.name) for each in fields(asking)}
        return SearchWorld(**taken, questions=found, index=index)


def _problem(question: Question) -> Problem:
    near = tuple(dict.fromkeys((question.start, *question.names[:-1])))
    return Problem(question=question.text, answer=question.answer, near=near)


@dataclass(frozen=True, kw_only=True)
class SearchWorld(AskWorld):
    questions: Mapping[str, Question]  # by their text
    index: Index

    def question(self, task: Task) -> Question:
        return self.questions[self.problem(task).question]

    def solver(self, task: Task) -> Policy:
        return self.follower(task)

    def follower(self, task: Task, *, hops: int | None = None) -> Policy:
        """A player that looks up so many steps, and all of them if it is not said how many."""
        return Follower(self.question(task), self.form.say, hops=hops)


class SearchFileSettings(FileSettings):
    """Questions of a file about pages of a file. With `index`, a folder, pages are indexed there
    once, and later only those that are new."""

    form: FormName = "tag"
    correct: float = 1.0
    turns: Annotated[int, Field(ge=2)] = 60
    pages: str = ""  # JSONL or JSON, .gz or not: {"id", "title", "text"}
    index: str = ""

    def check(self) -> None:
        if not (self.pages or self.index):
            raise WorldError("name a file of pages with 'pages', or a folder with 'index'")
        super().check()

    def over(self, problems: Problems) -> AskWorld:
        return self._over(problems, self._indexed())

    def open_without_data(self) -> AskWorld:
        self.check()
        return self.uncalibrated()._over(Listed([], []), Index())

    def data_files(self) -> tuple[RequiredFile, ...]:
        pages = 'JSONL or a JSON list, .gz or not, a page a row: {"id", "title", "text"}'
        made = "an index, made by opening this environment with 'pages'"
        # With pages an index is made if there is none.
        path, contains = (self.pages, pages) if self.pages else (self.index, made)
        own = (RequiredFile(path=path, contains=contains),) if path else ()
        return (*own, *super().data_files())

    def _over(self, problems: Problems, index: Index) -> AskWorld:
        tools = search_tools(index)
        return self.asking("search-file", problems, by_plain_text, tools=tools)

    def _indexed(self) -> Index:
        index = Index(self.index or None)
        found = [
            Page(id=row.text("id"), title=row.text("title"), text=row.text("text"))
            for row in (rows(self.pages) if self.pages else ())
        ]
        index.add(page for page in found if index.page(page.id) is None)
        return index
