"""Two programs for two sandboxes, where this package is not: one runs an answer and calls what it
defines, one runs the tests. Only data goes between them, by way of whoever started both: lines of
JSON on standard input and output. Standard library only.

answer   is told to run a program or to use an object of it, and replies with a value or an error
judge    is told the tests. It asks for what they need of the answer, is sent the replies, and ends
         with what the tests that failed complained about

The judge compares values of its own: what came over the line as data was rebuilt here from built-in
types. Objects of other types stay where they are; the judge holds a reference, equal only to
itself. So an answer may do to its own process what it likes: it can only reply.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

MAX_ERROR_CHARS = 300  # characters
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_WRITTEN: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda said: int(said, 16)),  # in decimals, long ones are refused
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, complex.__repr__, complex),
    "bytes": ((bytes, bytearray), lambda value: value.hex(), bytes.fromhex),
}
# Raised inside map() or next(), these would end a test's loop instead of failing the test.
_SILENT = (StopIteration, StopAsyncIteration)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON that keeps its type; `refer` names what is no data.

    >>> encode([1, True, ("a", 2.0)], str)
    [{'int': '0x1'}, True, {'tuple': ['a', {'float': '0x1.0000000000000p+1'}]}]
    """
    if value is None or isinstance(value, bool | str):
        return value
    for name, (kind, written, _) in _WRITTEN.items():
        if isinstance(value, kind):
            return {name: written(value)}
    if isinstance(value, list):
        return [encode(each, refer) for each in value]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, refer), encode(each, refer)] for key, each in pairs]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(each, refer) for each in value]}
    if type(value) is type and hasattr(builtins, value.__name__):
        return {"type": value.__name__}
    return refer(value)


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """What was encoded, of built-in types only; `find` knows what a reference names.

    >>> decode(encode({"a": {1, 2}}, str), str)
    {'a': {1, 2}}
    """
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(each, find) for each in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("it is no value")
    ((name, said),) = data.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(each, find) for each in said)
    if name in _WRITTEN:
        return _WRITTEN[name][2](said)
    if name == "dict":
        return {decode(key, find): decode(each, find) for key, each in said}
    if name == "type" and isinstance(found := getattr(builtins, said), type):
        return found
    return find(data)


def error_text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]


def open_channel() -> tuple[Iterator[dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """What comes in and a way to reply. What is printed from here on goes nowhere."""
    told, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)

    def say(reply: dict[str, Any]) -> None:
        rest = json.dumps(reply).encode() + b"\n"
        while rest:
            rest = rest[os.write(out, rest) :]

    return (json.loads(line) for line in told), say


class SolutionServer:
    """An answer's program and its objects."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "answer"}
        self.kept: list[Any] = []

    def to_reference(self, value: Any) -> dict[str, int]:
        for number, kept in enumerate(self.kept):
            if kept is value:
                return {"object": number}
        self.kept.append(value)
        return {"object": len(self.kept) - 1}

    def from_reference(self, reference: Any) -> Any:
        if "name" in reference:
            return self.names[reference["name"]]
        return self.kept[reference["object"]]

    def execute(self, what: str, *given: Any) -> Any:
        if what == "run":
            exec(compile(given[0], "<answer>", "exec"), self.names)
            return None
        of, *rest = decode(list(given), self.from_reference)
        match what:
            case "call":
                return of(*rest[0], **rest[1])
            case "set":
                return setattr(of, *rest)
        kinds: dict[str, Callable[..., Any]] = {
            "get": getattr, "list": list, "len": len, "bool": bool
        }  # fmt: skip
        return kinds[what](of, *rest)


def run_solution() -> None:
    heard, say = open_channel()
    mine = SolutionServer()
    for asked in heard:
        try:
            reply = {"value": encode(mine.execute(*asked["do"]), mine.to_reference)}
        except BaseException as error:  # SystemExit is a complaint, too
            reply = {"error": type(error).__name__, "text": error_text(error)}
        say(reply)


class RemoteObject:
    """Something of the answer's, as the tests see it."""

    def __init__(self, reference: Any, ask: Callable[..., Any]) -> None:
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_ask", ask)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._ask("call", self, given, named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list", self))

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __bool__(self) -> bool:
        return self._ask("bool", self) is True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)


class UnitTestRunner:
    """Tests, and a line to the answer that they are about."""

    def __init__(
        self, heard: Iterator[dict[str, Any]], say: Callable[[dict[str, Any]], None]
    ) -> None:
        self.heard, self.say = heard, say
        self.names: dict[str, Any] = {"__name__": "tests"}
        self.remotes: dict[str, RemoteObject] = {}
        self.passed = 0

    def from_reference(self, reference: Any) -> RemoteObject:
        """The same object for the same reference: it is to be equal to itself."""
        return self.remotes.setdefault(json.dumps(reference), RemoteObject(reference, self.request))

    def to_reference(self, value: Any) -> Any:
        if isinstance(value, RemoteObject):
            return value._reference
        raise TypeError(f"a {type(value).__name__} cannot be handed to the answer")

    def request(self, what: str, *given: Any) -> Any:
        data = [encode(each, self.to_reference) for each in given]
        self.say({"ask": {"do": [what, *data]}, "passed": self.passed})
        reply = next(self.heard)
        if "error" in reply:
            raise rebuild_exception(str(reply["error"]), str(reply.get("text", "")))
        return decode(reply["value"], self.from_reference)

    def run(self, code: str) -> None:
        """Run a piece of the tests. Names that nobody has defined are the answer's, or those of a
        module that the piece has not imported itself."""
        tree = ast.parse(code)
        nodes = list(ast.walk(tree))
        owners = [each.value for each in nodes if isinstance(each, ast.Attribute)]
        bases = {each.id for each in owners if isinstance(each, ast.Name)}
        for node in nodes:
            if not isinstance(node, ast.Name) or node.id in self.names:
                continue
            if node.id in bases and node.id in sys.stdlib_module_names:
                self.names[node.id] = importlib.import_module(node.id)
            elif not hasattr(builtins, node.id):
                self.names[node.id] = self.from_reference({"name": node.id})
        exec(compile(tree, "<tests>", "exec"), self.names)

    def run_checks(self, checks: list[str]) -> list[str]:
        """What the checks that failed complained about."""
        failed = []
        for each in checks:
            try:
                self.run(each)
                self.passed += 1
            except BaseException as error:
                failed.append(error_text(error))
        return failed


def rebuild_exception(name: str, text: str) -> Exception:
    """What the answer raised, as an exception of ours: tests may expect a ValueError."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _SILENT):
        try:
            return kind(text.removeprefix(f"{name}: "))
        except TypeError:
            pass  # one that is made of more than a text
    return RuntimeError(text or name)


def run_tests() -> None:
    heard, say = open_channel()
    work, mine = next(heard), UnitTestRunner(heard, say)
    if work["entry"]:
        mine.names[work["entry"]] = mine.from_reference({"name": work["entry"]})
    try:
        mine.run(work["before"])
    except BaseException as error:
        say({"broken": error_text(error)})
        return
    failed = mine.run_checks(work["checks"])
    say({"passed": mine.passed, "failed": failed[:1]})


if __name__ == "__main__":
    {"answer": run_solution, "judge": run_tests}[sys.argv.pop()]()
