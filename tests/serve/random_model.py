"""A tiny model with random weights, and grammars that make it say what a test needs."""

from pathlib import Path
from typing import Any

from paddock.checkpoint import save_pretrained
from paddock.model import Transformer
from paddock.records import Message, ToolCall
from paddock.text import Renderer
from tests.model.networks import latent_config
from tests.serve.memorized_model import QUESTION, SILENT, tokenizer


def save_random_model(folder: Path, *, context: int = 4096) -> Path:
    words = tokenizer()
    config = latent_config(
        vocab=words.vocab_size, context=context, eos=words.special_token_ids.stop_token_ids
    )
    save_pretrained(Transformer.from_config(config, seed=1), folder)
    words.save(folder)
    return folder


def calling(name: str, **arguments: Any) -> Message:
    """A reply that is one tool call."""
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(call,))


def saying(text: str) -> Message:
    return Message(role="assistant", content=text)


def one_of(renderer: Renderer, *replies: Message) -> dict[str, Any]:
    """A `response_format` that allows these replies only, token by token: the model draws one."""
    rows = [renderer.render_dialogue([QUESTION, reply], thinking=SILENT) for reply in replies]
    options = [
        [token for token, own in zip(row.token_ids, row.loss_mask, strict=True) if own]
        for row in rows
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "or",
            "elements": [
                {
                    "type": "sequence",
                    "elements": [{"type": "token", "token": t} for t in option[:-1]],
                }
                for option in options  # without the stop token, which any reply may end with
            ],
        },
    }
