"""A taskset in the API of verifiers: as someone wrote it, with no word of Paddock."""

import os

import verifiers.v1 as vf

KNOWN = {"France": "Paris", "Norway": "Oslo"}


class Atlas(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def look_up(self, country: str) -> str:
        """The capital of a country."""
        return KNOWN[country]


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        if "break the verifier" in replies:
            raise ValueError("the verifier is broken")
        if "crash" in replies:
            os._exit(3)
        return float(self.data.answer in replies[-1])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CapitalConfig(vf.TasksetConfig):
    country: str = "France"


class CapitalTaskset(vf.Taskset[CapitalTask, CapitalConfig]):
    def load(self) -> list[CapitalTask]:
        return [
            CapitalTask(
                CapitalData(
                    prompt=f"Capital of {self.config.country}? ({n})",
                    system_prompt="Be short.",
                    answer=KNOWN[self.config.country],
                ),
                self.config.task,
            )
            for n in range(5)
        ]

    @classmethod
    def toolsets(cls, config: CapitalConfig) -> list[vf.Toolset]:
        return [Atlas(vf.SharedToolsetConfig())]


__all__ = ["CapitalTaskset"]

if __name__ == "__main__":
    Atlas.run()
