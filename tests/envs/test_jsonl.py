import gzip
import json

import pytest

from paddock.envs.jsonl import RowError, read_rows


def test_jsonl_json_lists_and_gzip_are_read(tmp_path):
    entries = [{"a": "x"}, {"a": "y\r\nz"}]
    lines = "\n".join(map(json.dumps, entries)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(entries).encode()))
    for file in tmp_path.iterdir():
        assert [row.get_text("a") for row in read_rows(file)] == ["x", "y\nz"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "x"}\n{oops', r"a.jsonl:2: not JSON"),
        ("[" * 100_000, r"a.jsonl: not JSON"),
        ('{"a": "x"}\n3', r"a.jsonl:2: not an object"),
        ('{"b": "x"}', r"a.jsonl:1: 'a' or 'c' is missing"),
        ('{"a": 3}', r"a.jsonl:1: 'a' must be a string, got 3"),
        ("[3]", r"a.jsonl\[1\]: not an object"),
    ],
)
def test_an_invalid_row_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(RowError, match=message):
        [row.get_text("a", "c") for row in read_rows(tmp_path / "a.jsonl")]


def test_a_missing_file_and_a_broken_archive_raise(tmp_path):
    with pytest.raises(RowError, match="cannot read"):
        list(read_rows(tmp_path / "none"))
    packed = gzip.compress(b"{}")
    for broken in (packed[:-9], bytes([*packed[:10], packed[10] ^ 0xFF, *packed[11:]])):
        (tmp_path / "a.gz").write_bytes(broken)
        with pytest.raises(RowError, match="cannot read"):
            list(read_rows(tmp_path / "a.gz"))


def test_a_list_of_strings_is_checked(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": ["x"], "b": [1]}')
    (row,) = read_rows(tmp_path / "a.jsonl")
    assert row.get_texts("a") == ("x",)
    assert row.get_texts("c") == ()
    with pytest.raises(RowError, match="'b' must be a list of strings"):
        row.get_texts("b")
