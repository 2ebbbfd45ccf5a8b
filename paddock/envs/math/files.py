"""Problems in the layouts of GSM8K and MATH."""

from paddock.envs.answers import boxed
from paddock.envs.problems import Problem
from paddock.envs.rows import Row, RowError


def problem(row: Row) -> Problem | None:
    r"""A problem of either layout; None if its answer is empty, as two rows of MATH are.

    GSM8K  {"question", "answer": "... #### 72"}
    MATH   {"problem", "solution": "... \boxed{72} ..."} or {"problem", "answer": "72"}

    >>> problem(Row("x:1", {"question": "2 + 2?", "answer": "Count. #### 4"}))
    Problem(question='2 + 2?', answer='4', near=(), hidden='', any_order=False)
    """
    question = row.text("question", "problem", "prompt")
    if "answer" in row.fields or "solution" not in row.fields:
        answer = row.text("answer").rpartition("####")[2].strip()
    elif (found := boxed(row.text("solution"))) is not None:
        answer = found
    else:
        raise RowError(f"{row.where}: no answer: the solution has no box")
    return Problem(question=question.strip(), answer=answer) if answer else None
