"""HTML elements with automatic escaping: text is escaped unless it is `Html` already."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

VOID = {"meta", "input"}


class Html(str):
    """Text that is markup. Concatenated with other text it is a plain string, and escaped again."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """An element. `class_` becomes `class`, `aria_label` becomes `aria-label`; None omits one.

    >>> print(tag("b", "x < y", tag("i", "z"), class_="loud", title='"'))
    <b class="loud" title="&quot;">x &lt; y<i>z</i></b>
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    pairs = [f' {key}="{escape(str(value))}"' for key, value in named.items() if value is not None]
    opening = f"<{name}{''.join(pairs)}"
    if name in VOID:
        return Html(f"{opening} />")
    return Html(f"{opening}>{join(inside)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Concatenate parts, escaping those that are not `Html`."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> Html:
    """A table whose first `text_columns` are text and the others numbers.

    It scrolls on its own if it is wider than the page.
    """
    kinds = ["" if column < text_columns else "number" for column in range(len(head))]

    def cells(name: str, row: Sequence[str]) -> Html:
        return join(
            tag(name, text, class_=kind or None) for text, kind in zip(row, kinds, strict=True)
        )

    top = tag("thead", tag("tr", cells("th", head)))
    body = tag("tbody", join(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", top, body), class_="scroll")


def tiles(facts: Iterable[tuple[str, str, str]]) -> Html:
    """Headline figures: (name, value, remark) each."""
    return tag(
        "dl",
        join(
            tag("div", tag("dt", name), tag("dd", value, tag("small", remark) if remark else ""))
            for name, value, remark in facts
        ),
        class_="tiles",
    )


def details(summary: str, *inside: str) -> Html:
    return tag("details", tag("summary", summary), *inside)


def section(title: str, *inside: str) -> Html:
    return tag("section", tag("h2", title), *inside)


def page(title: str, *inside: str) -> str:
    """A self-contained HTML document, with styles and script inlined."""
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
