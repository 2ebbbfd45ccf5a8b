"""Per-token training statistics of a branch: log ratio, advantage and mask, in half precision."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddock.journal.sqlite import LedgerError

# One row per trained branch; replaced if the branch is trained again after a rewind. The table
# keeps its name from format 1.
TOKEN_RECORDS_SCHEMA = """
CREATE TABLE IF NOT EXISTS lessons (
    session TEXT NOT NULL,
    branch INTEGER NOT NULL,
    trained INTEGER NOT NULL,
    packed BLOB NOT NULL,
    PRIMARY KEY (session, branch)
) WITHOUT ROWID;
"""
INSERT_TOKEN_RECORD = "INSERT OR REPLACE INTO lessons VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrainRecord:
    """Columns over the trained tokens of one branch, in order; for display only.

    >>> row = TokenTrainRecord(
    ...     update=3, log_ratio=(0.0, -0.5), advantage=(1.0, 1.0), kept=(True, False)
    ... )
    >>> TokenTrainRecord.unpack(3, row.pack()) == row
    True
    """

    update: int  # first update of its batch
    log_ratio: Sequence[float]  # log(trainer / engine probability), before the update
    advantage: Sequence[float]  # as used by the loss, including the teacher term
    kept: Sequence[bool]  # False: masked by the loss (ratio out of bounds), no gradient

    def pack(self) -> bytes:
        halves = [np.asarray(column, "<f2") for column in (self.log_ratio, self.advantage)]
        body = b"".join(column.tobytes() for column in halves)
        return zlib.compress(body + np.packbits(np.asarray(self.kept, bool)).tobytes(), level=1)

    @classmethod
    def unpack(cls, update: int, data: bytes) -> "TokenTrainRecord":
        try:
            body = zlib.decompress(data)
        except zlib.error as error:
            raise LedgerError(
                f"the token statistics of update {update} are damaged: {error}"
            ) from None
        count = 8 * len(body) // 33  # 33 bits per token, rounded up to bytes
        ratio, advantage = np.frombuffer(body, "<f2", 2 * count).reshape(2, count)
        kept = np.unpackbits(np.frombuffer(body, np.uint8, offset=4 * count), count=count)
        return cls(
            update=update,
            log_ratio=tuple(ratio.tolist()),
            advantage=tuple(advantage.tolist()),
            kept=tuple(map(bool, kept.tolist())),
        )
