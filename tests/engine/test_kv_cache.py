"""The KV cache's memory."""

from pathlib import Path

import pytest

from tests.engine.networks import copy_of, engine, network

STATUS = Path("/proc/self/status")


def resident_bytes():
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_on_a_cpu_a_large_cache_takes_memory_only_when_it_is_used():
    net, before = copy_of(network("sparse")), resident_bytes()
    with engine(net, num_pages=None, kv_cache_bytes=1 << 30) as found:
        assert found._loop.cache.bytes > 1 << 29
        assert resident_bytes() - before < 1 << 28
