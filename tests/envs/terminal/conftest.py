import pytest

from paddock.sandbox import rootfs


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_our_own(tmp_path_factory):
    """What tests build is not kept in anybody's home."""
    place = tmp_path_factory.mktemp("cache") / "sandbox"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rootfs, "cache_dir", lambda: place)
        yield
