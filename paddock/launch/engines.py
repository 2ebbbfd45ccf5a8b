"""A model's folder as engines that are ready to answer, for the verbs that serve and chat."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    import torch

    from paddock.engine import Engine, EngineSettings
    from paddock.model import ModelConfig, Transformer
    from paddock.text import GlmVersion, Renderer, Tokenizer

CACHE_BYTES = 1 << 28  # where nothing is said, on the CPU
KV_CACHE_MEMORY_FRACTION = 0.8  # likewise, on an accelerator, once the weights are there
# Prompt tokens of a step where nothing is said, for devices of at least so many bytes.
PREFILL_TOKENS_BY_MEMORY = ((60 << 30, 8192), (35 << 30, 4096), (0, 2048))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a folder holds, before its weights are read."""

    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    renderer: "Renderer"


def open_model_folder(folder: Path, version: "GlmVersion | None") -> ModelFolder:
    """Of a checkpoint, or of a run's newest one. Refuses what could not chat, before anything heavy
    is read."""
    from paddock.checkpoint import latest_model, read_config
    from paddock.text import ChatTemplateError, Tokenizer, get_renderer

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    folder = latest_model(folder)
    config = read_config(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the network only "
            f"{config.vocab} rows of embeddings"
        )
    try:
        renderer = get_renderer(tokenizer, version=version)
    except ChatTemplateError as error:
        raise UserError(f"{error}; --chat-template sets one of GLM-5's") from None
    return ModelFolder(folder, config, tokenizer, renderer)


def pick_devices(name: str | None, replicas: int) -> list[str]:
    """Where each replica runs: on the accelerators in turn, or on the CPU."""
    import torch

    if name is not None:
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
            raise UserError(f"device '{name}': {str(error).splitlines()[0]}") from None
        return [name] * replicas
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["cpu"] * replicas
    return [f"{kind.type}:{i % torch.accelerator.device_count()}" for i in range(replicas)]


def pick_dtype(folder: Path, device: str, said: str | None) -> str:
    """float32 on the CPU; on an accelerator what the folder was stored in."""
    stored = _json(folder / "config.json")
    half = "bfloat16" in (stored.get("dtype"), stored.get("torch_dtype"))
    return said or ("bfloat16" if half and device != "cpu" else "float32")


def load_engines(
    model: ModelFolder, places: list[str], dtype: str, settings: "EngineSettings", *, fits: bool
) -> "list[Engine]":
    """One engine a place, each with its own copy of the weights. With `fits` the cache takes what
    memory there is, or on the CPU a fixed amount, but at least one request of full length."""
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine

    found: list[Engine] = []
    for i, place in enumerate(places):
        network = load_pretrained(model.folder, dtype, place)
        share = sum(1 for other in places[i:] if other == place)
        chosen = fit_kv_cache(model, place, network, settings, share) if fits else settings
        found.append(Engine(network, model.tokenizer, chosen))
    return found


def fit_kv_cache(
    model: ModelFolder,
    place: str,
    network: "Transformer",
    settings: "EngineSettings",
    share: int = 1,
) -> "EngineSettings":
    """With a cache of what memory there is, shared with so many others that are still to come."""
    from paddock.engine import kv_bytes_per_token

    itemsize = network.embed.weight.element_size()
    context = settings.context_length or model.config.context
    tokens = context + 2 * settings.num_speculative_tokens + 2 * settings.page_size
    least = tokens * kv_bytes_per_token(settings, network.config, itemsize)
    cache = CACHE_BYTES
    if place != "cpu":
        cache = int(_free_bytes(network.embed.weight.device) * KV_CACHE_MEMORY_FRACTION / share)
        least = min(least, cache)
    return settings.model_copy(update={"kv_cache_bytes": max(cache, least)})


def default_prefill_tokens(place: str) -> int:
    """Prompt tokens to prefill in one step, by the device's memory: a larger chunk keeps a larger
    chip busy and takes more room for activations."""
    import torch

    if place == "cpu":
        return prefill_tokens_for_memory(0)
    _, total = torch.accelerator.get_memory_info(torch.device(place))
    return prefill_tokens_for_memory(int(total))


def prefill_tokens_for_memory(total_bytes: int) -> int:
    """
    >>> [prefill_tokens_for_memory(gib << 30) for gib in (0, 24, 48, 80, 141)]
    [2048, 2048, 4096, 8192, 8192]
    """
    return next(tokens for least, tokens in PREFILL_TOKENS_BY_MEMORY if total_bytes >= least)


def _free_bytes(device: "torch.device") -> int:
    import torch

    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def default_sampling(folder: Path) -> dict[str, Any]:
    """What generation_config.json says about sampling, of what a server can heed."""
    said = _json(folder / "generation_config.json")
    if said.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p"):
        if isinstance(said.get(name), int | float):
            found[name] = float(said[name])
    if isinstance(said.get("top_k"), int) and said["top_k"] > 0:
        found["top_k"] = said["top_k"]
    return found


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError:
        raise UserError(f"{file}: not JSON") from None
    return found if isinstance(found, dict) else {}
