"""A program of its own: the interpreter of a `PythonSession`, inside the sandbox.

It reads a length and a piece of code, runs it in the namespace of the pieces before, and answers on
what was stderr: a length and the traceback, empty if there was none. Its argument is how many bytes
of an answer come through. All that the code prints, also by programs it starts, goes to stdout.
Standard library only.
"""

import ast
import contextlib
import linecache
import os
import struct
import sys
import traceback
from collections.abc import Callable
from types import CodeType

LENGTH = struct.Struct(">I")
NAME = "<cell {}>"


def compile_cell(source: str, name: str) -> list[CodeType]:
    """Statements, and a last expression apart so that its value can be shown."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec")]
    if isinstance(last, ast.Expr):
        parts.append(compile(ast.Interactive([last]), name, "single"))
    return parts


def run(source: str, name: str, names: dict[str, object]) -> str:
    """Run a piece; its traceback without our own frames."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        for part in compile_cell(source, name):
            exec(part, names)
    except SystemExit as stop:
        return "" if stop.code in (None, 0) else f"SystemExit: {stop.code}"
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != name:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    return ""


def truncate_error(error: bytes, most: int) -> bytes:
    """An answer that comes through whole: of a longer one the beginning and the end."""
    if len(error) <= most:
        return error
    gap = b"\n... cut ...\n"
    half = (most - len(gap)) // 2
    return error[:half] + gap + error[-half:]


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = read(size - len(data))
        if not more:
            return None
        data += more
    return data


def main(most: int) -> None:
    asked, answers = os.dup(0), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    count = 0
    while True:
        head = read_exactly(lambda size: os.read(asked, size), LENGTH.size)
        if head is None:
            return
        source = read_exactly(lambda size: os.read(asked, size), *LENGTH.unpack(head))
        if source is None:
            return
        count += 1
        error = run(source.decode(), NAME.format(count), names).encode(errors="backslashreplace")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        error = truncate_error(error, most)
        reply = LENGTH.pack(len(error)) + error
        while reply:
            reply = reply[os.write(answers, reply) :]


if __name__ == "__main__":
    main(int(sys.argv.pop()))  # what runs here has no arguments
