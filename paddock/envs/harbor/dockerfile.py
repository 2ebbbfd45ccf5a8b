"""A Dockerfile as a list of steps: the part of the language that task environments use.

FROM is noted, not followed: this machine's system stands in for a base image. Stages beyond the
last, and copies out of other stages or images, are refused.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paddock.envs.harbor.task_config import TaskError

IGNORED = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "VOLUME", "MAINTAINER", "ONBUILD",
           "HEALTHCHECK"}  # fmt: skip
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
NAME = re.compile(r"\$(?:\{(\w+)(?:(:[-+])([^}]*))?\}|(\w+))")
# What base images decide about a container besides its files.
BASE_FOLDERS = (("t-bench/", "/app"),)


@dataclass(frozen=True, slots=True)
class RunInstruction:
    command: str | tuple[str, ...]  # for the shell, or a program with its arguments
    shell: tuple[str, ...] = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class CopyInstruction:
    sources: tuple[str, ...]
    target: str
    chmod: str = ""
    chown: str = ""
    unpack: bool = False  # ADD opens archives
    texts: tuple[tuple[str, str], ...] = ()  # name and text of files written in place


@dataclass(frozen=True, slots=True)
class EnvInstruction:
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class WorkdirInstruction:
    path: str


@dataclass(frozen=True, slots=True)
class UserInstruction:
    name: str


Instruction = (
    RunInstruction | CopyInstruction | EnvInstruction | WorkdirInstruction | UserInstruction
)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    base: str
    steps: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """One instruction, its lines joined."""

    line: int
    word: str
    rest: str
    texts: list[tuple[str, str]]  # name and text of here-documents


@dataclass(slots=True)
class _Reader:
    file: Path
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    base: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    steps: list[Instruction] = field(default_factory=list)

    def wrong(self, said: _Said, what: str) -> TaskError:
        return TaskError(f"{self.file}: line {said.line}: {what}")

    def filled(self, text: str) -> str:
        return substitute_variables(text, self.arguments | self.environment)


def read_dockerfile(file: Path) -> Dockerfile:
    reader = _Reader(file)
    for said in _instructions(file.read_text(encoding="utf-8")):
        _READ.get(said.word, _refuse)(reader, said)
    if not reader.base:
        raise TaskError(f"{file}: no FROM")
    return Dockerfile(reader.base, tuple(reader.steps))


def _instructions(text: str) -> Iterator[_Said]:
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        first, whole = i, ""
        while i < len(lines):
            line = lines[i]
            i += 1
            if line.lstrip().startswith("#") or (whole and not line.strip()):
                continue  # also between the lines of one instruction
            more = line.rstrip().endswith("\\")
            whole += line.rstrip()[:-1] if more else line
            if not more:
                break
        if not whole.strip():
            continue
        texts = []
        for mark in HEREDOC.finditer(whole):
            body: list[str] = []
            while i < len(lines) and lines[i].strip() != mark[2]:
                body.append(lines[i])
                i += 1
            i += 1
            texts.append((mark[2], "\n".join(body) + "\n"))
        word, _, rest = whole.strip().partition(" ")
        yield _Said(first + 1, word.upper(), rest.strip(), texts)


def substitute_variables(text: str, known: Mapping[str, str]) -> str:
    """Names replaced by values, unknown ones by nothing.

    >>> substitute_variables("$A-${B:-b}-${A:+a}-\\\\$A", {"A": "x"})
    'x-b-a-$A'
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[4]
        if found[2] == ":-":
            return known.get(name) or found[3]
        if found[2] == ":+":
            return found[3] if known.get(name) else ""
        return known.get(name, "")

    kept = text.replace("\\$", "\0")
    return NAME.sub(value, kept).replace("\0", "$")


def _from(reader: _Reader, said: _Said) -> None:
    if reader.base:
        raise reader.wrong(said, "more than one stage; only a container engine can build that")
    words = [word for word in reader.filled(said.rest).split() if not word.startswith("--")]
    if not words:
        raise reader.wrong(said, "FROM without an image")
    reader.base = words[0]
    reader.steps += [
        WorkdirInstruction(folder) for part, folder in BASE_FOLDERS if part in reader.base
    ]


