"""One arm of `benchmarks.cpu_serving`: an engine in its own process and environment.

    PYTHON cpu_serving_peer.py ARM MODEL DTYPE       ARM: paddock, int8, transformers, vllm or llama

Reads a request per line, {"prompts": [[token ids]], "new": N}, and answers with
{"seconds": S, "tokens": [[token ids]], "rss_mb": M}: greedy, N tokens each, whatever they are. For
llama, MODEL is a GGUF file and DTYPE is PATH,DTYPE,N: llama-server,
the dtype of its KV cache, and requests at once.
"""

import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

PARALLEL = 64
CACHE_GIB = 2
Prompts = list[list[int]]
Arm = tuple[Callable[[Prompts, int], Prompts], Callable[[], object]]  # generate, close


def int8(model: str, dtype: str) -> Arm:
    return paddock(model, dtype, "int8")


def paddock(model: str, dtype: str, quant: Literal["int8"] | None = None) -> Arm:
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine, EngineSettings, Request
    from paddock.launch.engines import pack_for_cpu
    from paddock.records import SamplingParams

    network = load_pretrained(model, dtype, "cpu")
    pack_for_cpu(network, wait=True, quant=quant)
    settings = EngineSettings(
        max_running_requests=PARALLEL, kv_cache_bytes=CACHE_GIB << 30, stop_token_ids=()
    )
    engine = Engine(network, None, settings)

    def run(prompts: Prompts, new: int) -> Prompts:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
        requests = [Request(token_ids=tuple(ids), sampling_params=sampling) for ids in prompts]
        return [list(out.completion.token_ids) for out in engine.generate_outputs(requests)]

    return run, engine.close


def transformers(model: str, dtype: str) -> Arm:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    network.generation_config.eos_token_id = None  # the others go on after it

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> Prompts:
        token_BT = torch.tensor(prompts)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        out = network.generate(
            token_BT, attention_mask=torch.ones_like(token_BT), pad_token_id=0, **options
        )
        return out[:, token_BT.shape[1] :].tolist()

    return run, lambda: None


def vllm(model: str, dtype: str) -> Arm:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its memory is this process's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype=dtype, enable_prefix_caching=True, max_num_seqs=PARALLEL)

    def run(prompts: Prompts, new: int) -> Prompts:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        found = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        return [list(each.outputs[0].token_ids) for each in found]

    return run, lambda: None


def llama(model: str, options: str) -> Arm:
    port, (server, dtype, slots) = 18080, options.split(",")
    cache = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    command = [server, "-m", model, "--port", str(port), "-c", str(1 << 16), "-np", slots]
    command += ["-ctk", cache, "-ctv", cache, "--override-kv", "llama.context_length=int:65536"]
    child = subprocess.Popen(
        [*command, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            break
        except OSError:
            time.sleep(0.2)

    def ask(ids: list[int], new: int) -> list[int]:
        body = {"prompt": ids, "n_predict": new, "temperature": 0.0, "ignore_eos": True}
        # No sampler at all would mean to sample from the whole distribution.
        body |= {"return_tokens": True, "cache_prompt": True, "samplers": ["top_k"], "top_k": 1}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request, timeout=3600).read())["tokens"]

    pool = ThreadPoolExecutor(PARALLEL)
    globals()["CHILD"] = child.pid

    def run(prompts: Prompts, new: int) -> Prompts:
        return list(pool.map(lambda ids: ask(ids, new), prompts))

    return run, child.kill


CHILD = 0


def peak_rss_mb() -> float:
    """Of this process, or of the server it started."""
    pid = CHILD or os.getpid()
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arm, model, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print; only answers go to stdout
    arms = {each.__name__: each for each in (paddock, int8, transformers, vllm, llama)}
    run, close = arms[arm](model, dtype)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        tokens = run(request["prompts"], request["new"])
        seconds = time.perf_counter() - started
        found = {"seconds": seconds, "tokens": tokens, "rss_mb": peak_rss_mb()}
        print(json.dumps(found), file=answers, flush=True)
    close()


if __name__ == "__main__":
    main()
