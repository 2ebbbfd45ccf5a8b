"""The verb that lists worlds, shows one, plays in it, and checks tasks."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import ErrorReportingGroup, UserError
from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides
from paddock.records import Failure, Message, SamplingParams, ToolCall, ToolSpec, Verdict

if TYPE_CHECKING:
    from paddock.envs import Policy, Taskset, harbor

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Worlds: list them, look at one, play, check tasks.",
)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting.")]
Split = Annotated[Literal["train", "test"], typer.Option(help="Of the world's tasks.")]
Index = Annotated[int, typer.Option(min=0, help="Which task.")]
World_ = Annotated[str, typer.Argument(metavar="WORLD", help="One of `paddock env list`.")]


@app.command("list")
def list_envs() -> None:
    """Every world, and what it needs."""
    from paddock.envs import REGISTRY

    rows = table("world", "about", "needs")
    for name, kind in sorted(REGISTRY.items()):
        rows.add_row(name, kind.about, kind.needs or "nothing")
    print_parts(rows)


@app.command("show")
def show_env(world: World_, sets: Sets = None, index: Index = 0, split: Split = "train") -> None:
    """A world's settings, tools and one of its tasks."""
    from paddock.config import Recipe, dump_toml, resolve
    from paddock.envs import get_spec, make

    changes = parse_overrides(sets or [])
    opened = make(world, changes)
    task = opened.task(index, split)
    sizes = {each: opened.size(each) for each in ("train", "test")}
    said = ", ".join(f"{each}: {'without end' if n is None else n}" for each, n in sizes.items())
    rows = table("", "")
    kind = get_spec(world)
    rows.add_row("about", kind.about)
    rows.add_row("needs", kind.needs or "nothing")
    rows.add_row("tasks", said)
    rows.add_row("limits", f"{task.budget.turns} turns, {task.budget.seconds:g} s")
    rows.add_row("tools", "\n".join(_told(tool) for tool in opened.make_env(task).tools) or "none")
    settings = resolve(kind.load(), Recipe(changes, {}))
    print_parts(rows, f"settings:\n{dump_toml(settings).strip()}", f"task {task.id}:\n")
    _tell(task.messages)


def _told(tool: ToolSpec) -> str:
    known = tool.parameters.get("properties", {})
    return f"{tool.name}({', '.join(known) if isinstance(known, dict) else ''})"


@app.command("try")
def try_env(  # noqa: PLR0913  one option each
    world: World_,
    sets: Sets = None,
    index: Index = 0,
    split: Split = "train",
    model: Annotated[
        str | None, typer.Option(help="Who plays: a checkpoint, a run, or a server's model.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Of an OpenAI-compatible server.")] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Play the world's own solution.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply at most.")] = None,
) -> None:
    """Play one task: as a person in the terminal, with a model, or by its own solution."""
    from paddock.envs import make, run_rollout

    opened = make(world, parse_overrides(sets or []))
    task = opened.task(index, split)
    env = opened.make_env(task)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_tokens)
    _tell(task.messages)
    with _who(model, url, sampling) as chosen:
        policy = _solver(opened, task) if solve else chosen
        episode = asyncio.run(run_rollout(env, PrintingPolicy(policy, len(task.messages))))
    _tell(episode.messages[-1:] if episode.messages[-1].role == "tool" else ())
    _end(episode.outcome, episode.turns, episode.seconds)
    if episode.leak:
        raise UserError(f"the world did not close well: {episode.leak}")


@contextmanager
def _who(model: str | None, url: str | None, sampling: SamplingParams) -> Iterator["Policy"]:
    """Who plays: a person, unless a model is named."""
    if model is None:
        if url is not None:
            raise UserError("--url wants --model too: the model's name on that server")
        yield HumanPolicy()
        return
    from paddock.cli.sample import open_model_client
    from paddock.data import THINKING_MODES

    with open_model_client(model, url, 1) as player:
        yield player.policy(THINKING_MODES["interleaved"], sampling)


def _solver(opened: "Taskset", task: Any) -> "Policy":
    solver = getattr(opened, "solver", None)
    if solver is None:
        raise UserError(f"the world {opened.name!r} does not know how its tasks are solved")
    policy: Policy = solver(task)
    return policy


class PrintingPolicy:
    """A policy whose game is printed as it goes."""

    def __init__(self, policy: "Policy", told: int) -> None:
        self._policy, self._told = policy, told

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        _tell(messages[self._told :])
        reply = await self._policy(messages, tools)
        if not isinstance(self._policy, HumanPolicy):
            _tell((reply,))
        self._told = len(messages) + 1
        return reply


