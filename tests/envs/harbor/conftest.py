import pytest

from paddock.sandbox import rootfs


@pytest.fixture(autouse=True, scope="session")
def _temporary_cache(tmp_path_factory):
    """Keep builds of tests out of the home folder."""
    place = tmp_path_factory.mktemp("cache") / "sandbox"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rootfs, "cache_dir", lambda: place)
        yield
