import numpy as np
import torch

from paddock.data import PackedBatch
from paddock.train.micro_batch import (
    IGNORE_INDEX,
    count_tokens,
    iter_micro_batches,
    split_documents,
)


def batch_of(*lengths: int, untrained: tuple[int, ...] = ()) -> PackedBatch:
    tokens = sum(lengths)
    trained = np.ones(tokens, np.bool_)
    trained[np.cumsum([0, *lengths[:-1]])] = False
    trained[list(untrained)] = False
    return PackedBatch(
        token_T=np.arange(tokens, dtype=np.int32) + 10,
        loss_mask_T=trained,
        lengths=lengths,
        sources=("x",) * len(lengths),
        num_targets=int(trained.sum()),
    )


def test_a_target_is_the_next_token_of_the_same_document():
    (batch,) = iter_micro_batches(batch_of(4, 1, 3), torch.device("cpu"))
    assert batch.targets(1).tolist() == [
        11,
        12,
        13,
        IGNORE_INDEX,
        IGNORE_INDEX,
        16,
        17,
        IGNORE_INDEX,
    ]
    assert batch.targets(3).tolist() == [13] + [IGNORE_INDEX] * 7


def test_a_masked_token_is_never_a_target():
    (batch,) = iter_micro_batches(batch_of(4, untrained=(2,)), torch.device("cpu"))
    assert batch.targets(1).tolist() == [11, IGNORE_INDEX, 13, IGNORE_INDEX]
    assert batch.targets(2).tolist() == [IGNORE_INDEX, 13, IGNORE_INDEX, IGNORE_INDEX]


def test_counts_match_the_targets():
    batch = batch_of(4, 1, 3, 9, untrained=(2, 12))
    (whole,) = iter_micro_batches(batch, torch.device("cpu"))
    found = count_tokens(batch, depths=3)
    assert found.tokens == 17
    assert list(found.targets) == [int((whole.targets(a) >= 0).sum()) for a in (1, 2, 3, 4)]


def test_micro_batches_are_split_between_documents():
    batch = batch_of(4, 1, 3, 9)
    assert [lengths for _, lengths in split_documents(batch, 5)] == [(4, 1), (3,), (9,)]
    assert [lengths for _, lengths in split_documents(batch, None)] == [(4, 1, 3, 9)]
    assert [part for part, _ in split_documents(batch, 5)] == [
        slice(0, 5),
        slice(5, 8),
        slice(8, 17),
    ]
