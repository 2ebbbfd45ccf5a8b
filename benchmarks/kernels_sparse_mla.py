"""Sparse MLA on one GPU: correctness, and speed against the best dense attention.

    python -m benchmarks.kernels_sparse_mla [check] [fwd] [bwd] [heads16] [small] [dense] ...

Each section runs in its own process, so that one that fails or hangs does not affect the others.
First all run on a few queries, in parallel, which compiles every kernel. Arms of one comparison
alternate; times are medians of device events over whole launches. TFLOP/s count the multiply-adds
of the selected keys; "of peak" is the share of a bf16 matrix product's rate on an H200,
756 TFLOP/s.

Indices: "independent" selects new keys for every query, the worst case; "overlapping" replaces one
key in ten within a run of 64 queries, as neighbours of a trained indexer do.

T queries, H heads, C row width, V value columns, S rows, K kept per query.
"""

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Queue
from threading import Thread

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import medians
from benchmarks.table import Claim, print_claims
from paddock.kernels.sparse_mla.problem import Attended, Problem

PEAK = 756e12
RUN_OF_NEIGHBOURS, FRESH = 64, 0.1
FEW = 64  # queries of a warm-up


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    value: int
    rest: int
    kept: int
    scale: float

    @property
    def row(self) -> int:
        return self.value + self.rest

    def flops(self, pairs: int, *, backward: bool) -> float:
        """Scores and values; backward recomputes scores and has four more products."""
        columns = 3 * self.row + 2 * self.value if backward else self.row + self.value
        return 2.0 * self.heads * columns * pairs


GLM5 = Shape(heads=64, value=512, rest=64, kept=2048, scale=256**-0.5)
SMALL = Shape(heads=16, value=256, rest=64, kept=1024, scale=128**-0.5)


def random_selection(first: int, count: int, kept: int, *, overlapping: bool) -> Tensor:
    """[count, kept] int32: keys selected by the queries at positions first.. among earlier ones.

    Entry j lies in the j-th of `kept` equal slices of the earlier positions. Ascending, distinct,
    padded with -1 if there are fewer.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    index_TK = torch.empty(count, kept, dtype=torch.int32, device="cuda")
    j = torch.arange(kept, device="cuda")
    for start in range(0, count, 8192):
        n = min(8192, count - start)
        t = torch.arange(first + start, first + start + n, device="cuda")
        draw = torch.rand(n, kept, device="cuda", generator=generator)
        width = (t + 1).clamp_min(kept)[:, None] / kept
        if overlapping:
            leader = torch.arange(n, device="cuda") // RUN_OF_NEIGHBOURS * RUN_OF_NEIGHBOURS
            fresh = torch.rand(n, kept, device="cuda", generator=generator) < FRESH
            draw = torch.where(fresh, draw, draw[leader])
            width = torch.where(fresh, width, width[leader])
        low, high = (j * width).ceil(), ((j + 1) * width).ceil() - 1  # slices share no position
        found = torch.minimum((low + draw * (high - low + 1)).floor(), high).long()
        found = found.sort(dim=1).values
        # Slices of neighbours differ slightly, so a new entry may repeat another one.
        again = F.pad(found[:, 1:] <= found[:, :-1], (1, 0))
        found = torch.where(again | (found > t[:, None]), -1, found)
        short = torch.where(j <= t[:, None], j, -1)
        index_TK[start : start + n] = torch.where((t + 1 < kept)[:, None], short, found)
    return index_TK


def problem_of(
    shape: Shape, keys: int, queries: int, *, overlapping: bool = False, few: bool = False
) -> Problem:
    """The last `queries` of a document of `keys` tokens."""
    count = min(queries, FEW) if few else queries
    torch.manual_seed(0)
    return Problem(
        torch.randn(count, shape.heads, shape.row, device="cuda", dtype=torch.bfloat16),
        torch.randn(keys, shape.row, device="cuda", dtype=torch.bfloat16),
        random_selection(keys - count, count, shape.kept, overlapping=overlapping),
        shape.scale,
        shape.value,
    )


def race(arms: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of every arm that runs; the arms alternate."""
    running = {}
    for name, arm in arms.items():
        try:
            arm()
            torch.cuda.synchronize()
            running[name] = arm
        except Exception as error:
            message = str(error).strip().splitlines() or [""]
            print(f"    {name}: {type(error).__name__}: {message[-1][:200]}", flush=True)
    times = medians([*running.values()], repeats=rounds, warm=0)
    return dict(zip(running, times, strict=True))


