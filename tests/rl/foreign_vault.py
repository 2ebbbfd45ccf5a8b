"""The vault as a taskset of verifiers, with a reward that a tiny network can earn."""

import verifiers.v1 as vf


class VaultTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def brevity(self, trace: vf.Trace) -> float:
        return -len(trace.assistant_messages[-1].content or "") / 40


class VaultTaskset(vf.Taskset[VaultTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield VaultTask(vf.TaskData(prompt=f"Vault {n % 10} ."), self.config.task)
            n += 1


__all__ = ["VaultTaskset"]
