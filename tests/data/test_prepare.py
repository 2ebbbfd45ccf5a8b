import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddock.data import Corpus, CorpusSettings, FolderSource, JsonlSource, prepare_corpus
from paddock.data.dialogue_sources import DialogueSource
from paddock.data.prepare import parallel
from paddock.data.prepare.fim import FimSettings
from paddock.data.prepare.settings import QualityFilterSettings
from paddock.data.reasoning import ReasoningSource
from paddock.data.sources import DataError
from paddock.envs.nano.language import is_held_out
from paddock.text import SpecialToken, train_tokenizer
from tests.data.tiny import byte_tokenizer
from tests.patience import until

ROOT = Path(__file__).parents[2]


def jsonl(folder, texts, *, name="lines", **settings):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return JsonlSource(name=name, path=str(file), **settings)


def document_text(i):
    return f"Story {i} is about {'the number ' * (i % 3)}{i * i} and the day it was first seen."


def decoded(documents):
    for number in range(len(documents)):
        yield documents.token_ids(number, 0, documents.length(number)).tolist()


def texts_in(documents):
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(ids, skip_special=True) for ids in decoded(documents)]


def test_documents_round_trip_with_boundary_tokens(tmp_path):
    source = jsonl(tmp_path, [document_text(i) for i in range(300)])
    settings = CorpusSettings(sources=(source,), held_out_fraction=0.1, tokens_per_shard=2000)
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    train_set, held_out = corpus.documents("lines"), corpus.documents("lines", "held_out")
    end = byte_tokenizer().special_token_ids[SpecialToken.ENDOFTEXT]
    assert all(ids[0] == ids[-1] == end for ids in decoded(train_set))
    there, aside = set(texts_in(train_set)), set(texts_in(held_out))
    assert there | aside == {document_text(i) for i in range(300)} and not there & aside
    assert 10 < len(aside) < 60
    assert len(corpus.manifest.sources["lines"].splits["train"]) > 1


def test_a_document_stays_in_its_split_at_any_position(tmp_path):
    stories = [document_text(i) for i in range(200)]
    sides = []
    for name, order in (("one", stories), ("two", stories[::-1])):
        settings = CorpusSettings(
            sources=(jsonl(tmp_path, order, name=name),), held_out_fraction=0.2
        )
        corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
        sides.append(sorted(texts_in(corpus.documents(name, "held_out"))))
    assert sides[0] == sides[1]


def test_every_drop_is_counted_and_copies_are_found_across_sources(tmp_path):
    first = jsonl(tmp_path, [document_text(1), document_text(2), " ", "tiny"], name="first")
    second = jsonl(tmp_path, [document_text(2), document_text(3), "spam " * 999], name="second")
    settings = CorpusSettings(sources=(first, second), held_out_fraction=0.0)
    manifest = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache").manifest
    assert manifest.sources["first"].drop_counts == {"empty": 1, "too short": 1}
    assert manifest.sources["second"].drop_counts == {"exact copy": 1, "repetitive": 1}
    assert manifest.sources["second"].bytes == len(document_text(3))


def by_length(document):
    return float(len(document.text))


def test_a_custom_quality_function(tmp_path):
    source = jsonl(tmp_path, [document_text(1), document_text(1) * 3])
    quality = QualityFilterSettings(function="tests.data.test_prepare:by_length", min_score=100.0)
    settings = CorpusSettings(sources=(source,), quality=quality, held_out_fraction=0.0)
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    assert texts_in(corpus.documents("lines")) == [document_text(1) * 3]
    assert corpus.manifest.sources["lines"].drop_counts == {"quality": 1}
    wrong = settings.model_copy(
        update={"quality": QualityFilterSettings(function="json:no", min_score=0.0)}
    )
    with pytest.raises(DataError, match="quality function 'json:no'"):
        prepare_corpus(wrong, byte_tokenizer(), tmp_path / "cache")


def test_fim_applies_to_code_and_not_to_prose(tmp_path):
    code = jsonl(tmp_path, [document_text(i) for i in range(40)], name="code", content_type="code")
    prose = jsonl(tmp_path, [document_text(i) for i in range(40, 80)], name="prose")
    settings = CorpusSettings(
        sources=(code, prose), fim=FimSettings(rate=1.0), held_out_fraction=0.0
    )
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    middle = byte_tokenizer().special_token_ids[SpecialToken.CODE_MIDDLE]
    assert all(middle in ids for ids in decoded(corpus.documents("code")))
    assert not any(middle in ids for ids in decoded(corpus.documents("prose")))


