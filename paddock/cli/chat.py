"""The verb that chats with a model in the terminal."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from paddock.cli.errors import UserError
from paddock.launch.engines import (
    ModelFolder,
    default_sampling,
    load_engines,
    open_model_folder,
    pick_devices,
    pick_dtype,
)
from paddock.records import Message, SamplingParams

if TYPE_CHECKING:
    from paddock.engine import Engine, RequestOutput

HELP = (
    "/new starts over, /think on|off, /thoughts shows the last ones, /quit ends; Ctrl-C interrupts"
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def chat(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint with tokenizer, or a run.")
    ],
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply at most.")] = None,
    mtp: Annotated[int, typer.Option(min=0, max=5, help="Tokens drafted ahead.")] = 0,
    template_version: Annotated[
        Literal["5", "5.1", "5.2", "5.3"] | None,
        typer.Option(help="GLM-5's chat template, in place of the folder's."),
    ] = None,
) -> None:
    """Chat with a model in the terminal. Without one, lines are read and answers printed."""
    from paddock.engine import EngineSettings

    model = open_model_folder(folder, template_version)
    said = default_sampling(folder) | ({} if temperature is None else {"temperature": temperature})
    (place,) = pick_devices(None, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(
        num_speculative_tokens=mtp, max_running_requests=1, stop_token_ids=stops or None
    )
    dtype = pick_dtype(model.folder, place, None)
    (engine,) = load_engines(model, [place], dtype, settings, fits=True)
    with engine:
        talk = ChatLoop(model, engine, SamplingParams(max_new_tokens=max_tokens, **said), system)
        typer.echo(f"{folder.resolve().name}. {HELP}", err=True)
        for line in _lines():
            if not talk.handle_line(line):
                return


def _lines() -> Iterator[str]:
    """What the user types, or what a pipe holds. Bytes that are no UTF-8 become U+FFFD."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("")
            return
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()


@dataclass(slots=True)
class ChatLoop:
    model: ModelFolder
    engine: "Engine"
    sampling: SamplingParams
    system: str | None = None
    thinks: bool = True
    messages: list[Message] = field(default_factory=list)
    thoughts: str = ""

    def handle_line(self, line: str) -> bool:
        """A command or something to answer; False if it was the last."""
        word, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self._answer(line)
        elif word == "/quit":
            return False
        elif word == "/new":
            self.messages.clear()
            typer.echo("(a new conversation)")
        elif word == "/think" and rest.strip() in ("on", "off"):
            self.thinks = rest.strip() == "on"
            typer.echo(f"(thinking is {rest.strip()})")
        elif word == "/thoughts":
            typer.echo(self.thoughts or "(none)")
        else:
            typer.echo(HELP)
        return True

    def _answer(self, line: str) -> None:
        from paddock.engine import EngineError, InvalidRequestError
        from paddock.text import ChatTemplateError

        self.messages.append(Message(role="user", content=line))
        try:
            reply = self._reply()
        except (InvalidRequestError, ChatTemplateError) as error:
            self.messages.pop()
            typer.echo(f"({error}; /new starts over)")
        except EngineError as error:
            raise UserError(str(error)) from None
        else:
            self.messages.append(reply)
            self.thoughts = reply.reasoning or ""

    def _reply(self) -> Message:
        from paddock.text import CompletionParser, ThinkingKwargs

        enable = None if self.thinks else False
        first = [Message(role="system", content=self.system)] if self.system else []
        prompt = self.model.renderer.render_prompt(
            [*first, *self.messages],
            thinking=ThinkingKwargs(enable_thinking=enable, clear_thinking=False),
        ).token_ids
        parser = CompletionParser(self.model.tokenizer, tools=(), prompt=prompt)
        shown = ReplyPrinter(sys.stdout.isatty())
        for delta in self._deltas(prompt):
            shown.print_events(parser.feed(delta.token_ids))
            if delta.output is not None:
                shown.print_events(parser.finish(delta.output.completion.finish))
                shown.finish(delta.output)
        return parser.result.message

    def _deltas(self, prompt: tuple[int, ...]) -> Iterator[Any]:
        """What the engine writes. Ctrl-C ends the reply where it stands."""
        from paddock.engine import EngineError, Request

        inbox: SimpleQueue[Any] = SimpleQueue()
        request = Request(token_ids=prompt, sampling_params=self.sampling, id=uuid4().hex)
        name, answered = self.engine.submit(request, inbox.put, streamed=True), False
        while not answered:
            try:
                delta = inbox.get()
            except KeyboardInterrupt:
                self.engine.abort(name)
                continue
            if isinstance(delta, EngineError):
                raise delta
            answered = delta.output is not None
            yield delta


@dataclass(slots=True)
class ReplyPrinter:
    """A reply as it is printed: thoughts dim on a terminal, folded into one line elsewhere."""

    terminal: bool
    _dim: bool = False
    _folded: int = 0  # characters of thoughts that were not printed

    def print_events(self, events: Iterable[Any]) -> None:
        from paddock.text import parse_events

        for event in events:
            if isinstance(event, parse_events.ReasoningDelta) and self.terminal:
                self._write(event.text, dim=True)
            elif isinstance(event, parse_events.ReasoningDelta):
                self._folded += len(event.text)
            elif isinstance(event, parse_events.ContentDelta):
                self._write(event.text, dim=False)

    def finish(self, answer: "RequestOutput") -> None:
        notes = {"length": " [cut: no room]", "abort": " [interrupted]"}
        self._write(notes.get(answer.completion.finish, ""), dim=False)
        typer.echo("")

    def _write(self, text: str, *, dim: bool) -> None:
        if self._folded:
            text, self._folded = f"(thought, {self._folded} characters)\n{text}", 0
        if dim != self._dim:
            sys.stdout.write(DIM if dim else f"{PLAIN}\n")
            self._dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()
