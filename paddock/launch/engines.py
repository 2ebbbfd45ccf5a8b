"""Engines loaded from a model folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    import torch

    from paddock.engine import Engine, EngineSettings, SubprocessEngine
    from paddock.model import ModelConfig, Transformer
    from paddock.rollout import InProcessClient
    from paddock.text import GlmVersion, Renderer, Tokenizer

Quant = Literal["int8"]  # weights alone, rounded when a model is loaded
CACHE_BYTES = 1 << 28  # default KV cache on the CPU
KV_CACHE_MEMORY_FRACTION = 0.8  # default on an accelerator, of memory left after the weights
# Default prefill tokens per step, by the minimum memory of the device in bytes.
PREFILL_TOKENS_BY_MEMORY = ((60 << 30, 8192), (35 << 30, 4096), (0, 2048))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Config, tokenizer and renderer of a model folder, before its weights are loaded."""

    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    renderer: "Renderer"


def open_model_folder(folder: Path, version: "GlmVersion | None") -> ModelFolder:
    """Open a checkpoint, or the newest one of a run. Raises UserError for a model that cannot chat,
    before weights are loaded."""
    from paddock.checkpoint import latest_model, read_config
    from paddock.text import ChatTemplateError, Tokenizer, get_renderer

    if not folder.is_dir():
        raise UserError(f"{folder}: folder not found")
    folder = latest_model(folder)
    config = read_config(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model has only "
            f"{config.vocab} embeddings"
        )
    try:
        renderer = get_renderer(tokenizer, version=version)
    except ChatTemplateError as error:
        raise UserError(f"{error}; --chat-template sets one of GLM-5's") from None
    return ModelFolder(folder, config, tokenizer, renderer)


def pick_devices(name: str | None, replicas: int) -> list[str]:
    """Device of each replica: round-robin over the accelerators, or the CPU."""
    import torch

    if name is not None:
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
            raise UserError(f"device '{name}': {str(error).splitlines()[0]}") from None
        return [name] * replicas
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["cpu"] * replicas
    return [f"{kind.type}:{i % torch.accelerator.device_count()}" for i in range(replicas)]


def pick_dtype(folder: Path, device: str, requested: str | None) -> str:
    """The requested dtype; by default float32 on the CPU, else the dtype of the checkpoint."""
    stored = _json(folder / "config.json")
    half = "bfloat16" in (stored.get("dtype"), stored.get("torch_dtype"))
    return requested or ("bfloat16" if half and device != "cpu" else "float32")


def load_engines(  # noqa: PLR0913  keyword options
    model: ModelFolder,
    devices: list[str],
    dtype: str,
    settings: "EngineSettings",
    *,
    fits: bool,
    compile_kernels: bool = True,
    quant: Quant | None = None,
) -> "list[Engine]":
    """One engine per device, each with its own copy of the weights. With `fits` the KV cache takes
    the free memory, or on the CPU a fixed amount, but at least one request of full length. Without
    `compile_kernels` an engine on the CPU does not wait for its kernels if they must be compiled
    first: they are compiled in the background, for the next start. `quant` serves 8-bit weights."""
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine

    found: list[Engine] = []
    for i, device in enumerate(devices):
        network = load_pretrained(model.folder, dtype, device)
        if device == "cpu" or quant is not None:
            pack_for_cpu(network, wait=compile_kernels, quant=quant)
        share = sum(1 for other in devices[i:] if other == device)
        chosen = fit_kv_cache(model, device, network, settings, share) if fits else settings
        found.append(Engine(network, model.tokenizer, chosen))
    return found


def in_process_client(engine: "Engine | SubprocessEngine") -> "InProcessClient":
    """The engine as rollouts use it."""
    from paddock.engine import ContextLengthExceededError, EngineError, InvalidRequestError, Request
    from paddock.rollout import InProcessClient

    return InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )


def pack_for_cpu(network: "Transformer", *, wait: bool, quant: Quant | None = None) -> bool:
    """Pack the weights of a network for the CPU kernels; False if references are used. 8-bit
    weights have no reference worth serving: for them kernels are always waited for."""
    from paddock.kernels import cpu
    from paddock.model import packed

    if quant is not None:
        if network.device.type != "cpu":
            raise UserError(
                f"--quant {quant} is for the CPU, not {network.device}; `paddock quantize` makes a "
                "checkpoint with integer weights for a GPU"
            )
        if not cpu.load(wait=True):
            raise UserError(f"--quant {quant} needs a C++ compiler, such as g++ or clang++")
    elif not cpu.load(wait=wait):
        if not wait:
            cpu.compile_in_background()
        return False
    packed.pack_weights(network, int8=quant == "int8")
    return True


def fit_kv_cache(
    model: ModelFolder,
    device: str,
    network: "Transformer",
    settings: "EngineSettings",
    share: int = 1,
) -> "EngineSettings":
    """Settings with a KV cache sized to the free memory, which `share` engines divide."""
    from paddock.engine import kv_bytes_per_token

    itemsize = network.dtype.itemsize
    context = settings.context_length or model.config.context
    tokens = context + 2 * settings.num_speculative_tokens + 2 * settings.page_size
    minimum = tokens * kv_bytes_per_token(settings, network.config, itemsize)
    cache = CACHE_BYTES
    if device != "cpu":
        cache = int(_free_bytes(network.device) * KV_CACHE_MEMORY_FRACTION / share)
        minimum = min(minimum, cache)
    return settings.model_copy(update={"kv_cache_bytes": max(cache, minimum)})


def default_prefill_tokens(device: str) -> int:
    """Prompt tokens to prefill in one step, by the memory of the device: larger chunks use larger
    devices better and need more memory for activations."""
    import torch

    if device == "cpu":
        return prefill_tokens_for_memory(0)
    _, total = torch.accelerator.get_memory_info(torch.device(device))
    return prefill_tokens_for_memory(int(total))


def prefill_tokens_for_memory(total_bytes: int) -> int:
    """
    >>> [prefill_tokens_for_memory(gib << 30) for gib in (0, 24, 48, 80, 141)]
    [2048, 2048, 4096, 8192, 8192]
    """
    return next(tokens for minimum, tokens in PREFILL_TOKENS_BY_MEMORY if total_bytes >= minimum)


def _free_bytes(device: "torch.device") -> int:
    import torch

    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def default_sampling(folder: Path) -> dict[str, Any]:
    """Sampling parameters of generation_config.json that a server supports."""
    config = _json(folder / "generation_config.json")
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p"):
        if isinstance(config.get(name), int | float):
            found[name] = float(config[name])
    if isinstance(config.get("top_k"), int) and config["top_k"] > 0:
        found["top_k"] = config["top_k"]
    return found


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError:
        raise UserError(f"{file}: not valid JSON") from None
    return found if isinstance(found, dict) else {}
