"""`paddock chat`: a chat with a model in the terminal."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from paddock.cli.options import QuantOption
from paddock.launch import UserError, engines
from paddock.records import Message, SamplingParams

if TYPE_CHECKING:
    from paddock.engine import Engine, RequestOutput

HELP = (
    "/new starts a new chat, /think on|off, /reasoning shows the last reasoning, /quit exits; "
    "Ctrl-C interrupts"
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def chat(  # noqa: PLR0913  one option each
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint with tokenizer, or a run.")
    ],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens of a reply.")] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=5, help="Speculative (MTP) tokens per step.")
    ] = 0,
    chat_template: Annotated[
        Literal["5", "5.1", "5.2", "5.3"] | None,
        typer.Option(help="A version of GLM-5's chat template, in place of the folder's."),
    ] = None,
    quant: QuantOption = None,
) -> None:
    """Chat with a model in the terminal; with piped input, each line is a message."""
    from paddock.engine import EngineSettings

    model = engines.open_model_folder(folder, chat_template)
    sampling = engines.default_sampling(folder)
    sampling |= {} if temperature is None else {"temperature": temperature}
    (device,) = engines.pick_devices(None, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(
        num_speculative_tokens=num_speculative_tokens,
        max_running_requests=1,
        stop_token_ids=stops or None,
    )
    dtype = engines.pick_dtype(model.folder, device, None)
    (engine,) = engines.load_engines(
        model, [device], dtype, settings, fits=True, compile_kernels=False, quant=quant
    )
    with engine:
        loop = ChatLoop(
            model, engine, SamplingParams(max_new_tokens=max_tokens, **sampling), system
        )
        typer.echo(f"{folder.resolve().name}. {HELP}", err=True)
        for line in _lines():
            if not loop.handle_line(line):
                return


def _lines() -> Iterator[str]:
    """Lines of the terminal or a pipe. Bytes that are not UTF-8 become U+FFFD."""
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
    """The conversation and its commands."""

    model: engines.ModelFolder
    engine: "Engine"
    sampling: SamplingParams
    system: str | None = None
    enable_thinking: bool = True
    messages: list[Message] = field(default_factory=list)
    reasoning: str = ""

    def handle_line(self, line: str) -> bool:
        """Run a command or answer a message; False to exit."""
        word, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self._answer(line)
        elif word == "/quit":
            return False
        elif word == "/new":
            self.messages.clear()
            typer.echo("(new chat)")
        elif word == "/think" and rest.strip() in ("on", "off"):
            self.enable_thinking = rest.strip() == "on"
            typer.echo(f"(thinking is {rest.strip()})")
        elif word == "/reasoning":
            typer.echo(self.reasoning or "(none)")
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
            typer.echo(f"({error}; /new starts a new chat)")
        except EngineError as error:
            raise UserError(str(error)) from None
        else:
            self.messages.append(reply)
            self.reasoning = reply.reasoning or ""

    def _reply(self) -> Message:
        from paddock.text import CompletionParser, ThinkingKwargs

        enable = None if self.enable_thinking else False
        first = [Message(role="system", content=self.system)] if self.system else []
        prompt = self.model.renderer.render_prompt(
            [*first, *self.messages],
            thinking=ThinkingKwargs(enable_thinking=enable, clear_thinking=False),
        ).token_ids
        parser = CompletionParser(self.model.tokenizer, tools=(), prompt=prompt)
        printer = ReplyPrinter(sys.stdout.isatty())
        for delta in self._deltas(prompt):
            printer.print_events(parser.feed(delta.token_ids))
            if delta.output is not None:
                printer.print_events(parser.finish(delta.output.completion.finish))
                printer.finish(delta.output)
        return parser.result.message

    def _deltas(self, prompt: tuple[int, ...]) -> Iterator[Any]:
        """Deltas of the engine. Ctrl-C aborts the request."""
        from paddock.engine import EngineError, Request

        inbox: SimpleQueue[Any] = SimpleQueue()
        request = Request(token_ids=prompt, sampling_params=self.sampling, id=uuid4().hex)
        name, finished = self.engine.submit(request, inbox.put, streamed=True), False
        while not finished:
            try:
                delta = inbox.get()
            except KeyboardInterrupt:
                self.engine.abort(name)
                continue
            if isinstance(delta, EngineError):
                raise delta
            finished = delta.output is not None
            yield delta


@dataclass(slots=True)
class ReplyPrinter:
    """Prints a reply: reasoning dim on a terminal, folded into one line elsewhere."""

    terminal: bool
    _dim: bool = False
    _folded: int = 0  # characters of reasoning that were not printed

    def print_events(self, events: Iterable[Any]) -> None:
        from paddock.text import parse_events

        for event in events:
            if isinstance(event, parse_events.ReasoningDelta) and self.terminal:
                self._write(event.text, dim=True)
            elif isinstance(event, parse_events.ReasoningDelta):
                self._folded += len(event.text)
            elif isinstance(event, parse_events.ContentDelta):
                self._write(event.text, dim=False)

    def finish(self, output: "RequestOutput") -> None:
        notes = {"length": " [truncated: max_tokens or context reached]", "abort": " [interrupted]"}
        self._write(notes.get(output.completion.finish, ""), dim=False)
        typer.echo("")

    def _write(self, text: str, *, dim: bool) -> None:
        if self._folded:
            text, self._folded = f"(reasoning, {self._folded} characters)\n{text}", 0
        if dim != self._dim:
            sys.stdout.write(DIM if dim else f"{PLAIN}\n")
            self._dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()