def report(title: str, times: dict[str, float], flops: float | None) -> None:
    print(title)
    for name, ms in sorted(times.items(), key=lambda each: each[1]):
        rate = ""
        if flops:
            rate = f"{flops / ms / 1e9:6.0f} TFLOP/s  {flops / ms * 1e3 / PEAK:5.0%} of peak"
        print(f"    {name:<34}{ms:9.3f} ms  {rate}")
    sys.stdout.flush()


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def pairs_of(problem: Problem) -> int:
    return int((problem.index_TK >= 0).sum())


def forward_arms(problem: Problem) -> dict[str, Callable[[], Attended]]:
    from paddock.kernels.sparse_mla import gluon, triton

    arms: dict[str, Callable[[], Attended]] = {"triton": lambda: triton.forward(problem)}
    few = problem.query_THC.shape[1] <= 32
    arms["gluon"] = lambda: gluon.forward(problem, united=False)
    if few:
        arms["gluon united"] = lambda: gluon.forward(problem)
    return arms


def backward_arms(
    problem: Problem, attended: Attended, grad_THV: Tensor
) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    from paddock.kernels.sparse_mla import gluon_backward, triton

    inputs = (problem, attended, grad_THV)
    arms: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "triton": lambda: triton.backward(*inputs, deterministic=False)
    }
    unions = (False, True) if problem.query_THC.shape[1] <= 32 else (False,)
    for united in unions:
        for chunk, fixed in ((64, False), (128, False), (64, True)):
            name = f"gluon {'deterministic' if fixed else f'chunk {chunk}'}"
            arms[name + " united" * united] = lambda u=united, c=chunk, f=fixed: (
                gluon_backward.backward(*inputs, deterministic=f, united=u, chunk=c)
            )
    return arms


