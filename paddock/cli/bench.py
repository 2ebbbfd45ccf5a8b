"""`paddock bench`: speed of serving, training and kernels on this machine."""

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paddock.cli.errors import ErrorReportingGroup
from paddock.cli.options import QuantOption
from paddock.cli.tables import print_parts, table
from paddock.launch import UserError, units

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from paddock.bench import (
        BenchmarkBackend,
        BenchmarkEngine,
        KernelTiming,
        ServerBackend,
        ServingMetrics,
        Workload,
    )

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Measure speed on this machine: serving, training, kernels.",
)

DEFAULT_RUNNING = 32  # requests that an engine here runs at a time without --max-concurrency

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")]


# Options of `bench serve` that need several lines.
Backend = Annotated[
    Literal["openai", "openai-chat", "sglang"],
    typer.Option(help="API of the server: /v1/completions, /v1/chat/completions, /generate."),
]
MaxConcurrency = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Concurrent requests; a row each. Default: 1,8,32; no limit with --request-rate.",
    ),
]
RequestRate = Annotated[
    float, typer.Option(help="Requests/s, Poisson arrivals; inf: as soon as one is done.")
]
Burstiness = Annotated[
    float, typer.Option(help="Of the arrivals: below 1 more bursty, above 1 more even.")
]


