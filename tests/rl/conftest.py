import pytest

from tests.rl.vault_env import schooled
from tests.rl.vault_runs import register


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A network that opens a fifth of its vaults."""
    register()
    return schooled(tmp_path_factory.mktemp("schooled") / "start")
