"""Programs that run inside two sandboxes: one serves the completion, one runs the hidden tests.

They exchange data only, as lines of JSON on standard input and output, relayed by the verifier that
started both. This package is not installed inside. Standard library only.

solution  runs a program or uses one of its objects on request; replies with a value or an error
tests     receives the tests, requests from the solution what they need, and ends with the errors
          of the tests that failed

The test runner compares its own values: data from the completion is rebuilt from built-in types.
Objects of other types stay in the completion's process, and the test runner holds a reference that
is equal only to itself. So a completion can manipulate its own process but not the tests.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

MAX_ERROR_CHARS = 300
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # long decimal literals are refused
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, complex.__repr__, complex),
    "bytes": ((bytes, bytearray), lambda value: value.hex(), bytes.fromhex),
}
# Raised inside map() or next(), these would end a loop of a test instead of failing it.
_LOOP_ENDING = (StopIteration, StopAsyncIteration)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON that preserves its type; `refer` encodes everything else as a reference.

    >>> encode([1, True, ("a", 2.0)], str)
    [{'int': '0x1'}, True, {'tuple': ['a', {'float': '0x1.0000000000000p+1'}]}]
    """
    if value is None or isinstance(value, bool | str):
        return value
    for name, (kind, to_text, _) in _SCALARS.items():
        if isinstance(value, kind):
            return {name: to_text(value)}
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
    """The inverse of `encode`, with built-in types only; `find` resolves references.

    >>> decode(encode({"a": {1, 2}}, str), str)
    {'a': {1, 2}}
    """
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(each, find) for each in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not an encoded value")
    ((name, content),) = data.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(each, find) for each in content)
    if name in _SCALARS:
        return _SCALARS[name][2](content)
    if name == "dict":
        return {decode(key, find): decode(each, find) for key, each in content}
    if name == "type" and isinstance(found := getattr(builtins, content), type):
        return found
    return find(data)


def error_text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]


def open_channel() -> tuple[Iterator[dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """Incoming messages and a function to reply. Redirects all other output to /dev/null."""
    requests, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)

    def send(reply: dict[str, Any]) -> None:
        rest = json.dumps(reply).encode() + b"\n"
        while rest:
            rest = rest[os.write(out, rest) :]

    return (json.loads(line) for line in requests), send


class SolutionServer:
    """Runs the completion's program and serves its objects."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "answer"}
        self.objects: list[Any] = []

    def to_reference(self, value: Any) -> dict[str, int]:
        for number, known in enumerate(self.objects):
            if known is value:
                return {"object": number}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def from_reference(self, reference: Any) -> Any:
        if "name" in reference:
            return self.names[reference["name"]]
        return self.objects[reference["object"]]

    def execute(self, op: str, *given: Any) -> Any:
        """Run source code, or apply an operation to an object."""
        if op == "run":
            exec(compile(given[0], "<answer>", "exec"), self.names)
            return None
        target, *rest = decode(list(given), self.from_reference)
        match op:
            case "call":
                return target(*rest[0], **rest[1])
            case "set":
                return setattr(target, *rest)
        operations: dict[str, Callable[..., Any]] = {
            "get": getattr, "list": list, "len": len, "bool": bool
        }  # fmt: skip
        return operations[op](target, *rest)


def run_solution() -> None:
    requests, send = open_channel()
    server = SolutionServer()
    for request in requests:
        try:
            reply = {"value": encode(server.execute(*request["do"]), server.to_reference)}
        except BaseException as error:  # SystemExit is an error of the program, too
            reply = {"error": type(error).__name__, "text": error_text(error)}
        send(reply)


class RemoteObject:
    """Proxy of an object of the completion, for the tests."""

    def __init__(self, reference: Any, request: Callable[..., Any]) -> None:
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_request", request)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._request("call", self, given, named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._request("list", self))

    def __len__(self) -> int:
        return int(self._request("len", self))

    def __bool__(self) -> bool:
        return self._request("bool", self) is True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("set", self, name, value)


class UnitTestRunner:
    """Runs the tests; what they use of the completion is requested from its process."""

    def __init__(
        self, replies: Iterator[dict[str, Any]], send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.replies, self.send = replies, send
        self.names: dict[str, Any] = {"__name__": "tests"}
        self.remotes: dict[str, RemoteObject] = {}
        self.passed = 0

    def from_reference(self, reference: Any) -> RemoteObject:
        """The proxy of a reference, always the same one, so that it is equal to itself."""
        return self.remotes.setdefault(json.dumps(reference), RemoteObject(reference, self.request))

    def to_reference(self, value: Any) -> Any:
        if isinstance(value, RemoteObject):
            return value._reference
        raise TypeError(f"a {type(value).__name__} cannot be handed to the answer")

    def request(self, op: str, *given: Any) -> Any:
        """The result of an operation in the completion's process. Raises what it raised."""
        data = [encode(each, self.to_reference) for each in given]
        self.send({"ask": {"do": [op, *data]}, "passed": self.passed})
        reply = next(self.replies)
        if "error" in reply:
            raise rebuild_exception(str(reply["error"]), str(reply.get("text", "")))
        return decode(reply["value"], self.from_reference)

    def run(self, code: str) -> None:
        """Run code of the tests. Undefined names refer to the completion, or to standard modules
        that the code uses without importing them."""
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
        """Run all checks and return the errors of those that failed."""
        failed = []
        for each in checks:
            try:
                self.run(each)
                self.passed += 1
            except BaseException as error:
                failed.append(error_text(error))
        return failed


def rebuild_exception(name: str, text: str) -> Exception:
    """An exception like the one the completion raised: tests may expect a ValueError."""
    kind = getattr(builtins, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, _LOOP_ENDING)
    ):
        try:
            return kind(text.removeprefix(f"{name}: "))
        except TypeError:
            pass  # its constructor needs more than a message
    return RuntimeError(text or name)


def run_tests() -> None:
    messages, send = open_channel()
    tests, runner = next(messages), UnitTestRunner(messages, send)
    if tests["entry"]:
        runner.names[tests["entry"]] = runner.from_reference({"name": tests["entry"]})
    try:
        runner.run(tests["before"])
    except BaseException as error:
        send({"broken": error_text(error)})
        return
    failed = runner.run_checks(tests["checks"])
    send({"passed": runner.passed, "failed": failed[:1]})


if __name__ == "__main__":
    {"solution": run_solution, "tests": run_tests}[sys.argv.pop()]()
