"""`paddock env`: list, show, try and check environments."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import ErrorReportingGroup
from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides
from paddock.launch import UserError, model_client
from paddock.records import Failure, Message, SamplingParams, ToolCall, ToolSpec, Verdict

if TYPE_CHECKING:
    from paddock.envs import Policy, Taskset, harbor

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Environments: list, show, try, and check tasks.",
)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A=B", help="Override a setting.")]
Split = Annotated[Literal["train", "test"], typer.Option(help="Of the tasks.")]
Index = Annotated[int, typer.Option(min=0, help="Index of the task.")]
EnvName = Annotated[str, typer.Argument(metavar="ENV", help="One of `paddock env list`.")]


@app.command("list")
def list_envs() -> None:
    """Every environment, and what it requires."""
    from paddock.envs import REGISTRY

    rows = table("env", "description", "requires")
    for name, spec in sorted(REGISTRY.items()):
        rows.add_row(name, spec.about, spec.needs or "nothing")
    print_parts(rows)


@app.command("show")
def show_env(env: EnvName, sets: Sets = None, index: Index = 0, split: Split = "train") -> None:
    """An environment's settings, tools and one of its tasks."""
    from paddock.config import Recipe, dump_toml, resolve
    from paddock.envs import get_spec, make

    changes = parse_overrides(sets or [])
    taskset = make(env, changes)
    task = taskset.task(index, split)
    sizes = {each: taskset.size(each) for each in ("train", "test")}
    counts = ", ".join(f"{each}: {'unlimited' if n is None else n}" for each, n in sizes.items())
    rows = table("", "")
    spec = get_spec(env)
    rows.add_row("description", spec.about)
    rows.add_row("requires", spec.needs or "nothing")
    rows.add_row("tasks", counts)
    rows.add_row("limits", f"{task.budget.turns} turns, {task.budget.seconds:g} s")
    tools = "\n".join(_signature(tool) for tool in taskset.make_env(task).tools)
    rows.add_row("tools", tools or "none")
    settings = resolve(spec.load(), Recipe(changes, {}))
    print_parts(rows, f"settings:\n{dump_toml(settings).strip()}", f"task {task.id}:\n")
    _print_messages(task.messages)


def _signature(tool: ToolSpec) -> str:
    known = tool.parameters.get("properties", {})
    return f"{tool.name}({', '.join(known) if isinstance(known, dict) else ''})"


@app.command("try")
def try_env(  # noqa: PLR0913  one option each
    env: EnvName,
    sets: Sets = None,
    index: Index = 0,
    split: Split = "train",
    model: Annotated[
        str | None, typer.Option(help="The policy: a checkpoint, a run, or a server's model.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server.")] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Run the reference solution.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens of a reply.")] = None,
) -> None:
    """Run one task: by hand in the terminal, with a model, or with its reference solution."""
    from paddock.envs import make, run_rollout

    taskset = make(env, parse_overrides(sets or []))
    task = taskset.task(index, split)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_tokens)
    _print_messages(task.messages)
    with _open_policy(model, base_url, sampling) as chosen:
        policy = _solver(taskset, task) if solve else chosen
        printing = PrintingPolicy(policy, len(task.messages))
        trace = asyncio.run(run_rollout(taskset.make_env(task), printing))
    _print_messages(trace.messages[-1:] if trace.messages[-1].role == "tool" else ())
    _print_outcome(trace.outcome, trace.turns, trace.seconds)
    if trace.leak:
        raise UserError(f"the environment did not close cleanly: {trace.leak}")


@contextmanager
def _open_policy(
    model: str | None, base_url: str | None, sampling: SamplingParams
) -> Iterator["Policy"]:
    """The policy: a person, unless a model is named."""
    if model is None:
        if base_url is not None:
            raise UserError("--base-url needs --model: the model's name on that server")
        yield HumanPolicy()
        return
    from paddock.data import THINKING_MODES

    with model_client.open_model_client(model, base_url, 1) as client:
        yield client.policy(THINKING_MODES["interleaved"], sampling)


def _solver(taskset: "Taskset", task: Any) -> "Policy":
    solver = getattr(taskset, "solver", None)
    if solver is None:
        raise UserError(f"env {taskset.name!r} has no reference solutions")
    policy: Policy = solver(task)
    return policy


class PrintingPolicy:
    """A policy whose messages are printed as they come."""

    def __init__(self, policy: "Policy", printed: int) -> None:
        self._policy, self._printed = policy, printed

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        _print_messages(messages[self._printed :])
        reply = await self._policy(messages, tools)
        if not isinstance(self._policy, HumanPolicy):
            _print_messages((reply,))
        self._printed = len(messages) + 1
        return reply


