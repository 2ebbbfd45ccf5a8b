"""Host cost of an engine step on a GPU, measured without one.

    python -m benchmarks.host_cost

The model runner launches steps of `small` and of four layers of GLM-5's width with fake tensors
(torch's FakeTensorMode) on a pretended H200: shapes, no memory, no computation. The code takes the
paths that it takes on a GPU. Per step:

- operations: calls that reach the dispatcher below autograd;
- launches: those that would start a kernel or a copy (all but views, metadata and allocation, see
  `FREE`), each counted once although some start several, plus our own kernels, Triton and CUDA C++,
  counted where they are launched instead of running;
- milliseconds: median CPU time of `launch_step`. Most of it is the fake mode's own, more than a GPU
  step costs per operation: compare rows with each other, not with a GPU.
- loop: milliseconds of scheduling and of processing the tokens, in which no tensor takes part.

CUDA graphs are off; with them the forward pass of a decode step is one launch, and only the rest
(the column "sampling") is paid operation by operation.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.model_runner import ModelRunner
from paddock.engine.output_processor import append_sampled
from paddock.engine.request import Request, Sequence
from paddock.engine.sampler import Sampler, SamplingTable
from paddock.engine.scheduler import Scheduler
from paddock.engine.settings import EngineSettings, cached_layers, resolve_kv_cache_config
from paddock.kernels.topk import cuda as topk_cuda
from paddock.model import ModelConfig, Transformer, preset
from paddock.records import SamplingParams

STEPS = 5
DECODE_CONTEXT = 4096  # tokens before the decoded one
FREE = {  # operations that start nothing on the device
    "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like",
    "empty_strided", "expand", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
}  # fmt: skip


@dataclass
class Counts:
    operations: int = 0
    launches: int = 0
    own: int = 0  # launches of our own kernels


class Counting(TorchDispatchMode):
    """Counts operations on device tensors and hands them on."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.operations += 1
        self.counts.launches += func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended_gpu(counts: Counts) -> Iterator[None]:
    """An H200 without memory: fake tensors, kernels that count instead of running."""

    def count(*_: Any, **__: Any) -> None:
        counts.own += 1
        counts.launches += 1

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    from_numpy = torch.from_numpy
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "from_numpy", lambda values: mode.from_tensor(from_numpy(values))),
        (torch.Tensor, "pin_memory", lambda self: self),
        (torch.Tensor, "__getitem__", indexed),
        (torch, "Event", lambda *_: SimpleNamespace(record=lambda: None, synchronize=lambda: None)),
        (torch.version, "cuda", "12.8"),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "get_device_capability", lambda _=None: (9, 0)),
        (torch.cuda, "get_device_properties", lambda _=None: properties),
        (triton.runtime.jit.JITFunction, "run", count),
        (topk_cuda, "nvrtc", lambda: True),
        (topk_cuda, "max_shared_memory_bytes", lambda _: 232_448),
        (topk_cuda, "kernel", lambda *_: SimpleNamespace(launch=count)),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(mode)
        yield


def indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index] by single operations: a build without CUDA cannot index tensors called "cuda"."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        used = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (x.dim() - used)
    dim, gathered = 0, []
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, int):
            x = x.select(dim, part)
            continue
        elif isinstance(part, slice):
            if part != slice(None):
                x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        else:
            gathered += [None] * (dim - len(gathered)) + [torch.as_tensor(part)]
        dim += 1
    return torch.ops.aten.index(x, gathered) if gathered else x


