"""The verb that measures speed on this machine: serving, training, kernels. Nothing is saved."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import ErrorReportingGroup, UserError
from paddock.cli.tables import print_parts, table
from paddock.cli.units import format_bytes, format_count

if TYPE_CHECKING:
    from paddock.bench.kernels import KernelTiming
    from paddock.bench.serving import ServingMetrics, Workload
    from paddock.rollout import InferenceClient
    from paddock.train import TrainingEstimate

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Measure speed on this machine: serving, training, kernels. Nothing is saved.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead.")]


@app.command("serve")
def bench_serve(  # noqa: PLR0913  one option each
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint, a run, or a preset: fresh weights."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server instead, ours or one with SGLang's /generate.")
    ] = None,
    at_once: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests answered at once; a row each.")
    ] = "1,8,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    reply: Annotated[int, typer.Option(min=1, help="Tokens of a reply.")] = 64,
    shared: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="In all, of each row. Default: four times N.")
    ] = None,
    mtp: Annotated[int, typer.Option(min=0, max=5, help="Tokens drafted ahead.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PADDOCK_API_KEY", help="What the server wants to see.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second, time to the first token and between tokens, at each concurrency.

    As soon as a request is answered the next is asked. One round before each row does not count.
    """
    from paddock.bench.serving import Workload, connect_server, open_benchmark_engine

    if (model is None) == (url is None):
        raise UserError("name either a MODEL to run here or the --url of a server")
    if shared > prompt - 1:
        raise UserError(f"--shared {shared} leaves nothing of a prompt of {prompt} to differ in")
    counts = _counts(at_once)
    load = Workload(prompt=prompt, reply=reply, requests=requests or 0, shared=shared)

    async def over_http() -> "list[ServingMetrics]":
        assert url is not None
        async with connect_server(url, api_key) as generate:
            return await _sweep(generate, load, counts)

    if model is None:
        _tell_serving({"url": url}, asyncio.run(over_http()), as_json)
        return
    here = open_benchmark_engine(model, load, max(counts), mtp=mtp, device=device, dtype=dtype)
    with here.engine:
        load = replace(load, vocab=here.config.vocab)
        found = asyncio.run(_sweep(here.generate, load, counts))
    _tell_serving({"model": model, "device": here.device, "dtype": here.dtype}, found, as_json)


def _counts(text: str) -> list[int]:
    """
    >>> _counts("1,8, 32")
    [1, 8, 32]
    """
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--at-once {text}: expected numbers such as 1,8,32")
    return found


async def _sweep(
    generate: "InferenceClient", load: "Workload", counts: Sequence[int]
) -> "list[ServingMetrics]":
    from paddock.bench.serving import run_workload

    return [
        await run_workload(generate, replace(load, requests=load.requests or 4 * n), n)
        for n in counts
    ]


