"""Speed benchmarks behind `paddock bench`: serving, training steps, kernels.

kernel_cases.py      the benchmark case of every kernel
kernel_inputs.py     shapes and random tensors of one layer
kernels.py           every kernel timed against its reference
mla_prepare_case.py  the input of the MLA prepare kernels
serving.py           throughput and latency of an engine or a server
training.py          throughput, memory and MFU of a training step
"""

from paddock.bench.kernel_inputs import layer_shape
from paddock.bench.kernels import KernelTiming, time_kernels
from paddock.bench.serving import (
    ServingMetrics,
    Workload,
    connect_server,
    open_benchmark_engine,
    run_workload,
)
from paddock.bench.training import measure_training

__all__ = [
    "KernelTiming",
    "ServingMetrics",
    "Workload",
    "connect_server",
    "layer_shape",
    "measure_training",
    "open_benchmark_engine",
    "run_workload",
    "time_kernels",
]