class Server:
    """Scheduler and model runner without an engine thread."""

    def __init__(self, config: ModelConfig, running: int, prefill: int) -> None:
        settings = EngineSettings(
            max_running_requests=running,
            max_prefill_tokens=prefill,
            num_pages=(running * (DECODE_CONTEXT + 64) + 40_000) // 16,
            context_length=40_000,
            cuda_graphs=False,
            prefix_caching=False,
        )
        with torch.device("meta"):
            network = Transformer(config).cast(torch.bfloat16).eval()
        for module in network.modules():  # `to_empty` cannot swap fake tensors
            for name, held in list(module._parameters.items()):
                if held is not None:
                    empty = torch.empty_like(held, device="cuda")
                    module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cuda")
        capacity = resolve_kv_cache_config(settings, config, 2)
        weight = network.norm.weight.detach()
        cache = PagedKVCache(
            config, cached_layers(settings, config), capacity, running, like=weight
        )
        self.table = SamplingTable(running)
        self.scheduler = Scheduler(settings, cache)
        self.runner = ModelRunner(network, cache, settings, self.table)

    def add(self, count: int, prompt: int, *, decoding: bool) -> None:
        """Queue requests; those that decode have the KV entries of their prompt already."""
        for serial in range(count):
            request = Request(
                token_ids=(1,) * prompt, sampling_params=SamplingParams(temperature=0.0)
            )
            sequence = Sequence(
                request=request, id=str(serial), serial=serial, seed=serial,
                stop_token_ids=frozenset((2,)), max_new_tokens=1000, on_output=lambda _: None,
                stream=False, arrived=0.0, tokens=[1] * prompt,
            )  # fmt: skip
            self.scheduler.add(sequence)
            assert self.scheduler._admit(sequence, 0.0)
            if decoding:
                sequence.append(3, -1.0, 0)
                sequence.num_computed = prompt

    def step(self) -> tuple[float, float]:
        """One step; CPU milliseconds of its launch, and of scheduling and processing."""
        start = time.thread_time()
        step = self.scheduler.schedule(0.0)
        for each in step.sequences:
            assert each.slot is not None
            self.table.set(each.slot, each.request.sampling_params, each.seed)
        planned = time.thread_time()
        launched = self.runner.launch_step(step, None, 0.0)
        done = time.thread_time()
        count = sum(row.count for row in launched.rows)
        append_sampled(launched.rows, [3] * count, [-1.0] * count, launched.sampled, 0)
        processed = time.thread_time()
        return 1e3 * (done - planned), 1e3 * (planned - start + processed - done)


@contextmanager
def counted_sampling(counts: Counts, sampling: Counts) -> Iterator[None]:
    """Attribute what happens in `Sampler.sample` to `sampling`."""
    sample = Sampler.sample

    def counted(*args: Any) -> Any:
        before = counts.operations, counts.launches
        result = sample(*args)
        sampling.operations += counts.operations - before[0]
        sampling.launches += counts.launches - before[1]
        return result

    with patch.object(Sampler, "sample", counted):
        yield


def measured(
    config: ModelConfig, prepare: Callable[[Server], None], running: int, tokens: int
) -> tuple[float, float, Counts, Counts]:
    """CPU ms of a launch, loop ms, counts, and counts of sampling, of one kind of step."""
    counts, sampling = Counts(), Counts()

    def prepared() -> Server:
        server = Server(config, running, tokens)
        prepare(server)
        return server

    with pretended_gpu(counts):
        if tokens == 1:
            server = prepared()
            servers = [server] * (STEPS + 2)
        else:
            servers = [prepared() for _ in range(STEPS + 2)]
        times = [server.step() for server in servers[:-1]]
        counts.operations = counts.launches = counts.own = 0
        with counted_sampling(counts, sampling), Counting(counts):
            servers[-1].step()
    launch, loop = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return launch, loop, counts, sampling


def configs() -> dict[str, ModelConfig]:
    glm5 = preset("glm5")
    assert glm5.indexer is not None
    few = {
        "attention": glm5.attention[:4],
        "mlp": ("dense", "moe", "moe", "moe"),
        "indexer": glm5.indexer.model_copy(update={"layers": glm5.indexer.layers[:4]}),
    }
    return {"small": preset("small"), "glm5, 4 layers": glm5.model_copy(update=few)}


def main() -> None:
    print("| | launch ms | loop ms | operations | launches | ours | sampling |")
    print("|---|---|---|---|---|---|---|")
    for name, config in configs().items():
        for running in (1, 64, 256):
            cost = measured(
                config, lambda s, n=running: s.add(n, DECODE_CONTEXT, decoding=True), running, 1
            )
            print_row(f"{name}, decode {running}", *cost)
        for tokens in (2048, 32_768):
            cost = measured(config, lambda s, n=tokens: s.add(1, n, decoding=False), 1, tokens)
            print_row(f"{name}, prefill {tokens}", *cost)


def print_row(name: str, launch: float, loop: float, counts: Counts, sampling: Counts) -> None:
    cells = (f"{launch:.1f}", f"{loop:.2f}", counts.operations, counts.launches, counts.own)
    print("|", " | ".join(map(str, (name, *cells, sampling.launches))), "|", flush=True)


if __name__ == "__main__":
    main()
