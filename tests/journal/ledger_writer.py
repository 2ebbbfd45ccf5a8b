"""A process that writes a ledger until it is killed.

    python -m tests.journal.ledger_writer LEDGER WITNESS CALLS

Every move is logged to the witness file once the ledger has it. Groups are trained four at a time.
The process is killed after CALLS Python calls, independent of the speed of the machine.
"""

import os
import sys
from random import Random

from paddock.journal import GroupRecord, Ledger
from paddock.records import Completion, Failure, Segment, Trajectory, Turn, Verdict
from tests.killing import kill_after_calls


def rollout(entry, member, rng):
    ids = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 400)))
    completion = Completion(
        token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(Segment(0, len(ids)),), finish="stop"
    )
    failed = rng.random() < 0.3
    return Trajectory(
        task_id=f"{entry.task}/{entry.number}",
        group_id=f"g{entry.ordinal}",
        session_id=f"s{entry.ordinal}-{member}",
        turns=(Turn(added_ids=(1,), completion=completion),),
        outcome=Failure(kind="world", where="start", what="planted")
        if failed
        else Verdict(reward=1.0),
    )


def main(path, witness, calls):
    ledger = Ledger(path)
    log_fd = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    log_move = lambda *words: os.write(log_fd, (" ".join(map(str, words)) + "\n").encode())  # noqa: E731
    entries = ledger.groups()
    rng = Random(len(entries))
    numbers = {task: sum(e.task == task for e in entries) for task in ("a", "b")}
    update = len(ledger.batches())
    kill_after_calls(int(calls))
    for ordinal in range(len(entries), 1_000_000):
        task = rng.choice(["a", "b"])
        entry = GroupRecord(ordinal=ordinal, task=task, number=numbers[task], size=2, issued=update)
        numbers[task] += 1
        ledger.issue([entry])
        log_move("issued", ordinal)
        for member in range(2):
            ledger.record_rollout(ordinal, member, [rollout(entry, member, rng)])
            log_move("attempt", ordinal, member)
        status = rng.choice(["finished", "finished", "filtered", "failed"])
        ledger.end_group(ordinal, status, "" if status == "finished" else "planted")
        log_move(status, ordinal)
        finished = [e.ordinal for e in ledger.groups("finished")][:4]
        if len(finished) == 4:
            ledger.record_update(update, update + 1, finished)
            log_move("trained", update, *finished)
            update += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
