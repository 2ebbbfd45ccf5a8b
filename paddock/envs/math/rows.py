"""GSM8K and MATH rows."""

from paddock.envs.answer_format import extract_boxed_answer
from paddock.envs.datasets import QAExample
from paddock.envs.jsonl import JsonRow, RowError


def parse_row(row: JsonRow) -> QAExample | None:
    r"""The problem of a row; None if its answer is empty, as in two rows of MATH.

    GSM8K  {"question", "answer": "... #### 72"}
    MATH   {"problem", "solution": "... \boxed{72} ..."} or {"problem", "answer": "72"}

    >>> parse_row(JsonRow("x:1", {"question": "2 + 2?", "answer": "Count. #### 4"}))
    QAExample(question='2 + 2?', answer='4', near=(), hidden='', any_order=False)
    """
    question = row.get_text("question", "problem", "prompt")
    if "answer" in row.fields or "solution" not in row.fields:
        answer = row.get_text("answer").rpartition("####")[2].strip()
    elif (found := extract_boxed_answer(row.get_text("solution"))) is not None:
        answer = found
    else:
        raise RowError(f"{row.where}: no answer: the solution has no \\boxed{{}}")
    return QAExample(question=question.strip(), answer=answer) if answer else None
