"""Speed benchmarks behind `paddock bench`: serving, training steps, kernels.

kernel_cases.py      the benchmark case of every kernel
kernel_inputs.py     shapes and random tensors of one layer
kernels.py           every kernel timed against its reference
memory.py            peak resident memory of a process
mla_prepare_case.py  the input of the MLA prepare kernels
serving.py           throughput and latency of an engine or a server
serving_backends.py  servers over HTTP, and an engine in this process
training.py          throughput, memory and MFU of a training step
"""

from paddock.bench.kernel_inputs import layer_shape
from paddock.bench.kernels import KernelTiming, time_kernels
from paddock.bench.memory import peak_rss_bytes
from paddock.bench.serving import BenchmarkBackend, ServingMetrics, Workload, run_workload
from paddock.bench.serving_backends import (
    BenchmarkEngine,
    ServerBackend,
    connect_server,
    open_benchmark_engine,
)
from paddock.bench.training import measure_training

__all__ = [
    "BenchmarkBackend",
    "BenchmarkEngine",
    "KernelTiming",
    "ServerBackend",
    "ServingMetrics",
    "Workload",
    "connect_server",
    "layer_shape",
    "measure_training",
    "open_benchmark_engine",
    "peak_rss_bytes",
    "run_workload",
    "time_kernels",
]