def test_generated_documents_are_not_deduplicated_and_use_their_own_split(tmp_path):
    sources = (
        ReasoningSource(name="knowledge", family="knowledge", count=300),
        ReasoningSource(name="chains", family="chains", count=300),
    )
    settings = CorpusSettings(sources=sources, held_out_fraction=0.1)
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path)
    assert len(corpus.documents("knowledge")) == 300
    for split, expected in (("train", False), ("held_out", True)):
        found = texts_in(corpus.documents("chains", split))
        assert len(found) == (30 if expected else 300)
        assert all(is_held_out(f"{t.split(' . ')[0]} . Last digit ?") is expected for t in found)
    assert list(corpus.split("held_out")) == ["chains"]


def test_the_same_settings_and_tokenizer_are_prepared_once(tmp_path):
    source = jsonl(tmp_path, [document_text(i) for i in range(20)])
    settings = CorpusSettings(sources=(source,), held_out_fraction=0.0)
    seen = []

    def progress(name, documents, size):
        seen.append((name, documents, size))

    first = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache", progress=progress)
    assert seen == [("lines", 20, sum(len(document_text(i)) for i in range(20)))]
    again = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache", progress=progress)
    assert (again.folder, len(seen)) == (first.folder, 1)
    other = settings.model_copy(update={"seed": 1})
    assert prepare_corpus(other, byte_tokenizer(), tmp_path / "cache").folder != first.folder


def test_the_same_settings_give_the_same_bytes(tmp_path):
    source = jsonl(tmp_path, [document_text(i) for i in range(50)], content_type="code")
    settings = CorpusSettings(sources=(source,))
    folders = [prepare_corpus(settings, byte_tokenizer(), tmp_path / c).folder for c in "ab"]
    files = [{f.name: f.read_bytes() for f in d.rglob("*.*") if f.is_file()} for d in folders]
    assert files[0] == files[1]


# --- errors ---------------------------------------------------------------------------------------


def test_a_source_without_remaining_documents_is_an_error_with_the_reason(tmp_path):
    settings = CorpusSettings(sources=(jsonl(tmp_path, ["", "tiny", "tiny"]),))
    with pytest.raises(
        DataError, match="'lines': no documents are left; dropped: 1 empty, 2 too short"
    ):
        prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    (tmp_path / "lines.jsonl").write_text("")
    with pytest.raises(DataError, match="source 'lines': it has no documents"):
        prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_fully_held_out_source_is_reported(tmp_path):
    source = jsonl(tmp_path, [document_text(i) for i in range(3)])
    settings = CorpusSettings(sources=(source,), held_out_fraction=0.999999)
    with pytest.raises(DataError, match="source 'lines': all 3 documents are held out"):
        prepare_corpus(settings, byte_tokenizer(), tmp_path / "corpora")


