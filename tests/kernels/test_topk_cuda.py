"""The CUDA source of top-k without a GPU: run on this CPU, thread by thread, and compiled.

`cuda_on_host.h` emulates barriers, warp votes and atomics; the source is the one that runs on a
GPU.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paddock.kernels import compile as compiling
from paddock.kernels.topk import cuda
from tests.kernels.topk_cases import KINDS, by_hand

HERE = Path(__file__).parent
SOURCE = Path(cuda.__file__).with_name("topk.cu")
PROGRAM = """
#include "cuda_on_host.h"
#include "topk.cu"
extern "C" int shared_bytes() { return sizeof(Shared); }
extern "C" int most() { return CAP / 2; }
extern "C" int whole() { return WHOLE; }
extern "C" void run(const float* score, i64 stride, const int* visible, const int* start, int* out,
                    int k, int rows, int order) {
  on_host(rows, THREADS, order, topk_rows, score, stride, visible, start, out, k);
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The source for short rows, held whole in shared memory, and for rows of any length."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC"]
    command += [f"-I{HERE}", f"-I{SOURCE.parent}", "host.cpp"]
    for long, threads in enumerate((cuda.SHORT_THREADS, cuda.LONG_THREADS)):
        made = [f"-DTHREADS={threads}", f"-DLONG={long}", "-o", f"{long}.so"]
        subprocess.run([*command, *made], cwd=folder, check=True)
    return [ctypes.CDLL(str(folder / f"{long}.so")) for long in (0, 1)]


@pytest.fixture
def library(libraries):
    return libraries[1]


def address(array):
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def run(library, score, visible, k, *, start=None, order=0):
    """The kernel on rows of `score`, which may be strided; the output is poisoned."""
    visible = np.asarray(visible, np.int32)
    start = None if start is None else np.asarray(start, np.int32)
    out = np.full((len(visible), k), -7, np.int32)
    stride = ctypes.c_longlong(score.strides[0] // 4)
    library.run(
        address(score), stride, address(visible), address(start), address(out), k, len(out), order
    )
    return out


# Below and above what shared memory holds, around k, unaligned, long enough to be sampled.
LENGTHS = [
    (70, 64),
    (300, 64),
    (2100, 2048),
    (8192, 2048),
    (8193, 2048),
    (20001, 512),
    (9000, 4096),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_index_follows_the_tie_rule(kind, libraries):
    rng = np.random.default_rng(0)
    for at, (length, k) in enumerate(LENGTHS):
        memory = np.empty(length + 4, np.float32)
        row = memory[at % 4 : at % 4 + length]  # any alignment
        row[:] = KINDS[kind](rng, length)
        for library in libraries[length > cuda.WHOLE :]:
            found = run(library, row[None], [length], k, order=at)
            np.testing.assert_array_equal(found[0], by_hand(row, k), err_msg=f"{length}, {k}")


@pytest.mark.parametrize("kind", ["random", "plateau of zeros", "many ties"])
def test_the_thread_order_does_not_matter(kind, library):
    row = KINDS[kind](np.random.default_rng(1), 12000).astype(np.float32)[None]
    first = run(library, row, [12000], 2048, order=0)
    for order in range(1, 4):
        np.testing.assert_array_equal(run(library, row, [12000], 2048, order=order), first)


def test_strided_rows_with_start_offsets(library):
    rng = np.random.default_rng(2)
    score = rng.normal(size=(5, 9100)).astype(np.float32)
    visible, start = [0, 3, 40, 9001, 9100], [7, 0, 1000, 2**30, 5]
    score_seen = score.copy()
    for row, n in enumerate(visible):
        score_seen[row, n:] = np.nan  # invisible scores are never read
    found = run(library, score_seen, visible, 40, start=start)
    for row, n in enumerate(visible):
        kept = by_hand(score[row, :n], 40)
        np.testing.assert_array_equal(found[row], np.where(kept < 0, kept, kept + start[row]))


def test_a_misleading_sample_does_not_change_the_result(library):
    """The sampled positions hold all the large values, or none: every guess is wrong."""
    rng = np.random.default_rng(3)
    for factor in (1.0, -1.0):
        row = rng.normal(size=16384).astype(np.float32)
        at = np.arange(512)  # every 32nd, loaded by fours
        row[at // 4 * 4 * 32 + at % 4] += factor * 100
        for order in range(4):
            found = run(library, row[None], [16384], 2048, order=order)
            np.testing.assert_array_equal(found[0], by_hand(row, 2048))


def test_the_launcher_and_the_source_agree_on_sizes(libraries):
    for library, longest in zip(libraries, (cuda.WHOLE, cuda.WHOLE + 1), strict=True):
        bitmap = 4 * -(-(longest + 3) // 32) if longest > cuda.WHOLE else 0
        assert library.shared_bytes() + bitmap == cuda.shared_bytes(longest)
        assert library.most() >= cuda.MOST
        assert library.whole() == cuda.WHOLE


@pytest.fixture
def nvrtc():
    if compiling.nvrtc() is None:
        pytest.skip("no NVRTC here: it comes with a CUDA build of PyTorch")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("long", [0, 1])
def test_the_source_compiles_within_register_limits(arch, long, tmp_path):
    threads, threads_per_sm = (cuda.LONG_THREADS, 1024) if long else (cuda.SHORT_THREADS, 1536)
    options = [f"-DTHREADS={threads}", f"-DLONG={long}"]
    code, log = compiling.compile_cuda(SOURCE.read_text(), arch, options, tmp_path)
    assert code[:4] == b"\x7fELF"
    assert int(re.search(r"Used (\d+) registers", log)[1]) * threads_per_sm <= 65_536
    assert not any(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))


@pytest.mark.usefixtures("nvrtc")
def test_a_source_is_compiled_once(tmp_path, monkeypatch):
    source = 'extern "C" __global__ void f(int* x) { *x = N; }'
    first = compiling.compile_cuda(source, "sm_90", ["-DN=1"], tmp_path)
    other = compiling.compile_cuda(source, "sm_90", ["-DN=2"], tmp_path)
    assert first[0] != other[0]
    monkeypatch.setattr(compiling, "_compile", None)  # compiling again would fail
    assert compiling.compile_cuda(source, "sm_90", ["-DN=1"], tmp_path) == first


@pytest.mark.usefixtures("nvrtc")
def test_a_compile_error_shows_the_compilers_message(tmp_path):
    with pytest.raises(compiling.KernelCompileError, match="undefined"):
        compiling.compile_cuda("__global__ void f() { undefined(); }", "sm_90", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nvrtc")
def test_an_unwritable_cache_folder_is_ignored(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    code, _ = compiling.compile_cuda("__global__ void f() {}", "sm_90", folder=blocked / "cache")
    assert code[:4] == b"\x7fELF"
