"""An environment that a tiny network can be pretrained for in seconds.

A vault must be opened with a tool before it is reported done. Some demonstrations do so, others
only claim it. The pretrained network opens the vault now and then, and RL raises that rate.
"""

import asyncio
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.envs.registry import EnvSettings
from paddock.envs.tools import Tool, execute_tool_calls
from paddock.model import AttentionMetadata, Transformer
from paddock.records import Budget, Message, Task, ToolCall, ToolSpec, Verdict
from paddock.text import ThinkingKwargs, Tokenizer, train_tokenizer, with_chat_template
from paddock.text.chat_template import glm_chat_template
from paddock.text.glm_renderer import GlmRenderer
from tests.model.networks import latent_config

LOOK = ToolSpec(
    name="look",
    description="x",
    parameters={"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]},
)
LIMITS = Budget(turns=3, seconds=300, output_bytes=200)  # generous for a busy machine
KEEPS = ThinkingKwargs(clear_thinking=False)
NUMBERS = [str(n) for n in range(10)]


class VaultSettings(EnvSettings):
    seed: int = 0
    delay_s: float = 0.0  # upper bound of the delay of a tool call
    breaks: float = 0.0  # probability that reset fails
    exits: str = ""  # where sys.exit is called: task, open, grade, aside
    asks: int = 0  # times that a user asks again after a reply without calls

    def make_taskset(self):
        return VaultTaskset(self)

    def leave(self, where):
        if where == self.exits:
            sys.exit(0)


class VaultTaskset:
    name = "vault"

    def __init__(self, settings=None):
        self.settings = settings or VaultSettings()
        self.opened = Counter()  # a seed per rollout, independent of others

    def size(self, split):
        return None

    def task(self, index, split="train"):
        self.settings.leave("task")
        name = f"vault/{split}/{index}"
        ask = Message(role="user", content=f"Vault {self.which(name)} .")
        return Task(id=name, env="vault", messages=(ask,), budget=LIMITS)

    def which(self, name):
        return Random(f"{name}/{self.settings.seed}/vault").choice(NUMBERS)

    def make_env(self, task):
        self.settings.leave("open")
        self.opened[task.id] += 1
        return VaultEnv(task, self.settings, Random(f"{task.id}/{self.opened[task.id]}"))


class VaultEnv:
    tools = (LOOK,)

    def __init__(self, task, settings, rng):
        self.task, self.settings, self.rng = task, settings, rng
        self.reply_text, self.opened, self.asks = "", False, settings.asks

    async def reset(self):
        asyncio.get_running_loop().call_soon(self.settings.leave, "aside")
        if self.rng.random() < self.settings.breaks:
            raise RuntimeError("the vault is stuck")

    async def step(self, reply):
        self.reply_text = reply.content.strip()

        async def look(n):
            await asyncio.sleep(self.settings.delay_s * self.rng.random() ** 3)
            self.opened = n == "all"
            return "is open"

        if not reply.tool_calls and self.asks:
            self.asks -= 1
            return (Message(role="user", content="Vault 1 ."),)
        return await execute_tool_calls([Tool(LOOK, look)], reply)

    async def score(self):
        self.settings.leave("grade")
        return Verdict(reward=float(self.opened and self.reply_text == "done"))

    async def close(self):
        pass


def demonstration(taskset, index, style):
    """The messages of one demonstration."""
    task = taskset.task(index)
    if style == "guess":
        return [*task.messages, Message(role="assistant", reasoning="know", content="done")]
    call = ToolCall(id="c0", name="look", arguments={"n": "all"})
    return [
        *task.messages,
        Message(role="assistant", reasoning="open", content="", tool_calls=(call,)),
        Message(role="tool", content="is open", tool_call_id="c0"),
        Message(role="assistant", reasoning="seen", content="done"),
    ]


@cache
def tokenizer() -> Tokenizer:
    taskset = VaultTaskset()
    texts = [
        f"{m.content} {m.reasoning or ''}"
        for i in range(40)
        for m in demonstration(taskset, i, "full")
    ]
    prompt = glm_chat_template("5").render(list(taskset.task(0).messages), tools=[LOOK])
    trained = train_tokenizer([*texts, "know", prompt] * 3, vocab=700, splitting="words")
    return with_chat_template(trained, "5")


def pretrained_on_vault(
    folder: Path,
    *,
    start: Path | None = None,
    steps: int = 60,
    full: float = 0.35,
    context: int = 192,
    vaults: int = 1,
) -> Path:
    """A checkpoint whose network opens about `full` of its vaults, trained from `start` on
    conversations of so many `vaults`."""
    seed = 1
    words, taskset = tokenizer(), VaultTaskset(VaultSettings(seed=99))
    config = latent_config(
        vocab=words.vocab_size,
        hidden=48,
        context=context,
        attention=("dsa",) * 2,
        mlp=("dense", "moe"),
        indexer={"heads": 2, "dim": 8, "topk": 64, "layers": ("full",) * 2},
        eos=words.special_token_ids.stop_token_ids,
        init={"std": 0.05},
        mtp=None,
    )
    network = (
        Transformer.from_config(config, seed=seed) if start is None else load_pretrained(start)
    )
    renderer, rng = GlmRenderer(words), Random(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    network.train()
    for step in range(steps):
        rows = []
        for i in range(5):
            style = "full" if rng.random() < full else "guess"
            first = (5 * step + i) * vaults
            every = [demonstration(taskset, first + more, style) for more in range(vaults)]
            messages = [message for one in every for message in one]
            rows.append(renderer.render_dialogue(messages, tools=(LOOK,), thinking=KEEPS))
        _step(network, optimizer, rows)
        schedule.step()
    save_pretrained(network, folder)
    words.save(folder)
    return folder


def _step(network, optimizer, rows):
    token_T = torch.tensor([token for row in rows for token in row.token_ids])
    learned_T = torch.tensor([flag for row in rows for flag in row.loss_mask])
    layout = AttentionMetadata.packed([len(row.token_ids) for row in rows])
    places_A = learned_T.roll(-1).nonzero().squeeze(1)
    hidden_TD = network(token_T, layout).hidden_TD
    target_A = token_T.roll(-1)[places_A]
    loss = torch.nn.functional.cross_entropy(network.head(hidden_TD[places_A]), target_A)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.item()
