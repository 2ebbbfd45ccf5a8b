"""Reinforcement learning in an environment of your own.

    python examples/rl_own_environment.py [OUT]

An environment is a settings class that makes a taskset; a taskset numbers tasks and makes an `Env`
for each rollout. A recipe names it as "module:Settings". Reward here: how short the reply is.
"""

import sys
from pathlib import Path

from paddock import launch
from paddock.envs.chat_env import ChatEnv
from paddock.envs.registry import EnvSettings
from paddock.records import Budget, Message, Task, Verdict

RECIPE = """
stage = "reasoning"
steps = 2
rollout = {{ groups_per_batch = 2 }}
init = {{ checkpoint = "{model}" }}
sampling = {{ max_new_tokens = 12 }}
tasks.short = {{ env = "rl_own_environment:BrevitySettings", group_size = 4 }}
"""


class BrevitySettings(EnvSettings):
    def make_taskset(self) -> "BrevityTaskset":
        return BrevityTaskset()


class BrevityTaskset:
    name = "brevity"

    def size(self, split: str) -> int | None:
        return None  # unlimited

    def task(self, index: int, split: str = "train") -> Task:
        ask = Message(role="user", content=f"Take {index % 10} . Last digit ?")
        limits = Budget(turns=1, seconds=60, output_bytes=1000)
        return Task(id=f"brevity/{split}/{index}", env=self.name, messages=(ask,), budget=limits)

    def make_env(self, task: Task) -> ChatEnv:
        return ChatEnv(task, score)


async def score(messages: tuple[Message, ...]) -> Verdict:
    """Reward between 0 and 1; the last message is the model's."""
    return Verdict(reward=1 / (1 + len(messages[-1].content.split())))


class PrintReward(launch.RLCallbacks):
    def on_update(self, metrics: object) -> None:
        print(f"step {metrics.update}: reward {metrics.rollout_stats.reward}")  # type: ignore


def main(out: str = "runs/examples/rl") -> None:
    model = launch.train(Path(__file__).with_name("tiny.toml"), out=f"{out}/model")
    recipe = Path(out) / "rl.toml"
    recipe.write_text(RECIPE.format(model=model))
    print(f"run folder: {launch.rl(recipe, out=f'{out}/rl', callbacks=PrintReward())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
