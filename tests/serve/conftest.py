"""One memorized model for all files, one server per file."""

import pytest
from filelock import FileLock

from tests.serve.live import serving
from tests.serve.memorized_model import save_memorized_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = (
        base.parent if base.name.startswith("popen-") else base
    )  # shared by the workers of a test run
    with FileLock(shared / "memorized_model.lock"):
        target = shared / "memorized_model"
        return target if target.exists() else save_memorized_model(target)


@pytest.fixture(scope="module")
def live(folder):
    with serving(folder) as server:
        yield server
        assert server.audit() == []