class HumanPolicy:
    """Who sits at the terminal. A line is the reply; a line `/TOOL ...` calls a tool, with its one
    argument as plain text or with a JSON object."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        from paddock.envs import RolloutFailed

        by_name = {tool.name: tool for tool in tools}
        while True:
            line = await asyncio.to_thread(_line, by_name)
            if line is None:
                raise RolloutFailed("policy", "person", "went away")
            if not line.startswith("/"):
                return Message(role="assistant", content=line)
            name, _, rest = line[1:].partition(" ")
            if name in by_name:
                return _calling(by_name[name], rest, len(messages))
            told = ", ".join(f"/{_told(tool)}" for tool in tools) or "no tools"
            typer.echo(f"a line is your answer; there are {told}", err=True)


def _line(tools: Mapping[str, ToolSpec]) -> str | None:
    """What is typed or piped, or None at its end."""
    prompt = f"[{' '.join(f'/{name}' for name in tools)}] > " if tools else "> "
    try:
        line = input(prompt) if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        return None
    if not line and not sys.stdin.isatty():
        return None
    return line.rstrip("\n")


def _calling(tool: ToolSpec, text: str, count: int) -> Message:
    known = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", [])
    arguments: Any = None
    if text.lstrip().startswith("{"):
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        names = list(required if isinstance(required, list) and required else known)
        arguments = {str(names[0]): text} if names and text else {}
    call = ToolCall(id=f"call_{count}", name=tool.name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))


def _tell(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.reasoning:
            typer.echo(f"(thought, {len(message.reasoning)} characters)")
        if message.content:
            typer.echo(f"{message.role}: {message.content}")
        for call in message.tool_calls:
            typer.echo(f"{message.role} calls {call.name}: {json.dumps(call.arguments)}")


def _end(outcome: Verdict | Failure, turns: int, seconds: float) -> None:
    if isinstance(outcome, Failure):
        raise UserError(f"no verdict, {outcome.kind} at {outcome.where}: {outcome.what}")
    parts = "".join(f"\n  {value:g}  {name}" for name, value in outcome.parts.items())
    note = f" ({outcome.note})" if outcome.note else ""
    typer.echo(f"reward {outcome.reward:g}{note} after {turns} turns, {seconds:.1f} s{parts}")


@app.command("check")
def check_tasks(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A task, or a folder of tasks.")],
    skip_installs: Annotated[
        bool, typer.Option("--skip-installs", help="Leave out build steps that fetch packages.")
    ] = False,
    stand_ins: Annotated[
        Path | None, typer.Option(help="A Python environment with pytest, for tests that fetch it.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    sets: Sets = None,
) -> None:
    """Whether tasks are sound: the solution passes, doing nothing fails, tests stay hidden."""
    from paddock.config import Recipe, resolve
    from paddock.envs import harbor

    changes = parse_overrides(sets or [])
    changes.setdefault("variables", dict(os.environ))
    if skip_installs:
        changes["skip_installs"] = True
    if stand_ins is not None:
        changes["stand_ins"] = str(stand_ins.resolve())
    settings = resolve(harbor.HarborSettings, Recipe(changes, {}))
    reports = asyncio.run(_checked(harbor.find_task_folders(folder), settings, workers))
    rows = table("task", "solution", "nothing", "tests hidden", "sound")
    for report in reports:
        rows.add_row(*_row(report))
    print_parts(rows)
    for report in reports:
        for line in (*report.problems, *(f"note: {note}" for note in report.notes)):
            typer.echo(f"{report.task}: {line}", err=line not in report.problems)
    unsound = sum(not report.is_sound for report in reports)
    if unsound:
        raise UserError(f"{unsound} of {len(reports)} tasks are not sound")


async def _checked(
    folders: Sequence[Path], settings: Any, workers: int
) -> "list[harbor.TaskCheckReport]":
    from paddock.envs import harbor

    turn = asyncio.Semaphore(workers)

    async def one(folder: Path) -> "harbor.TaskCheckReport":
        async with turn:
            return await harbor.check_task(harbor.read_task(folder), settings)

    return list(await asyncio.gather(*map(one, folders)))


def _row(report: "harbor.TaskCheckReport") -> tuple[str, ...]:
    from paddock.envs import harbor

    worth = [
        "-" if each is None else f"{harbor.scalar_reward(each):g}"
        for each in (report.solution, report.empty)
    ]
    return (
        report.task,
        *worth,
        "no" if report.readable else "yes",
        "yes" if report.is_sound else "NO",
    )
