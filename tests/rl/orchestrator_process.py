"""An orchestrator process: `python -m tests.rl.orchestrator_process FOLDER SEED CALLS`.

Deterministic, one step off; writes a checkpoint atomically every other update. It is killed after
CALLS Python calls (0: never); otherwise it prints `done`, its weights and the number of calls.
"""

import json
import sys
from pathlib import Path

from tests.killing import kill_after_calls
from tests.rl.test_orchestrator_resume import Disk, deterministic_run, run_process
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
    settings, tasks, engine, step_s = deterministic_run(1, delays=int(seed))
    made = kill_after_calls(int(calls))
    learner, _ = run(
        run_process(File(Path(folder)), settings, tasks, engine, batches=BATCHES, step_s=step_s)
    )
    sys.stdout.write(f"done {learner.weights} {made()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
