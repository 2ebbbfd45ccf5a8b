import pytest

from tests.rl.vault_env import pretrained_on_vault
from tests.rl.vault_runs import register


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A checkpoint whose network opens a fifth of its vaults."""
    register()
    return pretrained_on_vault(tmp_path_factory.mktemp("pretrained") / "start")
