"""A conductor in a process of its own: `python -m tests.rl.orchestrator_process FOLDER SEED CALLS`.

In lock-step, one step off; a checkpoint every other update, as a file that appears whole or not at
all. It dies after so many Python calls (0: not at all), or says `done`, its weights and how many
calls it made when all is trained.
"""

import json
import sys
from pathlib import Path

from tests.killing import die_after
from tests.rl.test_orchestrator_resume import Disk, live, lockstep
from tests.rollout.virtual_time import run

BATCHES = 24


class File(Disk):
    def __init__(self, folder):
        super().__init__(folder, every=2)
        self.file = folder / "checkpoint.json"
        if self.file.exists():
            self.saved = {int(k): v for k, v in json.loads(self.file.read_text()).items()}

    def save(self, updates, weights):
        super().save(updates, weights)
        fresh = self.file.with_suffix(".partial")
        fresh.write_text(json.dumps(self.saved))
        fresh.replace(self.file)


def main(folder, seed, calls):
    pace, tasks, engine, step_s = lockstep(1, delays=int(seed))
    made = die_after(int(calls))
    learner, _ = run(live(File(Path(folder)), pace, tasks, engine, batches=BATCHES, step_s=step_s))
    sys.stdout.write(f"done {learner.weights} {made()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
