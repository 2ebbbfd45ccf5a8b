"""What the trainer made of an attempt's tokens when it learnt from them.

N trained tokens of a branch, in order.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddock.journal.sqlite import LedgerError

# A row for each branch that was trained; trained again after a rewind, it is written over.
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
    """Columns for the trained tokens of one branch, in half precision: they are for eyes.

    >>> row = TokenTrainRecord(update=3, log_ratio=(0.0, -0.5), advantage=(1.0, 1.0), kept=(True, False))
    >>> TokenTrainRecord.unpack(3, row.pack()) == row
    True
    """

    update: int  # the first of its batch
    log_ratio: Sequence[float]  # of the trainer's probability over the engine's, before the update
    advantage: Sequence[float]  # what the loss multiplied by, a teacher's part included
    kept: Sequence[bool]  # False: beyond what the loss trusts, no gradient

    def pack(self) -> bytes:
        halves = [np.asarray(column, "<f2") for column in (self.log_ratio, self.advantage)]
        body = b"".join(column.tobytes() for column in halves)
        return zlib.compress(body + np.packbits(np.asarray(self.kept, bool)).tobytes(), level=1)

    @classmethod
    def unpack(cls, update: int, data: bytes) -> "TokenTrainRecord":
        try:
            body = zlib.decompress(data)
        except zlib.error as error:
            raise LedgerError(f"what was learnt at update {update} is damaged: {error}") from None
        count = 8 * len(body) // 33  # 32 bits a token and one more, rounded up to bytes
        ratio, advantage = np.frombuffer(body, "<f2", 2 * count).reshape(2, count)
        kept = np.unpackbits(np.frombuffer(body, np.uint8, offset=4 * count), count=count)
        return cls(
            update=update,
            log_ratio=tuple(ratio.tolist()),
            advantage=tuple(advantage.tolist()),
            kept=tuple(map(bool, kept.tolist())),
        )
