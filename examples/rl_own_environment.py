"""Reinforcement learning in an environment of your own.

    python examples/rl_own_environment.py [OUT]

A settings class makes a taskset, a taskset makes an `Env` per rollout; a recipe names it as
"module:Settings". The shorter the reply, the higher the reward.
"""

import sys
from pathlib import Path

from paddock import launch
from paddock.envs.chat_env import ChatEnv
from paddock.envs.registry import EnvSettings
from paddock.records import Budget, Message, Task, Verdict

LIMITS = Budget(turns=1, seconds=60, output_bytes=1000)
RECIPE = """
stage = "reasoning"
steps = 2
rollout.groups_per_batch = 2
init.checkpoint = "{model}"
sampling.max_new_tokens = 12
tasks.short = {{ env = "rl_own_environment:BrevitySettings", group_size = 4 }}
"""


class BrevitySettings(EnvSettings):
    def make_taskset(self) -> "BrevityTaskset":
        return BrevityTaskset()


class BrevityTaskset:
    name = "brevity"

    def size(self, split: str) -> None: ...  # unlimited

    def task(self, index: int, split: str = "train") -> Task:
        messages = (Message(role="user", content=f"Take {index % 10} . Last digit ?"),)
        name = f"brevity/{split}/{index}"
        return Task(id=name, env=self.name, messages=messages, budget=LIMITS)

    def make_env(self, task: Task) -> ChatEnv:
        return ChatEnv(task, score)


async def score(messages: tuple[Message, ...]) -> Verdict:
    return Verdict(reward=1 / (1 + len(messages[-1].content.split())))


def main(out: str = "runs/examples/rl") -> None:
    model = launch.train(Path(__file__).with_name("tiny.toml"), out=f"{out}/model")
    (recipe := Path(out) / "rl.toml").write_text(RECIPE.format(model=model))
    print(f"run folder: {launch.rl(recipe, out=f'{out}/rl')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
