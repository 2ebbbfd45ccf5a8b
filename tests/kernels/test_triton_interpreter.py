"""Triton kernels match the references, forward and backward; see `interpreter_cases`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreter_cases import CASES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux alone")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def distances(tmp_path_factory):
    file = tmp_path_factory.mktemp("interpreted") / "distances.json"
    command = [sys.executable, "-m", "tests.kernels.interpreter_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_and_its_gradients_match_the_reference(name, distances):
    assert max(distances[name]) < 1e-6, distances[name]
