"""`paddock bench`: speed of serving, training and kernels on this machine."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import ErrorReportingGroup
from paddock.cli.tables import print_parts, table
from paddock.launch import UserError, units

if TYPE_CHECKING:
    from paddock.bench import KernelTiming, ServingMetrics, Workload
    from paddock.rollout import InferenceClient

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Measure speed on this machine: serving, training, kernels. Nothing is saved.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")]


@app.command("serve")
def bench_serve(  # noqa: PLR0913  one option each
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint, a run, or a preset (fresh weights)."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A server instead, ours or one with SGLang's /generate.")
    ] = None,
    max_concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Concurrent requests; a row each.")
    ] = "1,8,32",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 64,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts share.")] = 0,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per row. Default: four times N.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=5, help="Speculative (MTP) tokens per step.")
    ] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PADDOCK_API_KEY", help="API key of the server.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Throughput, time to first token (TTFT) and inter-token latency (ITL) at each concurrency.

    A new request is sent as soon as one is done. One warm-up round per row does not count.
    """
    from paddock.bench import Workload, connect_server, open_benchmark_engine

    if (model is None) == (base_url is None):
        raise UserError("pass either a MODEL to run here or the --base-url of a server")
    if prefix_len > input_len - 1:
        raise UserError(f"--prefix-len {prefix_len} must be smaller than --input-len {input_len}")
    counts = _counts(max_concurrency)
    load = Workload(
        input_len=input_len,
        output_len=output_len,
        num_prompts=num_prompts or 0,
        prefix_len=prefix_len,
    )

    async def over_http() -> "list[ServingMetrics]":
        assert base_url is not None
        async with connect_server(base_url, api_key) as client:
            return await _sweep(client, load, counts)

    if model is None:
        _print_serving({"url": base_url}, asyncio.run(over_http()), as_json)
        return
    opened = open_benchmark_engine(
        model, load, max(counts), mtp=num_speculative_tokens, device=device, dtype=dtype
    )
    with opened.engine:
        load = replace(load, vocab=opened.config.vocab)
        found = asyncio.run(_sweep(opened.client, load, counts))
    what = {"model": model, "device": opened.device, "dtype": opened.dtype}
    _print_serving(what, found, as_json)


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
        raise UserError(f"--max-concurrency {text}: expected numbers such as 1,8,32")
    return found


async def _sweep(
    client: "InferenceClient", load: "Workload", counts: Sequence[int]
) -> "list[ServingMetrics]":
    from paddock.bench import run_workload

    return [
        await run_workload(client, replace(load, num_prompts=load.num_prompts or 4 * n), n)
        for n in counts
    ]


def _print_serving(what: dict[str, Any], found: "Sequence[ServingMetrics]", as_json: bool) -> None:
    if as_json:
        for each in found:
            rates = {
                "output_throughput": each.output_throughput,
                "total_token_throughput": each.total_token_throughput,
            }
            typer.echo(json.dumps(what | asdict(each) | rates))
        return
    spread = ("p50", "p95", "p99")
    made = table(
        "concurrency",
        numbers=(
            "total\ntok/s",
            "output\ntok/s",
            *(f"TTFT\n{p} (ms)" for p in spread),
            *(f"ITL\n{p} (ms)" for p in spread),
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
    lengths = (first.prompt_tokens // first.requests, first.output_tokens // first.requests)
    where = ", ".join(str(word) for word in what.values())
    print_parts(f"{where}: {lengths[0]} input tokens, {lengths[1]} output tokens", made)


@app.command("train")
def bench_train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of a stage.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one warm-up step.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Throughput, memory and MFU of a recipe's step: fresh weights, full rows of random tokens, one
    process."""
    from paddock.bench import measure_training

    found = measure_training(recipe, sets or [], steps=steps)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    made = table(str(recipe), numbers=("",))
    made.add_row("device", f"{found.device}, {found.dtype}")
    made.add_row("parameters", units.format_count(found.parameters))
    made.add_row("step", f"{found.tokens_per_step:,} tokens, {found.seconds_per_step:.3g} s")
    made.add_row("tok/s", f"{found.tokens_per_second:,.0f}")
    made.add_row("peak memory", units.format_bytes(found.peak_bytes))
    made.add_row("MFU", _share_of_peak(found.mfu, found.peak_flops))
    print_parts(made)


def _share_of_peak(share: float | None, peak: float | None) -> str:
    if share is None or peak is None:
        return "peak FLOP/s of this device unknown"
    return f"{share:.1%} of {peak / 1e12:.0f} TFLOP/s (dense bfloat16)"


@app.command("kernels")
def bench_kernels(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="[KERNEL]...", help="Default: every one.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timings whose median is taken.")] = 7,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every kernel against its reference, on random tensors of one layer."""
    from paddock.bench import layer_shape, time_kernels
    from paddock.train import pick_device

    chosen = pick_device(device)
    found = time_kernels(kernels or [], chosen, repeats)
    if as_json:
        for each in found:
            typer.echo(json.dumps({"device": str(chosen), **asdict(each), "speedup": each.speedup}))
        return
    rows = list(found)
    notes = dict.fromkeys(f"-: {each.note}" for each in rows if each.note)
    print_parts(f"{chosen}: {layer_shape(chosen)}; forward only", _kernel_table(rows), *notes)


def _kernel_table(found: "Sequence[KernelTiming]") -> Any:
    made = table("kernel", numbers=("reference ms", "kernel ms", "speedup", "difference"))
    made.add_column("replaces")
    for each in found:
        cells = ("-", "", "")
        if each.kernel_ms is not None and each.speedup is not None:
            difference = "" if each.difference is None else f"{each.difference:.1e}"
            cells = (f"{each.kernel_ms:.3f}", f"{each.speedup:.2f}", difference)
        made.add_row(each.kernel, f"{each.reference_ms:.3f}", *cells, each.replaces)
    return made
