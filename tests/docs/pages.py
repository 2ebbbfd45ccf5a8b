"""Fenced blocks of README and docs, in order: commands, code and files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(.*)$")
LANGUAGES = {"sh", "python", "toml", "json", "text"}  # of blocks; every block must have one


@dataclass(frozen=True)
class Block:
    """A fenced block; a file name after its language makes it that file."""

    page: str
    line: int
    language: str
    file: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Commands of a shell block, with continuation lines joined and comments removed."""
        if self.language != "sh" or self.file:
            return []
        whole = self.text.replace("\\\n", " ")
        bare = (re.sub(r"(^|\s)#\s.*$", "", line).strip() for line in whole.splitlines())
        return [line for line in bare if line]


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found]


def blocks(page: str) -> list[Block]:
    return list(_blocks(page, (ROOT / page).read_text()))


def _blocks(page: str, text: str) -> Iterator[Block]:
    """
    >>> found = _blocks("p", "```sh\\nls\\n```\\n```json a.json\\n{}\\n```")
    >>> [(block.line, block.language, block.file, block.text) for block in found]
    [(1, 'sh', '', 'ls\\n'), (4, 'json', 'a.json', '{}\\n')]
    """
    inside: list[str] | None = None
    words: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and inside is None:
            inside, words, start = [], fence[1].split(), number
        elif fence and inside is not None:
            language, file = (*words, "", "")[:2]
            yield Block(page, start, language, file, "\n".join(inside) + "\n")
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}:{start}: a block that does not end"


def every_command() -> list[str]:
    return [command for page in pages() for block in blocks(page) for command in block.commands]


def inline(page: str) -> list[str]:
    """Inline code outside of blocks."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def links(page: str) -> list[str]:
    """Relative links."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [to for to in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in to]