def _tell_serving(what: dict[str, Any], found: "Sequence[ServingMetrics]", as_json: bool) -> None:
    if as_json:
        for each in found:
            rates = {
                "reply_tokens_a_second": each.output_throughput,
                "tokens_a_second": each.total_token_throughput,
            }
            typer.echo(json.dumps(what | asdict(each) | rates))
        return
    spread = ("p50", "p95", "p99")
    made = table(
        "at once",
        numbers=(
            "all/s",
            "out/s",
            *(f"first {p}" for p in spread),
            *(f"next {p}" for p in spread),
        ),
    )
    for each in found:
        times = (getattr(s, p) for s in (each.ttft_ms, each.itl_ms) for p in spread)
        speeds = (each.total_token_throughput, each.output_throughput)
        made.add_row(
            str(each.max_concurrency),
            *(f"{speed:,.0f}" for speed in speeds),
            *(f"{ms:.1f}" for ms in times),
        )
    first = found[0]
    lengths = (first.prompt_tokens // first.requests, first.reply_tokens // first.requests)
    where = ", ".join(str(word) for word in what.values())
    said = "tokens a second in all and written; ms to the first token and to each after it"
    print_parts(f"{where}: {lengths[0]} tokens in, {lengths[1]} out\n{said}", made)


@app.command("train")
def bench_train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of a stage.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed, after one that is not.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Tokens a second, memory and MFU of a recipe's step: fresh weights, full rows of random
    tokens, one process."""
    from paddock.config import load_recipe, resolve
    from paddock.model import cost
    from paddock.train import (
        TrainSettings,
        estimate_training,
        fits_in_memory,
        load_init_config,
        measure_step_time,
        peak_flops,
        pick_device,
    )

    settings = resolve(TrainSettings, load_recipe(recipe, sets or []))
    config, device = load_init_config(settings), pick_device(settings.compute.device)
    planned = estimate_training(settings, config)
    if not fits_in_memory(planned, device):
        raise UserError(_too_much(planned))
    seconds = measure_step_time(settings, config, steps)
    stream = settings.dataloader
    tokens = stream.batch_tokens // stream.seq_len * stream.seq_len
    peak = peak_flops(device)
    share = None if peak is None else cost.mfu(planned.flops_per_token, tokens / seconds, peak)
    found = {
        "recipe": str(recipe),
        "device": str(device),
        "dtype": settings.compute.dtype,
        "parameters": planned.parameters,
        "tokens_a_step": tokens,
        "seconds_a_step": seconds,
        "tokens_a_second": tokens / seconds,
        "peak_bytes": _peak_bytes(),
        "flops_a_token": planned.flops_per_token,
        "peak_flops": peak,
        "mfu": share,
    }
    if as_json:
        typer.echo(json.dumps(found))
        return
    made = table(str(recipe), numbers=("",))
    made.add_row("device", f"{device}, {settings.compute.dtype}")
    made.add_row("parameters", format_count(planned.parameters))
    made.add_row("a step", f"{tokens:,} tokens, {seconds:.3g} s")
    made.add_row("tokens a second", f"{tokens / seconds:,.0f}")
    made.add_row("memory, at most", format_bytes(_peak_bytes()))
    made.add_row("MFU", _share_of_peak(share, peak))
    print_parts(made)


def _share_of_peak(share: float | None, peak: float | None) -> str:
    if share is None or peak is None:
        return "the chip's peak is not known"
    return f"{share:.1%} of {peak / 1e12:.0f} TFLOP/s (dense bfloat16)"


def _too_much(planned: "TrainingEstimate") -> str:
    if planned.ranks > 1:
        return (
            f"the recipe is for {planned.ranks:,} processes, and one is timed here; "
            "see paddock train --dry-run, or --set parallel.data=1"
        )
    return f"a step takes {format_bytes(planned.rank_bytes)}, which this machine has not free"


def _peak_bytes() -> int:
    """The most that was held: by an accelerator's allocator, or by this process."""
    import torch

    from paddock.train import peak_memory_bytes

    status = Path("/proc/self/status")
    if torch.accelerator.is_available() or not status.is_file():
        return peak_memory_bytes()
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024


@app.command("kernels")
def bench_kernels(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="[KERNEL]...", help="Default: every one.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of which the median is taken.")] = 7,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every kernel's fast form against its plain one, on random tensors of one layer."""
    from paddock.bench.kernel_cases import layer_shape
    from paddock.bench.kernels import time_kernels
    from paddock.train import pick_device

    place = pick_device(device)
    found = time_kernels(kernels or [], place, repeats)
    if as_json:
        for each in found:
            typer.echo(json.dumps({"device": str(place), **asdict(each), "ratio": each.ratio}))
        return
    rows = list(found)
    notes = dict.fromkeys(f"-: {each.note}" for each in rows if each.note)
    print_parts(f"{place}: {layer_shape(place)}; forward alone", _kernel_table(rows), *notes)


def _kernel_table(found: "Sequence[KernelTiming]") -> Any:
    made = table("kernel", numbers=("plain ms", "fast ms", "ratio", "apart"))
    made.add_column("fast in place of")
    for each in found:
        cells = ("-", "", "")
        if each.fast_ms is not None and each.ratio is not None:
            apart = "" if each.apart is None else f"{each.apart:.1e}"
            cells = (f"{each.fast_ms:.3f}", f"{each.ratio:.2f}", apart)
        made.add_row(each.kernel, f"{each.plain_ms:.3f}", *cells, each.replaces)
    return made
