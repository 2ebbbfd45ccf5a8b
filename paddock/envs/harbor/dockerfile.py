"""Dockerfile parser for the instructions that task environments use.

FROM is recorded but not pulled: this machine's system replaces the base image. Multi-stage builds
and copies from other stages or images are rejected.
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
# Working directories that base images set.
BASE_WORKDIRS = (("t-bench/", "/app"),)


@dataclass(frozen=True, slots=True)
class RunInstruction:
    command: str | tuple[str, ...]  # for the shell, or argv
    shell: tuple[str, ...] = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class CopyInstruction:
    sources: tuple[str, ...]
    target: str
    chmod: str = ""
    chown: str = ""
    unpack: bool = False  # ADD extracts archives
    texts: tuple[tuple[str, str], ...] = ()  # name and content of here-documents


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
class _Line:
    """One instruction with its continuation lines joined."""

    number: int
    keyword: str
    rest: str
    texts: list[tuple[str, str]]  # name and content of here-documents


@dataclass(slots=True)
class _Reader:
    file: Path
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    base: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    steps: list[Instruction] = field(default_factory=list)

    def error(self, line: _Line, message: str) -> TaskError:
        return TaskError(f"{self.file}: line {line.number}: {message}")

    def substitute(self, text: str) -> str:
        return substitute_variables(text, self.arguments | self.environment)


def read_dockerfile(file: Path) -> Dockerfile:
    """Parse a Dockerfile. Raises TaskError with the line of what is not supported."""
    reader = _Reader(file)
    for line in _instructions(file.read_text(encoding="utf-8")):
        _HANDLERS.get(line.keyword, _reject)(reader, line)
    if not reader.base:
        raise TaskError(f"{file}: no FROM")
    return Dockerfile(reader.base, tuple(reader.steps))


def _instructions(text: str) -> Iterator[_Line]:
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        first, joined = i, ""
        while i < len(lines):
            line = lines[i]
            i += 1
            if line.lstrip().startswith("#") or (joined and not line.strip()):
                continue  # comments may stand between the lines of one instruction
            more = line.rstrip().endswith("\\")
            joined += line.rstrip()[:-1] if more else line
            if not more:
                break
        if not joined.strip():
            continue
        texts = []
        for mark in HEREDOC.finditer(joined):
            body: list[str] = []
            while i < len(lines) and lines[i].strip() != mark[2]:
                body.append(lines[i])
                i += 1
            i += 1
            texts.append((mark[2], "\n".join(body) + "\n"))
        keyword, _, rest = joined.strip().partition(" ")
        yield _Line(first + 1, keyword.upper(), rest.strip(), texts)


def substitute_variables(text: str, variables: Mapping[str, str]) -> str:
    """The text with $NAME and ${NAME} replaced; unknown names become empty.

    >>> substitute_variables("$A-${B:-b}-${A:+a}-\\\\$A", {"A": "x"})
    'x-b-a-$A'
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if match[2] == ":-":
            return variables.get(name) or match[3]
        if match[2] == ":+":
            return match[3] if variables.get(name) else ""
        return variables.get(name, "")

    escaped = text.replace("\\$", "\0")
    return NAME.sub(value, escaped).replace("\0", "$")


def _from(reader: _Reader, line: _Line) -> None:
    if reader.base:
        raise reader.error(line, "multi-stage builds need backend = 'container'")
    words = [word for word in reader.substitute(line.rest).split() if not word.startswith("--")]
    if not words:
        raise reader.error(line, "FROM must name an image")
    reader.base = words[0]
    reader.steps += [
        WorkdirInstruction(folder) for part, folder in BASE_WORKDIRS if part in reader.base
    ]


def _arg(reader: _Reader, line: _Line) -> None:
    for pair in shlex.split(line.rest):
        name, _, value = pair.partition("=")
        reader.arguments[name] = reader.substitute(value)


def _env(reader: _Reader, line: _Line) -> None:
    first = line.rest.split(None, 1)[0] if line.rest else ""
    if "=" in first:
        try:
            pairs = [pair.partition("=")[::2] for pair in shlex.split(line.rest)]
        except ValueError as error:
            raise reader.error(line, f"ENV: {error}") from None
    elif len(line.rest.split(None, 1)) == 2:
        pairs = [(first, line.rest.split(None, 1)[1])]
    else:
        raise reader.error(line, "ENV must be NAME=value")
    values = tuple((name, reader.substitute(value)) for name, value in pairs)
    reader.environment.update(values)
    reader.steps.append(EnvInstruction(values))


def _workdir(reader: _Reader, line: _Line) -> None:
    reader.steps.append(WorkdirInstruction(reader.substitute(line.rest.strip("\"'"))))


def _user(reader: _Reader, line: _Line) -> None:
    reader.steps.append(UserInstruction(reader.substitute(line.rest).partition(":")[0]))


def _shell(reader: _Reader, line: _Line) -> None:
    words = _array(line.rest)
    if words is None:
        raise reader.error(line, "SHELL must be a JSON list")
    reader.shell = words


def _run(reader: _Reader, line: _Line) -> None:
    rest = line.rest
    while rest.startswith("--"):
        rest = rest.partition(" ")[2].lstrip()
    command: str | tuple[str, ...]
    if line.texts:
        (_, body), *_ = line.texts
        only = HEREDOC.fullmatch(rest.strip())
        command = body if only else f"{rest}\n{body}{line.texts[0][0]}"
    else:
        command = _array(rest) or rest
    # Build arguments become shell variables of the command.
    assignments = "".join(
        f"{name}={shlex.quote(value)}; " for name, value in reader.arguments.items()
    )
    if isinstance(command, str) and assignments:
        command = assignments + command
    reader.steps.append(RunInstruction(command, reader.shell))


def _copy(reader: _Reader, line: _Line, unpack: bool = False) -> None:
    rest = line.rest
    options: dict[str, str] = {}
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        name, _, value = option[2:].partition("=")
        options[name] = value
        rest = rest.lstrip()
    if "from" in options:
        message = f"COPY --from={options['from']} needs backend = 'container'"
        raise reader.error(line, message)
    words = list(_array(rest) or shlex.split(reader.substitute(rest)))
    if len(words) < 2:
        raise reader.error(line, "COPY and ADD must have a source and a target")
    *sources, target = words
    plain = tuple(source for source in sources if not HEREDOC.fullmatch(source))
    for source in plain:
        if re.match(r"(https?|git)(://|@)", source):
            raise reader.error(line, f"{source} cannot be downloaded by ADD; use RUN")
    chmod, chown = options.get("chmod", ""), options.get("chown", "")
    reader.steps.append(CopyInstruction(plain, target, chmod, chown, unpack, tuple(line.texts)))


def _add(reader: _Reader, line: _Line) -> None:
    _copy(reader, line, unpack=True)


def _ignore(reader: _Reader, line: _Line) -> None:
    """Skip an instruction that only affects how a container is run."""


def _reject(reader: _Reader, line: _Line) -> None:
    raise reader.error(line, f"unknown instruction {line.keyword}")


def _array(text: str) -> tuple[str, ...] | None:
    """The words of an instruction in exec form (a JSON list), or None."""
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return tuple(map(str, words)) if isinstance(words, list) else None


_HANDLERS = {
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
