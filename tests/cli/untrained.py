"""A tiny model folder without training."""

from paddock.checkpoint import save_pretrained
from paddock.data.dialogue_sources import DemonstrationSource
from paddock.model import Transformer
from paddock.text import train_tokenizer, with_chat_template
from tests.model.networks import latent_config


def save_untrained(folder, seed):
    """A network whose replies end soon."""
    source = DemonstrationSource(name="c", env="nano-chain", count=50)
    texts = (document.text for document in source.documents(None))
    tokenizer = with_chat_template(train_tokenizer(texts, vocab=330, splitting="words"), "5")
    two_layers = {
        "vocab": tokenizer.vocab_size,
        "context": 256,
        "attention": ("dsa",) * 2,
        "mlp": ("dense", "moe"),
        "indexer": {"heads": 2, "dim": 8, "topk": 64, "layers": ("full",) * 2},
        "eos": tokenizer.special_token_ids.stop_token_ids,
    }
    save_pretrained(Transformer.from_config(latent_config(**two_layers), seed=seed), folder)
    tokenizer.save(folder)
    return folder