class HumanPolicy:
    """A person at the terminal. A line is the reply; a line `/TOOL ...` calls a tool, with its one
    argument as plain text or with a JSON object."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        from paddock.envs import RolloutFailed

        by_name = {tool.name: tool for tool in tools}
        while True:
            line = await asyncio.to_thread(_line, by_name)
            if line is None:
                raise RolloutFailed("policy", "person", "end of input")
            if not line.startswith("/"):
                return Message(role="assistant", content=line)
            name, _, rest = line[1:].partition(" ")
            if name in by_name:
                return _tool_call(by_name[name], rest, len(messages))
            names = ", ".join(f"/{_signature(tool)}" for tool in tools) or "none"
            hint = "type a reply, or /TOOL ARGS to call a tool"
            typer.echo(f"{hint}; tools: {names}", err=True)


def _line(tools: Mapping[str, ToolSpec]) -> str | None:
    """One line of the terminal or pipe, or None at its end."""
    prompt = f"[{' '.join(f'/{name}' for name in tools)}] > " if tools else "> "
    try:
        line = input(prompt) if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        return None
    if not line and not sys.stdin.isatty():
        return None
    return line.rstrip("\n")


def _tool_call(tool: ToolSpec, text: str, count: int) -> Message:
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


def _print_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.reasoning:
            typer.echo(f"(reasoning, {len(message.reasoning)} characters)")
        if message.content:
            typer.echo(f"{message.role}: {message.content}")
        for call in message.tool_calls:
            typer.echo(f"{message.role} calls {call.name}: {json.dumps(call.arguments)}")


def _print_outcome(outcome: Verdict | Failure, turns: int, seconds: float) -> None:
    if isinstance(outcome, Failure):
        raise UserError(f"rollout failed ({outcome.label}): {outcome.what}")
    parts = "".join(f"\n  {value:g}  {name}" for name, value in outcome.parts.items())
    note = f" ({outcome.note})" if outcome.note else ""
    typer.echo(f"reward {outcome.reward:g}{note} after {turns} turns, {seconds:.1f} s{parts}")


@app.command("check")
def check_tasks(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A task, or a folder of tasks.")],
    skip_installs: Annotated[
        bool, typer.Option("--skip-installs", help="Skip build steps that download packages.")
    ] = False,
    offline_python: Annotated[
        Path | None,
        typer.Option(help="A Python environment with pytest, for tests that download it."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    sets: Sets = None,
) -> None:
    """Check tasks: the oracle passes, a no-op fails, tests stay hidden."""
    from paddock.config import Recipe, resolve
    from paddock.envs import harbor

    changes = parse_overrides(sets or [])
    changes.setdefault("env_vars", dict(os.environ))
    if skip_installs:
        changes["skip_installs"] = True
    if offline_python is not None:
        changes["offline_python"] = str(offline_python.resolve())
    settings = resolve(harbor.HarborSettings, Recipe(changes, {}))
    reports = asyncio.run(_check(harbor.find_task_folders(folder), settings, workers))
    rows = table("task", "oracle", "no-op", "tests hidden", "valid")
    for report in reports:
        rows.add_row(*_row(report))
    print_parts(rows)
    for report in reports:
        for line in (*report.problems, *(f"note: {note}" for note in report.notes)):
            typer.echo(f"{report.task}: {line}", err=line not in report.problems)
    invalid = sum(not report.is_sound for report in reports)
    if invalid:
        raise UserError(f"{invalid} of {len(reports)} tasks are not valid")


async def _check(
    folders: Sequence[Path], settings: Any, workers: int
) -> "list[harbor.TaskCheckReport]":
    from paddock.envs import harbor

    slots = asyncio.Semaphore(workers)

    async def one(folder: Path) -> "harbor.TaskCheckReport":
        async with slots:
            return await harbor.check_task(harbor.read_task(folder), settings)

    return list(await asyncio.gather(*map(one, folders)))


def _row(report: "harbor.TaskCheckReport") -> tuple[str, ...]:
    from paddock.envs import harbor

    rewards = [
        "-" if each is None else f"{harbor.scalar_reward(each):g}"
        for each in (report.solution, report.empty)
    ]
    return (
        report.task,
        *rewards,
        "no" if report.readable else "yes",
        "yes" if report.is_sound else "NO",
    )
