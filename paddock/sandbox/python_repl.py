"""Program that runs inside the sandbox: the interpreter of a `PythonSession`.

It reads a length and a code cell, runs the cell in one shared namespace, and replies on what was
stderr with a length and the traceback, empty if there was none. Its argument is the maximum size of
a reply in bytes. Everything the code prints, also by programs that it starts, goes to stdout.
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
    """The statements, and a final expression separately so that its value is printed."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec")]
    if isinstance(last, ast.Expr):
        parts.append(compile(ast.Interactive([last]), name, "single"))
    return parts


def run(source: str, name: str, names: dict[str, object]) -> str:
    """Run a cell and return its traceback, without frames of this file."""
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


def truncate_error(error: bytes, max_bytes: int) -> bytes:
    """The error, or its beginning and end if it is longer than `max_bytes`."""
    if len(error) <= max_bytes:
        return error
    gap = b"\n... cut ...\n"
    half = (max_bytes - len(gap)) // 2
    return error[:half] + gap + error[-half:]


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    """`size` bytes, or None at the end of the input."""
    data = b""
    while len(data) < size:
        more = read(size - len(data))
        if not more:
            return None
        data += more
    return data


def main(max_reply_bytes: int) -> None:
    requests, replies = os.dup(0), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    count = 0
    while True:
        head = read_exactly(lambda size: os.read(requests, size), LENGTH.size)
        if head is None:
            return
        source = read_exactly(lambda size: os.read(requests, size), *LENGTH.unpack(head))
        if source is None:
            return
        count += 1
        error = run(source.decode(), NAME.format(count), names).encode(errors="backslashreplace")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        error = truncate_error(error, max_reply_bytes)
        reply = LENGTH.pack(len(error)) + error
        while reply:
            reply = reply[os.write(replies, reply) :]


if __name__ == "__main__":
    main(int(sys.argv.pop()))  # cells see an empty argv