def _arg(reader: _Reader, said: _Said) -> None:
    for pair in shlex.split(said.rest):
        name, _, value = pair.partition("=")
        reader.arguments[name] = reader.filled(value)


def _env(reader: _Reader, said: _Said) -> None:
    first = said.rest.split(None, 1)[0] if said.rest else ""
    if "=" in first:
        try:
            pairs = [pair.partition("=")[::2] for pair in shlex.split(said.rest)]
        except ValueError as error:
            raise reader.wrong(said, f"ENV: {error}") from None
    elif len(said.rest.split(None, 1)) == 2:
        pairs = [(first, said.rest.split(None, 1)[1])]
    else:
        raise reader.wrong(said, "ENV wants NAME=value")
    values = tuple((name, reader.filled(value)) for name, value in pairs)
    reader.environment.update(values)
    reader.steps.append(EnvInstruction(values))


def _workdir(reader: _Reader, said: _Said) -> None:
    reader.steps.append(WorkdirInstruction(reader.filled(said.rest.strip("\"'"))))


def _user(reader: _Reader, said: _Said) -> None:
    reader.steps.append(UserInstruction(reader.filled(said.rest).partition(":")[0]))


def _shell(reader: _Reader, said: _Said) -> None:
    words = _array(said.rest)
    if words is None:
        raise reader.wrong(said, "SHELL wants a list")
    reader.shell = words


def _run(reader: _Reader, said: _Said) -> None:
    rest = said.rest
    while rest.startswith("--"):
        rest = rest.partition(" ")[2].lstrip()
    command: str | tuple[str, ...]
    if said.texts:
        (_, body), *_ = said.texts
        only = HEREDOC.fullmatch(rest.strip())
        command = body if only else f"{rest}\n{body}{said.texts[0][0]}"
    else:
        command = _array(rest) or rest
    # Arguments are variables of the command; the shell itself fills them in.
    given = "".join(f"{name}={shlex.quote(value)}; " for name, value in reader.arguments.items())
    if isinstance(command, str) and given:
        command = given + command
    reader.steps.append(RunInstruction(command, reader.shell))


def _copy(reader: _Reader, said: _Said, unpack: bool = False) -> None:
    rest = said.rest
    options: dict[str, str] = {}
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        name, _, value = option[2:].partition("=")
        options[name] = value
        rest = rest.lstrip()
    if "from" in options:
        what = f"a copy from {options['from']!r}; only a container engine can do that"
        raise reader.wrong(said, what)
    words = list(_array(rest) or shlex.split(reader.filled(rest)))
    if len(words) < 2:
        raise reader.wrong(said, "a copy wants a source and a target")
    *sources, target = words
    plain = tuple(source for source in sources if not HEREDOC.fullmatch(source))
    for source in plain:
        if re.match(r"(https?|git)(://|@)", source):
            raise reader.wrong(said, f"{source} would have to be fetched; use RUN")
    chmod, chown = options.get("chmod", ""), options.get("chown", "")
    reader.steps.append(CopyInstruction(plain, target, chmod, chown, unpack, tuple(said.texts)))


def _add(reader: _Reader, said: _Said) -> None:
    _copy(reader, said, unpack=True)


def _ignore(reader: _Reader, said: _Said) -> None:
    """It says how a container is run, and we run it otherwise."""


def _refuse(reader: _Reader, said: _Said) -> None:
    raise reader.wrong(said, "no instruction of a Dockerfile")


def _array(text: str) -> tuple[str, ...] | None:
    """The list form of an instruction, if it is one."""
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return tuple(map(str, words)) if isinstance(words, list) else None


_READ = {
    "FROM": _from,
    "ARG": _arg,
    "ENV": _env,
    "WORKDIR": _workdir,
    "USER": _user,
    "SHELL": _shell,
    "RUN": _run,
    "COPY": _copy,
    "ADD": _add,
    **dict.fromkeys(IGNORED, _ignore),
}
