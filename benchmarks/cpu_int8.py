"""Loss of a checkpoint whose weights are rounded to 8 bits, on a CPU: nats per token of text.

    python -m benchmarks.cpu_int8 MODEL [FILE...] [--window 512]

By default the text is the project's README and docs. Every precision sees the same windows.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.table import Claim, print_claims
from paddock.checkpoint import load_pretrained
from paddock.launch.engines import Quant, pack_for_cpu
from paddock.model import AttentionMetadata
from paddock.text import Tokenizer

ROOT = Path(__file__).parent.parent
PRECISIONS: dict[str, tuple[str, Quant | None]] = {
    "float32": ("float32", None),
    "float32, weights int8": ("float32", "int8"),
    "bfloat16": ("bfloat16", None),
    "bfloat16, weights int8": ("bfloat16", "int8"),
}


@torch.inference_mode()
def token_losses(model: str, dtype: str, quant: Quant | None, window_NT: Tensor) -> Tensor:
    """[N, T - 1] nats."""
    network = load_pretrained(model, dtype, "cpu")
    pack_for_cpu(network, wait=True, quant=quant)
    losses = []
    for token_T in window_NT:
        hidden_TD = network(token_T, AttentionMetadata.packed([len(token_T)])).hidden_TD
        logit_TV = network.head(hidden_TD[:-1]).float()
        losses.append(F.cross_entropy(logit_TV, token_T[1:], reduction="none"))
    return torch.stack(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--window", type=int, default=512)
    chosen = parser.parse_args()
    files = chosen.files or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(file.read_text() for file in files)
    ids = Tokenizer.load(chosen.model).encode(text, specials=False)
    window_NT = torch.tensor(ids[: len(ids) // chosen.window * chosen.window])
    window_NT = window_NT.view(-1, chosen.window)[:64]
    found = {
        name: token_losses(chosen.model, *precision, window_NT)
        for name, precision in PRECISIONS.items()
    }
    exact = found["float32"]
    rows = []
    for name, loss_NT in found.items():
        by_window_N = (loss_NT - exact).mean(1)
        error = by_window_N.std() / len(by_window_N) ** 0.5
        rows.append(
            Claim(
                name=f"{name}: loss, nats/token",
                measured=f"{loss_NT.mean():.4f} ({by_window_N.mean():+.4f} ± {error:.4f})",
            )
        )
    print_claims(rows)


if __name__ == "__main__":
    main()
