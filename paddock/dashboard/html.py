"""HTML that cannot be broken into: text is escaped unless it is `Html` already."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

VOID = {"meta", "input"}


class Html(str):
    """Text that is markup already. Joined to other text by hand it is text again, and escaped."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """An element. `class_` is `class`, `aria_label` is `aria-label`; None leaves one out.

    >>> print(tag("b", "x < y", tag("i", "z"), class_="loud", title='"'))
    <b class="loud" title="&quot;">x &lt; y<i>z</i></b>
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    words = [f' {key}="{escape(str(value))}"' for key, value in given.items() if value is not None]
    opening = f"<{name}{''.join(words)}"
    if name in VOID:
        return Html(f"{opening} />")
    return Html(f"{opening}>{join(inside)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Html:
    """A table whose first `words` columns are text and whose others are numbers. It scrolls by
    itself where it is too wide for the page."""
    kinds = ["" if column < words else "number" for column in range(len(head))]

    def cells(name: str, row: Sequence[str]) -> Html:
        return join(
            tag(name, text, class_=kind or None) for text, kind in zip(row, kinds, strict=True)
        )

    top = tag("thead", tag("tr", cells("th", head)))
    body = tag("tbody", join(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", top, body), class_="scroll")


def tiles(facts: Iterable[tuple[str, str, str]]) -> Html:
    """The few figures to see first: what, how much, and a word beside it."""
    return tag(
        "dl",
        join(
            tag("div", tag("dt", name), tag("dd", value, tag("small", beside) if beside else ""))
            for name, value, beside in facts
        ),
        class_="tiles",
    )


def details(summary: str, *inside: str) -> Html:
    return tag("details", tag("summary", summary), *inside)


def section(title: str, *inside: str) -> Html:
    return tag("section", tag("h2", title), *inside)


def page(title: str, *inside: str) -> str:
    """A whole document that needs nothing but itself."""
    here = files("paddock.dashboard")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(here.joinpath("page.css").read_text("utf-8"))),
    )
    script = tag("script", Html(here.joinpath("page.js").read_text("utf-8")))
    body = tag("body", tag("main", *inside), script)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