def test_a_binary_file_in_a_text_folder_is_counted_and_the_rest_is_kept(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(document_text(7))
    (tmp_path / "texts" / "b.txt").write_bytes(bytes(range(256)) * 9)
    source = FolderSource(name="texts", path=str(tmp_path / "texts"))
    settings = CorpusSettings(sources=(source,), held_out_fraction=0.0)
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    assert texts_in(corpus.documents("texts")) == [document_text(7)]
    assert corpus.manifest.sources["texts"].drop_counts == {"binary": 1}


def test_a_killed_run_is_repeated_cleanly(tmp_path):
    settings = CorpusSettings(sources=(jsonl(tmp_path, [document_text(i) for i in range(20)]),))
    whole = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache").folder
    partial = whole.with_name(f".{whole.name}.partial")
    shutil.move(whole, partial)
    next(partial.rglob("*.bin")).write_bytes(b"half")
    assert (
        len(prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache").documents("lines")) == 20
    )
    assert not partial.exists()


def test_another_vocabulary_is_rejected_and_both_are_named(tmp_path):
    settings = CorpusSettings(sources=(jsonl(tmp_path, [document_text(1)]),), held_out_fraction=0.0)
    folder = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache").folder
    other = train_tokenizer([document_text(i) for i in range(9)], vocab=350)
    with pytest.raises(DataError) as error:
        Corpus(folder, tokenizer=other)
    assert byte_tokenizer().fingerprint in str(error.value)
    assert other.fingerprint in str(error.value)


def test_a_tokenizer_without_the_boundary_token_is_rejected(tmp_path):
    settings = CorpusSettings(sources=(jsonl(tmp_path, [document_text(1)]),), eos_tokens=("<eos>",))
    with pytest.raises(DataError, match="tokenizer 'trained' has no token <eos>"):
        prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")


def test_a_truncated_or_corrupt_shard_is_a_clear_error(tmp_path):
    settings = CorpusSettings(sources=(jsonl(tmp_path, [document_text(i) for i in range(9)]),))
    corpus = prepare_corpus(settings, byte_tokenizer(), tmp_path / "cache")
    tokens, index = (corpus.folder / "lines" / f"train-00000.{end}" for end in ("bin", "idx"))
    good = tokens.read_bytes()
    tokens.write_bytes(good[:-2])
    with pytest.raises(
        DataError, match=r"train-00000\.bin has \d+ bytes, expected \d+: it was truncated"
    ):
        corpus.documents("lines")
    tokens.write_bytes(np.full(len(good) // 2, 60_000, "<u2").tobytes())
    with pytest.raises(DataError, match="has token id 60000, but the vocabulary has"):
        corpus.documents("lines").token_ids(0, 0, 5)
    tokens.unlink()
    with pytest.raises(DataError, match=r"train-00000\.bin: No such file"):
        corpus.documents("lines")
    tokens.write_bytes(good)
    index.write_bytes(np.zeros(len(index.read_bytes()) // 8, "<u8").tobytes())
    with pytest.raises(DataError, match=r"train-00000\.idx is corrupt"):
        corpus.documents("lines")
    (corpus.folder / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="is not a manifest of format 1"):
        Corpus(corpus.folder, tokenizer=byte_tokenizer())


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path):
    jsonl(tmp_path, [document_text(i) for i in range(3000)])
    code = """if True:
        import resource, sys
        from paddock.data import CorpusSettings, JsonlSource, prepare_corpus
        from tests.data.tiny import byte_tokenizer
        source = JsonlSource(name="lines", path=sys.argv[1])
        tokenizer = byte_tokenizer()
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        prepare_corpus(CorpusSettings(sources=(source,)), tokenizer, sys.argv[2])
    """
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", code, str(tmp_path / "lines.jsonl"), str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "DataError: no space for a corpus in" in done.stderr.splitlines()[-1]
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def generated(count):
    families = ("facts", "chains", "lookups")
    return tuple(ReasoningSource(name=f, family=f, count=count) for f in families)


def test_generated_sources_are_the_same_in_serial_or_parallel(tmp_path, monkeypatch):
    stories = jsonl(tmp_path, [document_text(i) for i in range(40)])
    settings = CorpusSettings(sources=(stories, *generated(60)), held_out_fraction=0.1)
    assert not parallel.sources_to_parallelize(settings.sources, 2)
    monkeypatch.setattr(parallel, "MIN_PARALLEL_DOCUMENTS", 100)
    assert len(parallel.sources_to_parallelize(settings.sources, 2)) == 3
    progress_seen = {"serial": {}, "parallel": {}}
    serial_corpus, parallel_corpus = (
        prepare_corpus(
            settings,
            byte_tokenizer(),
            tmp_path / where,
            progress=lambda name, documents, _, where=where: progress_seen[where].update(
                {name: documents}
            ),
            processes=processes,
        )
        for where, processes in (("serial", 1), ("parallel", 2))
    )
    assert progress_seen["serial"] == progress_seen["parallel"]
    assert files_below(serial_corpus.folder) == files_below(parallel_corpus.folder)


def files_below(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_an_error_in_a_worker_is_reported_without_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "MIN_PARALLEL_DOCUMENTS", 1)
    silent = DialogueSource(name="silent", path=str(tmp_path / "nobody.jsonl"))
    monkeypatch.setattr(type(silent), "is_generated", True)
    settings = CorpusSettings(sources=(*generated(20), silent))
    with pytest.raises(DataError, match=r"nobody\.jsonl"):
        prepare_corpus(settings, byte_tokenizer(), tmp_path / "root", processes=2)
    assert [path for path in (tmp_path / "root").iterdir() if path.is_dir()] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from threading import Thread
from paddock.data import CorpusSettings, ReasoningSource, prepare_corpus
from paddock.data.dialogue_sources import DialogueSource
from paddock.data.prepare import parallel
from tests.data.tiny import byte_tokenizer
import multiprocessing, time

def watch():
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    sources = tuple(
        ReasoningSource(name=f, family=f, count=50_000_000) for f in ("facts", "chains")
    )
    Thread(target=watch).start()
    prepare_corpus(CorpusSettings(sources=sources), byte_tokenizer(), sys.argv[1], processes=2)
"""


def test_worker_processes_end_with_the_parent(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "root"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    children = [int(word) for word in done.stdout.split()]
    assert len(children) == 2, done.stderr
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
