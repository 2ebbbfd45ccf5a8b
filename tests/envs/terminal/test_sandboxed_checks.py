import io
import tarfile
import tracemalloc

from paddock.envs.terminal.sandboxed_checks import check_expectation


def packed(path, mode, text):
    with tarfile.open(path, mode) as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return {"how": "archive", "path": str(path), "value": {"a.txt": text.decode()}}


def test_a_damaged_archive_fails_the_check(tmp_path):
    expect = packed(tmp_path / "a.tar.xz", "w:xz", b"".join(b"%d," % n for n in range(100_000)))
    assert check_expectation(expect)
    data = bytearray((tmp_path / "a.tar.xz").read_bytes())
    data[1000] ^= 0xFF
    (tmp_path / "a.tar.xz").write_bytes(data)
    assert not check_expectation(expect)


def test_a_too_large_archive_is_not_read(tmp_path):
    expect = packed(tmp_path / "a.tar.gz", "w:gz", bytes(1 << 26)) | {"value": {"a.txt": ""}}
    tracemalloc.start()
    try:
        assert not check_expectation(expect)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
