"""Environments `search` (generated pages and questions) and `search-file` (from files)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Annotated

from pydantic import Field

from paddock.config import RequiredFile
from paddock.envs.answer_format import AnswerFormatName
from paddock.envs.datasets import ListDataset, QADataset, QAExample, assign_split
from paddock.envs.env import Policy
from paddock.envs.jsonl import read_rows
from paddock.envs.qa import QAFileSettings, QASettings, QATaskset, verify_text
from paddock.envs.registry import EnvError
from paddock.envs.search.bm25 import BM25Index, WebPage
from paddock.envs.search.knowledge_graph import generate_graph
from paddock.envs.search.pages import parse_graph, write_pages
from paddock.envs.search.questions import MultiHopQuestion, filter_questions, generate_questions
from paddock.envs.search.solver import SearchSolver
from paddock.envs.search.tools import search_tools
from paddock.records import Task


class SearchSettings(QASettings):
    """A generated knowledge graph, its pages, and those of `num_questions` questions that pass the
    filters."""

    task_keys = (*QASettings.task_keys, "num_entities", "hops", "num_questions")

    answer_format: AnswerFormatName = "tag"
    max_turns: Annotated[int, Field(ge=2)] = 60
    num_entities: Annotated[int, Field(ge=50, le=20_000)] = 600
    hops: Annotated[int, Field(ge=1, le=6)] = 3
    num_questions: Annotated[int, Field(ge=1)] = 800

    def make_taskset(self) -> "SearchTaskset":
        rng = Random(f"{self.seed}/{self.num_entities}")
        graph = generate_graph(rng, self.num_entities)
        pages = write_pages(rng, graph)
        index = BM25Index()
        index.add(pages)
        drawn = generate_questions(rng, graph, hops=self.hops, count=self.num_questions)
        found = {
            question.text: question
            for question in filter_questions(drawn, index, parse_graph(pages))
        }
        if not found:
            raise EnvError(
                f"no question of {self.hops} hops passed the filters; increase num_entities"
            )
        problems = [_problem(question) for question in found.values()]
        train, test = (
            [problem for problem in problems if assign_split(problem.question) == split]
            for split in ("train", "test")
        )
        dataset = ListDataset(train, test, seed=self.seed)
        base = self.make_qa_taskset("search", dataset, verify_text, tools=search_tools(index))
        base_fields = {each.name: getattr(base, each.name) for each in fields(base)}
        return SearchTaskset(**base_fields, questions=found, index=index)


def _problem(question: MultiHopQuestion) -> QAExample:
    near = tuple(dict.fromkeys((question.start, *question.names[:-1])))
    return QAExample(question=question.text, answer=question.answer, near=near)


@dataclass(frozen=True, kw_only=True)
class SearchTaskset(QATaskset):
    questions: Mapping[str, MultiHopQuestion]  # by question text
    index: BM25Index

    def question(self, task: Task) -> MultiHopQuestion:
        return self.questions[self.example_of(task).question]

    def solver(self, task: Task) -> Policy:
        return self.partial_solver(task)

    def partial_solver(self, task: Task, *, hops: int | None = None) -> Policy:
        """A policy that follows at most `hops` hops; all of them if None."""
        return SearchSolver(self.question(task), self.answer_format.render, hops=hops)


class SearchFileSettings(QAFileSettings):
    """Questions and pages from files. With `index_dir`, pages are indexed there once, and later
    only new ones are added."""

    answer_format: AnswerFormatName = "tag"
    correct_weight: float = 1.0
    max_turns: Annotated[int, Field(ge=2)] = 60
    pages_file: str = ""  # JSONL or JSON, .gz or not: {"id", "title", "text"}
    index_dir: str = ""

    def validate_args(self) -> None:
        if not (self.pages_file or self.index_dir):
            raise EnvError("set 'pages_file' (a file of pages) or 'index_dir' (an existing index)")
        super().validate_args()

    def make_from_dataset(self, dataset: QADataset) -> QATaskset:
        return self._make(dataset, self._load_index())

    def make_without_data(self) -> QATaskset:
        self.validate_args()
        return self.without_calibration()._make(ListDataset([], []), BM25Index())

    def data_files(self) -> tuple[RequiredFile, ...]:
        pages = 'JSONL or a JSON list, .gz or not, one page per row: {"id", "title", "text"}'
        index = "an index, created by making this environment with 'pages_file'"
        # With pages_file the index is created if there is none.
        path, contains = (self.pages_file, pages) if self.pages_file else (self.index_dir, index)
        own = (RequiredFile(path=path, contains=contains),) if path else ()
        return (*own, *super().data_files())

    def _make(self, dataset: QADataset, index: BM25Index) -> QATaskset:
        tools = search_tools(index)
        return self.make_qa_taskset("search-file", dataset, verify_text, tools=tools)

    def _load_index(self) -> BM25Index:
        index = BM25Index(self.index_dir or None)
        found = [
            WebPage(id=row.get_text("id"), title=row.get_text("title"), text=row.get_text("text"))
            for row in (read_rows(self.pages_file) if self.pages_file else ())
        ]
        index.add(page for page in found if index.page(page.id) is None)
        return index
