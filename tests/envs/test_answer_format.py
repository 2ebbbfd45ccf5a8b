import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.envs.answer_format import (
    ANSWER_FORMATS,
    answers_match,
    extract_boxed_answer,
    extract_last_line,
    extract_last_number,
    extract_number,
    extract_tagged_answer,
    parse_number,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed {a_{b}} then \fbox{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"} \boxed{3} }", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
        (r"\boxed{\cases{1\\2\\}}", r"\cases{1\\2\\}"),
        (r"so $x = \boxed 2$, not 3.", "2"),
        (r"\boxed -1,234.5.", "-1,234.5"),
        (r"\boxed 1 or \boxed{2}", "2"),
        (r"Put it in \boxed on the last line", None),
        ("no box {1}", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text, found):
    assert extract_boxed_answer(text) == found


def test_a_hostile_reply_is_parsed_in_linear_time():
    assert extract_boxed_answer(r"\boxed{" * 200_000) is None  # would take hours if quadratic
    assert extract_tagged_answer("<answer>" * 200_000) is None


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (extract_last_number, "It is 3, no, 4.", "4"),
        (extract_last_number, "from -5 to 1,234.5 or 6/7", "6/7"),
        (extract_last_number, "it is .5, then -.25.", "-.25"),
        (extract_last_number, "see p.5", "5"),
        (extract_last_number, "so x = \u22123/4", "\u22123/4"),
        (extract_last_number, "none", None),
        (extract_number, r"\boxed{7} and 8", "7"),
        (extract_number, "1 + 1\n#### 1,000", "1,000"),
        (extract_tagged_answer, "<answer>\nx\n</answer>", "x"),
        (extract_tagged_answer, "<answer>x", None),
        (extract_last_line, "a\nFinal answer: b \n\n", "b"),
        (extract_last_line, " \n", None),
    ],
)
def test_answers_are_extracted_in_every_format(find, text, found):
    assert find(text) == found


@given(
    st.text(alphabet="ab1 ./-", min_size=1).filter(str.strip),
    st.sampled_from(sorted(ANSWER_FORMATS)),
)
def test_a_formatted_answer_is_extracted_again(answer, form):
    answer = answer.strip()
    found = ANSWER_FORMATS[form].extract(ANSWER_FORMATS[form].render(answer))
    assert form == "number" or found.rstrip("\n") == answer


@pytest.mark.parametrize(
    ("reply", "right", "verdict"),
    [
        ("1,000", "1000", True),
        ("$18.00", "18", True),
        ("18%", "18", True),
        (r"\dfrac{3}{6}", "0.5", True),
        ("0.333", "1/3", False),
        ("-7", "7", False),
        ("\u22127", "-7", True),
        ("1 3/4", "7/4", True),
        ("1 3/4", "13/4", False),
        (r"-1\frac{3}{4}", "-1.75", True),
        (r"1\dfrac{3}{4}", "13/4", False),
        (r"- \frac { 3 } { 4 }", "-0.75", True),
        (r"2 1/2\%", "2.5", True),
        ("12 345", "12345", True),
        ("12", "12.0.", True),
        (r"\text{ Oak}", "oak", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("x+1", "1+x", None),
        ("", "x", None),
        ("9" * 1000, "9", None),
        ("1/0", "1", None),
    ],
)
def test_plain_answers_are_compared_without_a_verifier(reply, right, verdict):
    assert answers_match(reply, right) is verdict


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_parsed_exactly(fraction):
    assert parse_number(str(fraction)) == fraction


@given(st.text(max_size=80))
def test_parsing_a_value_never_raises(text):
    parse_number(text)
