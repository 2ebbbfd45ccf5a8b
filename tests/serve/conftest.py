"""One schooled model for all files, one server for each."""

import pytest
from filelock import FileLock

from tests.serve.live import serving
from tests.serve.memorized_model import schooled


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base  # workers of one run share it
    with FileLock(shared / "schooled.lock"):
        target = shared / "schooled"
        return target if target.exists() else schooled(target)


@pytest.fixture(scope="module")
def live(folder):
    with serving(folder) as server:
        yield server
        assert server.audit() == []