@app.command("serve")
def bench_serve(  # noqa: PLR0913  one option each
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint, a run, or a preset (fresh weights)."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A server instead: ours, vLLM, SGLang, llama.cpp, ...")
    ] = None,
    backend: Backend = "openai",
    served_model_name: Annotated[
        str | None, typer.Option("--model", help="Its name there. Default: the first listed.")
    ] = None,
    text_prompts: Annotated[
        bool, typer.Option("--text-prompts", help="Send words instead of token ids (openai).")
    ] = False,
    max_concurrency: MaxConcurrency = None,
    request_rate: RequestRate = math.inf,
    burstiness: Burstiness = 1.0,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 64,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts share.")] = 0,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per row. Default: four times N, or 128.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=5, help="Speculative (MTP) tokens per step.")
    ] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option()] = None,
    quant: QuantOption = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else cpu.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PADDOCK_API_KEY", help="API key of the server.")
    ] = None,
    server_pid: Annotated[
        int | None, typer.Option(help="Process of a server here whose peak memory is reported.")
    ] = None,
    result_file: Annotated[
        Path | None, typer.Option(help="Write the JSON lines to this file too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Throughput, time to first token (TTFT), time per output token (TPOT), inter-token latency
    (ITL) and end-to-end latency (E2EL), as `vllm bench serve` defines them.

    One warm-up round per row does not count.
    """
    from paddock.bench import Workload, connect_server, open_benchmark_engine

    load = Workload(
        input_len=input_len,
        output_len=output_len,
        num_prompts=num_prompts or 0,
        prefix_len=prefix_len,
        seed=seed,
        request_rate=request_rate,
        burstiness=burstiness,
    )
    limits = _limits(max_concurrency, _checked(load).request_rate)
    if model is None and base_url is not None:
        server = connect_server(
            base_url, backend, key=api_key, model=served_model_name, text_prompts=text_prompts
        )
        name, found = asyncio.run(_measure_server(server, load, limits, server_pid))
        about = {"backend": backend, "model_id": name, "base_url": base_url}
    elif model is not None and base_url is None:
        made = open_benchmark_engine(
            model,
            load,
            max(each or DEFAULT_RUNNING for each in limits),
            mtp=num_speculative_tokens,
            device=device,
            dtype=dtype,
            quant=quant,
        )
        found = _measure_engine(made, load, limits)
        about = {"backend": "engine", "model_id": model, "device": made.device, "dtype": made.dtype}
    else:
        raise UserError("pass either a MODEL to run here or the --base-url of a server")
    _report(about, found, result_file, as_json)


async def _measure_server(
    opened: "AbstractAsyncContextManager[ServerBackend]",
    load: "Workload",
    limits: Sequence[int | None],
    pid: int | None,
) -> "tuple[str, list[ServingMetrics]]":
    """Name of the model, and what was measured."""
    async with opened as server:
        return server.model, await _sweep(server, load, limits, pid)


def _measure_engine(
    made: "BenchmarkEngine", load: "Workload", limits: Sequence[int | None]
) -> "list[ServingMetrics]":
    with made.engine:
        load = replace(load, vocab=made.config.vocab)
        return asyncio.run(_sweep(made.backend, load, limits, os.getpid()))


def _limits(text: str | None, request_rate: float) -> list[int | None]:
    """
    >>> _limits("1,8, 32", math.inf), _limits(None, 2.0)
    ([1, 8, 32], [None])
    """
    if text is None and math.isfinite(request_rate):
        return [None]
    try:
        found = [int(word) for word in (text or "1,8,32").split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--max-concurrency {text}: expected numbers such as 1,8,32")
    return [*found]


def _checked(load: "Workload") -> "Workload":
    if load.prefix_len > load.input_len - 1:
        raise UserError(
            f"--prefix-len {load.prefix_len} must be smaller than --input-len {load.input_len}"
        )
    if not load.request_rate > 0:
        raise UserError(f"--request-rate {load.request_rate:g} must be positive")
    if not 0 < load.burstiness < math.inf:
        raise UserError(f"--burstiness {load.burstiness:g} must be positive and finite")
    return load


async def _sweep(
    backend: "BenchmarkBackend",
    load: "Workload",
    limits: Sequence[int | None],
    pid: int | None,
) -> "list[ServingMetrics]":
    """One measurement per limit; `pid`: the process that serves."""
    from paddock.bench import peak_rss_bytes, run_workload

    found = []
    for limit in limits:
        count = load.num_prompts or 4 * (limit or DEFAULT_RUNNING)
        one = await run_workload(backend, replace(load, num_prompts=count), limit)
        found.append(replace(one, peak_rss_bytes=None if pid is None else peak_rss_bytes(pid)))
    return found


def _report(
    about: dict[str, str], found: "Sequence[ServingMetrics]", file: Path | None, as_json: bool
) -> None:
    about = {"date": time.strftime("%Y%m%d-%H%M%S"), **about}
    lines = [json.dumps(about | each.to_json()) for each in found]
    if file is not None:
        file.write_text("".join(f"{line}\n" for line in lines))
    if as_json:
        for line in lines:
            typer.echo(line)
        return
    latencies = [(name, p) for name in ("TTFT", "TPOT", "ITL") for p in (50, 99)]
    made = table(
        "concurrency",
        numbers=(
            *("req/s", "output\ntok/s", "total\ntok/s"),
            *(f"{name}\np{p} ms" for name, p in latencies),
        ),
    )
    notes = []
    for each in found:
        times = (getattr(each, name.lower()).percentiles[p] for name, p in latencies)
        made.add_row(
            "no limit" if each.max_concurrency is None else str(each.max_concurrency),
            f"{each.request_throughput:.2f}",
            f"{each.output_throughput:,.0f}",
            f"{each.total_token_throughput:,.0f}",
            *(f"{ms:.1f}" for ms in times),
        )
        if each.failed:
            count = each.failed + each.completed
            notes.append(f"{each.failed} of {count} requests failed; the first: {each.first_error}")
    last = found[-1]
    if last.peak_rss_bytes is not None:
        notes.append(f"peak memory of the process: {units.format_bytes(last.peak_rss_bytes)}")
    lengths = (last.total_input_tokens, last.total_output_tokens)
    inputs, outputs = (round(total / last.completed) for total in lengths)
    where = ", ".join(word for key, word in about.items() if key != "date")
    print_parts(f"{where}: {inputs} input tokens, {outputs} output tokens", made, *notes)


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