def dense_arms(keys: int, *, backward: bool) -> dict[str, Callable[[], object]]:
    """PyTorch's fused causal attention over 64 heads of 256, expanded."""
    heads = [
        torch.randn(1, 64, keys, 256, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        for _ in range(3)
    ]

    def attend(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads, is_causal=True)

    backends = {
        "dense cuDNN": SDPBackend.CUDNN_ATTENTION,
        "dense flash": SDPBackend.FLASH_ATTENTION,
    }
    if not backward:
        return {name: lambda b=b: attend(b) for name, b in backends.items()}
    arms: dict[str, Callable[[], object]] = {}
    for name, backend in backends.items():
        try:
            out = attend(backend)
        except RuntimeError as error:
            print(f"    {name}: {error}", flush=True)
            continue
        grad = torch.randn_like(out)
        arms[name] = lambda o=out, g=grad: torch.autograd.grad(o, heads, g, retain_graph=True)
    return arms


def rate_claim(name: str, rate: float, target: float) -> Claim:
    measured = f"{rate:.0f} TFLOP/s"
    return Claim(
        name=name, target=f">= {target:.0f} TFLOP/s", measured=measured, holds=rate >= target
    )


def cases() -> Iterator[tuple[int, bool]]:
    for keys in (8192, 32768, 131072):
        yield keys, False
        if keys > 8192:
            yield keys, True


def describe(keys: int, overlapping: bool) -> str:
    return f"{keys // 1024}K {'overlapping' if overlapping else 'independent'}"


def forward_section(few: bool) -> list[Claim]:
    """The last 4096 queries of a document at GLM-5's shape."""
    claims = []
    for keys, overlapping in cases():
        problem = problem_of(GLM5, keys, 4096, overlapping=overlapping, few=few)
        flops = GLM5.flops(pairs_of(problem), backward=False)
        times = race(forward_arms(problem), 1 if few else 9)
        report(f"forward {describe(keys, overlapping)}", times, flops)
        ours = [ms for name, ms in times.items() if name.startswith("gluon")]
        if ours:
            rate = flops / min(ours) / 1e9
            claims.append(rate_claim(f"sparse forward {describe(keys, overlapping)}", rate, 450))
    return claims


def backward_section(few: bool) -> list[Claim]:
    """The same backward, including zeroing the gradients and computing deltas and lists."""
    claims = []
    for keys, overlapping in cases():
        problem = problem_of(GLM5, keys, 4096, overlapping=overlapping, few=few)
        attended = forward_arms(problem)["triton"]()
        grad_THV = torch.randn_like(attended.out_THV)
        flops = GLM5.flops(pairs_of(problem), backward=True)
        times = race(backward_arms(problem, attended, grad_THV), 1 if few else 5)
        report(f"backward {describe(keys, overlapping)}", times, flops)
        ours = [ms for name, ms in times.items() if name.startswith("gluon chunk")]
        target = {8192: 260, 32768: 260, 131072: 160}[keys]
        if ours:
            rate = flops / min(ours) / 1e9
            claims.append(
                rate_claim(f"sparse backward {describe(keys, overlapping)}", rate, target)
            )
    return claims


def dense_section(few: bool) -> list[Claim]:
    """Whole documents, sparse against dense; absorbed projections are in neither."""
    from paddock.kernels.sparse_mla import fused

    for keys in (8192, 16384, 32768, 131072):
        if few and keys > 8192:
            break
        problem = problem_of(GLM5, keys, keys, few=few)
        rounds = 1 if few or keys > 32768 else 3
        times = race({"sparse": lambda p=problem: fused.forward(p)}, rounds)
        times |= race(dense_arms(256 if few else keys, backward=False), rounds)
        report(f"forward of a document, {keys // 1024}K", times, None)
        if keys > 32768:
            break
        attended = fused.forward(problem)
        grad_THV = torch.randn_like(attended.out_THV)
        back = {
            "sparse": lambda p=problem, a=attended, g=grad_THV: fused.backward(
                p, a, g, deterministic=False
            )
        }
        times = race(back, rounds)
        del attended, grad_THV, problem, back
        torch.cuda.empty_cache()
        times |= race(dense_arms(256 if few else keys, backward=True), rounds)
        report(f"backward of a document, {keys // 1024}K", times, None)
        torch.cuda.empty_cache()
    return []


def heads_section(few: bool, heads: int) -> list[Claim]:
    """Another head count at GLM-5's widths, 2048 queries of 32K."""
    shape = replace(GLM5, heads=heads)
    for overlapping in (False, True):
        problem = problem_of(shape, 32768, 2048, overlapping=overlapping, few=few)
        arms = forward_arms(problem)
        flops = shape.flops(pairs_of(problem), backward=False)
        title = f"{heads} heads, {describe(32768, overlapping)}"
        report(f"forward {title}", race(arms, 1 if few else 5), flops)
        attended = arms["triton"]()
        back = backward_arms(problem, attended, torch.randn_like(attended.out_THV))
        keep = {name: arm for name, arm in back.items() if "chunk 64" not in name}
        flops = shape.flops(pairs_of(problem), backward=True)
        report(f"backward {title}", race(keep, 1 if few else 5), flops)
    return []


def small_section(few: bool) -> list[Claim]:
    """A layer of the small preset: sparse against masked, 8 documents of 4K and one of 32K."""
    for documents, length in ((8, 4096), (1, 32768)):
        for overlapping in (False, True):
            kind = "overlapping" if overlapping else "independent"
            title = f"{documents} x {length // 1024}K {kind}"
            problem, spans = packed(SMALL, documents, length, overlapping, few)
            pairs, rounds = pairs_of(problem), 1 if few else 5
            times = race(forward_arms(problem) | forward_tiles(problem), rounds)
            report(f"small forward {title}", times, SMALL.flops(pairs, backward=False))
            attended = forward_arms(problem)["triton"]()
            inputs = (problem, attended, torch.randn_like(attended.out_THV))
            times = race(backward_arms(*inputs) | backward_tiles(*inputs), rounds)
            report(f"small backward {title}", times, SMALL.flops(pairs, backward=True))
            del attended, inputs
            times = masked_times(problem, spans, rounds)
            times |= race({"united lists alone": lambda p=problem: united(p)}, rounds)
            report(f"small, masked, {title}", times, None)
            torch.cuda.empty_cache()
    return []


def forward_tiles(problem: Problem) -> dict[str, Callable[[], Attended]]:
    from paddock.kernels.sparse_mla import triton

    return {
        f"triton {slots} slots, {stages} stages": lambda n=slots, m=stages: triton.forward(
            problem, triton.Tile(16, n, 4, m)
        )
        for slots, stages in ((64, 3), (32, 2), (32, 3))
    }


def backward_tiles(
    problem: Problem, attended: Attended, grad_THV: Tensor
) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    from paddock.kernels.sparse_mla import triton

    inputs = (problem, attended, grad_THV)
    return {
        f"triton {slots} slots, {stages} stages": lambda n=slots, m=stages: triton.backward(
            *inputs, deterministic=False, tile=triton.Tile(16, n, 4, m)
        )
        for slots, stages in ((32, 2), (16, 2))
    }


def masked_times(problem: Problem, spans: list, rounds: int) -> dict[str, float]:
    """The alternative: dense attention over expanded heads with a top-k mask."""
    from paddock.kernels.dense_attention import topk_masked_attention

    T = len(problem.query_THC)
    heads = [
        torch.randn(T, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def attend() -> Tensor:
        return topk_masked_attention(*heads, spans, problem.index_TK, scale=problem.scale)

    times = race({"masked forward": attend}, rounds)
    if not times:
        return times
    out = attend()
    grad = torch.randn_like(out)
    back = {"masked backward": lambda: torch.autograd.grad(out, heads, grad, retain_graph=True)}
    return times | race(back, rounds)


def united(problem: Problem) -> object:
    from paddock.kernels.sparse_mla.gluon_tiles import Lists

    return Lists.of(problem, united=True)


def packed(
    shape: Shape, documents: int, length: int, overlapping: bool, few: bool
) -> tuple[Problem, list]:
    """Packed documents with all of their queries."""
    from paddock.kernels.spans import Span

    length = max(FEW // documents, 16) if few else length
    T = documents * length
    local_TK = random_selection(0, length, shape.kept, overlapping=overlapping)
    index_TK = torch.cat(
        [torch.where(local_TK < 0, -1, local_TK + d * length) for d in range(documents)]
    )
    torch.manual_seed(0)
    problem = Problem(
        torch.randn(T, shape.heads, shape.row, device="cuda", dtype=torch.bfloat16),
        torch.randn(T, shape.row, device="cuda", dtype=torch.bfloat16),
        index_TK,
        shape.scale,
        shape.value,
    )
    return problem, [Span(d * length, length, d * length, length) for d in range(documents)]


GROUPS = (
    "test_triton",
    "test_gluon",
    "test_rows",
    "test_the_door",
    "test_far",
)


def check_section(few: bool) -> list[Claim]:
    """The GPU tests, in parallel groups."""
    if few:
        return []
    start = time.monotonic()
    running = {}
    for group in GROUPS:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--maxfail=5"]
        command += ["-p", "no:cacheprovider", "tests/kernels/test_sparse_mla_gpu.py", "-k", group]
        running[group] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    claims = []
    for group, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, start + 150 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "\nstopped after 150 s"
        passed = process.returncode == 0
        print(
            f"== {group}",
            output[-5000:] if not passed else output.strip().splitlines()[-1],
            flush=True,
        )
        claims.append(Claim(name=f"GPU tests: {group}", target="pass", measured="", holds=passed))
    return claims


# Sections by name, with their timeout in seconds.
SECTIONS: dict[str, tuple[Callable[[bool], list[Claim]], int]] = {
    "check": (check_section, 165),
    "fwd": (forward_section, 30),
    "bwd": (backward_section, 30),
    "heads8": (partial(heads_section, heads=8), 25),
    "heads16": (partial(heads_section, heads=16), 25),
    "heads32": (partial(heads_section, heads=32), 25),
    "heads128": (partial(heads_section, heads=128), 25),
    "small": (small_section, 40),
    "dense": (dense_section, 60),
}
STARTS = "-- "  # printed by a subprocess before each section


def _process(names: Sequence[str], *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "benchmarks.kernels_sparse_mla", "--alone", *flags]
    return subprocess.Popen(
        [*command, *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def warm_up(names: Sequence[str], limit_s: int = 80) -> None:
    """Every section on a few queries, in parallel: compiles the kernels of the timed runs."""
    running = {name: _process([name], "--few") for name in names if name != "check"}
    deadline = time.monotonic() + limit_s
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            print(f"warm-up of {name}: not done after {limit_s} s; output:\n{output[-1500:]}")
            continue
        failures = [line for line in output.splitlines() if "Error" in line]
        if process.returncode or failures:
            print(f"warm-up of {name}:", *(failures or [output[-1500:]]), sep="\n  ", flush=True)


def run_sections(names: Sequence[str]) -> None:
    """One section after another, in one process until a section kills it or times out."""
    while names:
        process, lines = _process(names), Queue[str | None]()
        reader = Thread(
            target=lambda p=process, q=lines: [*map(q.put, p.stdout or ()), q.put(None)]
        )
        reader.start()
        current, deadline = names[0], time.monotonic() + 60
        try:
            while (line := lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
                print(line, end="", flush=True)
                if line.startswith(STARTS):
                    current = line.removeprefix(STARTS).strip()
                    deadline = time.monotonic() + SECTIONS[current][1]
        except Empty:
            print(f"{current}: timed out", flush=True)
            process.kill()
        # A section that raises is reported and the next one runs: only a killed process ends early.
        reader.join()
        done = process.wait() == 0
        names = [] if done else names[list(names).index(current) + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="|".join(SECTIONS))
    parser.add_argument("--alone", action="store_true", help="in this process")
    parser.add_argument("--few", action="store_true", help="warm-up on a few queries")
    options = parser.parse_args()
    names = options.sections or list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(
            f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}"
        )
    if options.alone:
        for name in names:
            print(f"{STARTS}{name}")
            try:
                if claims := SECTIONS[name][0](options.few):
                    print_claims(claims)
            except Exception:
                traceback.print_exc()
            torch.cuda.empty_cache()
        return
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    start = time.monotonic()
    warm_up(names)
    print(f"warmed up in {time.monotonic() - start:.0f} s", flush=True)
    run_sections(names)
    print(f"all in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
