"""A tiny GLM-5-shaped model that has memorized a few dialogues, so that greedy replies contain
reasoning, answers and tool calls."""

from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from paddock.checkpoint import save_pretrained
from paddock.model import AttentionMetadata, Transformer
from paddock.records import Message, ToolCall, ToolSpec
from paddock.text import ThinkingKwargs, Tokenizer, train_tokenizer, with_chat_template
from paddock.text.chat_template import glm_chat_template
from paddock.text.glm_renderer import GlmRenderer
from tests.model.networks import latent_config

WEATHER = ToolSpec(
    name="get_weather",
    description="Weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
KEEPS = ThinkingKwargs(clear_thinking=False)
SILENT = ThinkingKwargs(clear_thinking=False, enable_thinking=False)

QUESTION = Message(role="user", content="Weather in Oslo?")
CALL = ToolCall(id="call_0", name="get_weather", arguments={"city": "Oslo", "days": 2})
CALLS = Message(
    role="assistant", reasoning="Need the tool.", content="Checking.", tool_calls=(CALL,)
)
RESULT = Message(role="tool", content='{"t": 12}', tool_call_id="call_0")
ANSWER = Message(role="assistant", reasoning="It is 12.", content="12 C in Oslo.")
HELLO = Message(role="user", content="Say hello.")
GREETS = Message(role="assistant", reasoning="A greeting.", content="Hello there, friend!")
PLAIN = Message(role="assistant", content="Hello there, friend!")
COUNT = Message(role="user", content="Count.")
COUNTS = Message(role="assistant", content="one two three four five six seven eight nine ten")

CONTEXT = 512


def training_rows(renderer: GlmRenderer) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Token ids and loss masks of the dialogues."""
    tools = (WEATHER,)
    required = renderer.render_prompt([QUESTION], tools=tools, thinking=SILENT).token_ids
    called = renderer.render_dialogue(
        [QUESTION, Message(role="assistant", content="", tool_calls=(CALL,))],
        tools=tools,
        thinking=SILENT,
    )
    every = [
        renderer.render_last_reply([QUESTION, CALLS], tools=tools, thinking=KEEPS),
        renderer.render_last_reply([QUESTION, CALLS, RESULT, ANSWER], tools=tools, thinking=KEEPS),
        renderer.render_last_reply([HELLO, GREETS], thinking=KEEPS),
        renderer.render_last_reply([HELLO, PLAIN], thinking=SILENT),
        renderer.render_last_reply([COUNT, COUNTS], thinking=SILENT),
        called,
    ]
    assert called.token_ids[: len(required)] == required
    return [(each.token_ids, each.loss_mask) for each in every]


@cache
def tokenizer() -> Tokenizer:
    messages = [QUESTION, CALLS, RESULT, ANSWER, HELLO, GREETS, COUNT, COUNTS]
    texts = [f"{m.content} {m.reasoning or ''}" for m in messages]
    prompt = glm_chat_template("5").render([QUESTION], tools=[WEATHER])
    trained = train_tokenizer([*texts, prompt] * 3, vocab=1200, splitting="words")
    return with_chat_template(trained, "5")


def save_memorized_model(folder: Path) -> Path:
    """Train and save the model with tokenizer and chat template; returns the folder."""
    words = tokenizer()
    config = latent_config(
        vocab=words.vocab_size,
        hidden=64,
        context=CONTEXT,
        attention=("dsa",) * 2,
        mlp=("dense", "moe"),
        indexer={"heads": 2, "dim": 8, "topk": 256, "layers": ("full",) * 2},
        eos=words.special_token_ids.stop_token_ids,
        init={"std": 0.05},
    )
    network = Transformer.from_config(config, seed=1)
    _train(network, training_rows(GlmRenderer(words)), steps=220)
    save_pretrained(network, folder)
    words.save(folder)
    return folder


def _train(
    network: Transformer, rows: list[tuple[tuple[int, ...], tuple[bool, ...]]], steps: int
) -> None:
    token_T = torch.tensor([token for ids, _ in rows for token in ids])
    learned_T = torch.tensor([flag for _, trained in rows for flag in trained])
    layout = AttentionMetadata.packed([len(ids) for ids, _ in rows])
    next_T = torch.cat((token_T[1:], token_T[:1]))
    target_mask_T = torch.cat((learned_T[1:], learned_T[:1]))
    ids_A = target_mask_T.nonzero().squeeze(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    network.train()
    for _ in range(steps):
        hidden_TD = network(token_T, layout).hidden_TD
        loss = cross_entropy(network.head(hidden_TD[ids_A]), next_T[ids_A])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if loss.item() < 3e-3:
            break
    assert loss.item() < 0.02, f"the model did not memorize the dialogues: loss {loss.item():.3f}"
