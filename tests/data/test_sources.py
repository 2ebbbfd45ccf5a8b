import gzip
import json
import sys

import pytest

from paddock.config import Recipe, resolve
from paddock.data import CorpusSettings, FolderSource, JsonlSource, ParquetSource, SourceContext
from paddock.data.sources import DataError, HubSource, PythonSource


def read(source):
    reading = SourceContext(count_tokens=len)
    found = [(document.id, document.text) for document in source.documents(reading)]
    return found, dict(reading.drop_counts)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("one")
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbftwo")
    (tmp_path / "a.py").write_text("three")
    found, drops = read(FolderSource(name="f", path=str(tmp_path)))
    assert found == [("a.md", "two"), ("b/one.txt", "one")]
    assert drops == {}


def test_binary_files_are_skipped_and_counted(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    found, drops = read(FolderSource(name="f", path=str(tmp_path)))
    assert found == [("good.txt", "good")]
    assert drops == {"binary": 1, "invalid encoding": 1, "unreadable file": 1}


def test_a_missing_or_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"source 'f': folder .* not found"):
        read(FolderSource(name="f", path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=r"source 'f': no file in .* matches \*\*/\*\.txt"):
        read(FolderSource(name="f", path=str(tmp_path)))


def test_jsonl_is_read_compressed_or_not_and_bad_lines_are_counted(tmp_path):
    lines = [json.dumps({"text": "one"}), "{broken", "[" * 100_000, json.dumps({"other": 1}), "[1]"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    found, drops = read(JsonlSource(name="j", path=str(tmp_path)))
    assert found == [("a.jsonl:1", "one"), ("b.jsonl.gz:1", "two")]
    assert drops == {"malformed": 2, "no text in 'text'": 2}


def test_a_truncated_compressed_file_is_read_as_far_as_possible(tmp_path):
    lines = "".join(json.dumps({"text": f"{i} {hash(i)}"}) + "\n" for i in range(5000))
    packed = gzip.compress(lines.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    found, drops = read(JsonlSource(name="j", path=str(tmp_path / "a.jsonl.gz")))
    assert 0 < len(found) < 5000
    assert drops["truncated file"] == 1


def test_a_corrupt_compressed_file_is_counted(tmp_path):
    packed = bytearray(gzip.compress(b'{"text": "one"}\n' * 5000))
    packed[10] = 0xFF  # an invalid block type
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    _, drops = read(JsonlSource(name="j", path=str(tmp_path / "a.jsonl.gz")))
    assert drops == {"truncated file": 1}


def test_parquet_is_read_by_column(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["one", None, "two"]}), tmp_path / "a.parquet")
    found, drops = read(ParquetSource(name="p", path=str(tmp_path), text_column="body"))
    assert (found, drops) == ([("a.parquet:0", "one"), ("a.parquet:2", "two")], {"no text": 1})
    with pytest.raises(DataError, match="has no column 'text'; its columns are body"):
        read(ParquetSource(name="p", path=str(tmp_path)))
    (tmp_path / "b.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"b\.parquet is not Parquet"):
        read(ParquetSource(name="p", path=str(tmp_path / "b.parquet")))


def test_a_dataset_is_read_from_a_local_copy(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    found, _ = read(HubSource(name="h", dataset=str(tmp_path)))
    assert found == [("train:0", "one"), ("train:1", "two")]
    with pytest.raises(DataError, match=r"source 'h': dataset .* cannot be read"):
        read(HubSource(name="h", dataset=str(tmp_path / "nowhere")))


def test_a_missing_library_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'paddock\[data\]'"):
        read(HubSource(name="h", dataset=str(tmp_path)))


def test_pythons_own_sources_are_capped_and_in_the_same_order_every_time():
    found, _ = read(PythonSource(name="p", max_bytes=300_000))
    assert 100_000 < sum(len(text.encode()) for _, text in found) <= 300_000
    again, _ = read(PythonSource(name="p", max_bytes=200_000))
    assert found[: len(again)] == again
    assert not any("site-packages" in id for id, _ in found)


def test_a_recipe_selects_sources_by_kind():
    values = {"sources": [{"kind": "reasoning", "name": "facts", "family": "facts", "count": 9}]}
    settings = resolve(CorpusSettings, Recipe(values, {}))
    assert settings.sources[0].family == "facts"
    values["sources"][0] |= {"kind": "jsonl"}
    with pytest.raises(ValueError, match="missing setting 'sources\\[0\\]"):
        resolve(CorpusSettings, Recipe(values, {}))


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ([{"family": "facts", "count": 9}] * 2, "source name 'a' is used twice"),
        ([{"family": "facts"}], "source 'a' is endless: set its 'count'"),
    ],
)
def test_invalid_sources_are_rejected(sources, complaint):
    values = {"sources": [{"kind": "reasoning", "name": "a", **source} for source in sources]}
    with pytest.raises(ValueError, match=complaint):
        resolve(CorpusSettings, Recipe(values, {}))
