import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.data import DataLoaderSettings, PackedDataLoader, iterate_once
from paddock.data.mixture import MixtureSettings
from paddock.data.sources import DataError
from tests.data.tiny import make_datasets

ROOT = Path(__file__).parents[2]
MODES = ["truncate", "best_fit", "rows"]
LENGTHS = {"a": [5, 90, 17, 33, 2] * 8, "b": [64, 65, 1] * 9}
WEIGHTS = {"a": ((0.0, 1.0), (1.0, 0.2)), "b": 0.5}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return make_datasets(tmp_path_factory.mktemp("datasets"), LENGTHS)


def stream(documents, mode, *, seed=0, rank=0, world=1, **other):
    mixture = MixtureSettings(weights=WEIGHTS)
    made = DataLoaderSettings(
        packing=mode, seq_len=64, batch_tokens=256, mixture=mixture, seed=seed, **other
    )
    return PackedDataLoader(documents, made, rank=rank, world_size=world)


def contents(batch):
    return batch.token_T.tolist(), batch.loss_mask_T.tolist(), batch.lengths, batch.sources


def spans(batch):
    ends = np.cumsum(batch.lengths)[:-1]
    return [tuple(part.tolist()) for part in np.split(batch.token_T, ends)]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_spans_of_one_document_each(documents, mode):
    batch = stream(documents, mode).next_batch()
    assert sum(batch.lengths) == len(batch.token_T) <= 256
    assert batch.token_T.dtype == np.int32
    starts = np.cumsum([0, *batch.lengths[:-1]])
    assert (np.flatnonzero(~batch.loss_mask_T) == starts).all()
    assert batch.num_targets == batch.loss_mask_T.sum()
    for span in spans(batch):  # tokens of a document are consecutive numbers here
        assert list(span) == list(range(span[0], span[0] + len(span)))
    assert sum(batch.tokens_by_source().values()) == len(batch.token_T)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20)
@given(before=st.integers(0, 12), after=st.integers(1, 6), seed=st.integers(0, 9))
def test_a_restored_dataloader_continues_with_the_same_batches(
    documents, mode, before, after, seed
):
    whole = stream(documents, mode, seed=seed)
    steps = [i / 20 for i in range(before + after)]
    for progress in steps[:before]:
        whole.next_batch(progress=progress)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = [contents(whole.next_batch(progress=p)) for p in steps[before:]]
    resumed = stream(documents, mode, seed=seed)
    resumed.next_batch(progress=0.5)
    resumed.load_state_dict(state)
    assert [contents(resumed.next_batch(progress=p)) for p in steps[before:]] == expected
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("mode", MODES)
def test_another_process_continues_with_the_same_batches(documents, mode, tmp_path):
    local = stream(documents, mode)
    for _ in range(3):
        local.next_batch()
    code = """if True:
        import json, sys
        from pathlib import Path
        from tests.data.tiny import make_datasets
        from tests.data.test_dataloader import LENGTHS, contents, stream
        there = stream(make_datasets(Path(sys.argv[1]), LENGTHS), sys.argv[2])
        there.load_state_dict(json.loads(sys.argv[3]))
        print(json.dumps([contents(there.next_batch()) for _ in range(3)]))
    """
    command = [sys.executable, "-c", code, str(tmp_path), mode, json.dumps(local.state_dict())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = json.loads(json.dumps([contents(local.next_batch()) for _ in range(3)]))
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(documents, mode, world):
    alone = stream(documents, mode)
    ranks = [stream(documents, mode, rank=rank, world=world) for rank in range(world)]
    for _ in range(5):
        whole, parts = alone.next_batch(), [rank.next_batch() for rank in ranks]
        assert sorted(spans(whole)) == sorted(span for part in parts for span in spans(part))
        assert all(part.lengths for part in parts)
        assert {part.num_targets for part in parts} == {whole.num_targets}
        assert sum(int(part.loss_mask_T.sum()) for part in parts) == whole.num_targets
    assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


def test_state_saved_on_four_ranks_loads_on_two(documents):
    four = stream(documents, "best_fit", rank=3, world=4)
    four.next_batch()
    two = [stream(documents, "best_fit", rank=rank, world=2) for rank in range(2)]
    for rank in two:
        rank.load_state_dict(four.state_dict())
    alone = stream(documents, "best_fit")
    alone.next_batch()
    assert sorted(spans(alone.next_batch())) == sorted(
        s for rank in two for s in spans(rank.next_batch())
    )


def test_batches_may_grow(documents):
    growing = stream(documents, "truncate")
    assert [len(growing.next_batch(tokens=64 * n).token_T) for n in (1, 2, 8)] == [64, 128, 512]
    with pytest.raises(DataError, match=r"batch_tokens: 100 must be a multiple of seq_len .64"):
        growing.next_batch(tokens=100)


def test_ranks_without_rows_are_rejected(documents):
    with pytest.raises(DataError, match="256 are too few for 5 ranks with a seq_len of 64"):
        stream(documents, "rows", world=5).next_batch()


def test_truncated_tokens_are_counted(documents):
    rows, fitted = stream(documents, "rows"), stream(documents, "best_fit")
    for _ in range(20):
        rows.next_batch()
        fitted.next_batch()
    assert rows.counts["cut_tokens"] > 0 == rows.counts["split_documents"]
    assert fitted.counts["split_documents"] > 0 == fitted.counts["cut_tokens"]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_fractions_of_the_used_tokens(tmp_path, mode):
    found = make_datasets(tmp_path, {"long": [600] * 20, "short": [30] * 20})
    mixture = MixtureSettings(weights={"long": 0.5, "short": 0.5})
    made = DataLoaderSettings(packing=mode, seq_len=64, batch_tokens=256, mixture=mixture)
    running = PackedDataLoader(found, made)
    batches = [running.next_batch(tokens=512).tokens_by_source() for _ in range(500)]
    used = sum(batches, Counter())
    assert used["long"] / used.total() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"made": {"seed": 7, "mode": "rows", "context": 64}}, "seed was 7 and is 0"),
        ({"made": {"seed": 0, "mode": "rows", "context": 32}}, "context was 32 and is 64"),
        ({"sizes": {"a": 41, "b": 27}}, "documents of a was 41 and is 40"),
        ({"waiting": [[9, 0, 0, 1]]}, "not the state of a dataloader"),
        ({"taken": None}, "not the state of a dataloader"),
    ],
)
def test_the_state_of_another_dataloader_is_rejected(documents, change, complaint):
    local = stream(documents, "rows")
    with pytest.raises(DataError, match=complaint):
        local.load_state_dict({**local.state_dict(), **change})


def test_a_batch_smaller_than_a_row_is_rejected():
    with pytest.raises(ValueError, match="batch_tokens: 100 must be at least one row of 200"):
        DataLoaderSettings(seq_len=200, batch_tokens=100)


def test_iterate_once_yields_every_token_once(documents):
    batches = list(iterate_once(documents, context=64, batch_tokens=200))
    tokens = np.concatenate([batch.token_T for batch in batches])
    assert sorted(tokens.tolist()) == list(range(sum(map(sum, LENGTHS.values()))))
    assert max(max(batch.lengths) for batch in batches) == 64
    assert max(len(batch.token_T) for batch in batches) <= 200
