"""External programs against our server: lm-eval and sglang-router."""

import json
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch

from tests.patience import PATIENCE_S
from tests.serve.live import serving

ROWS = [
    {"q": "Say hello.", "choices": ["Hello", "one two"], "gold": 0},
    {"q": "Count.", "choices": ["12 C in Oslo.", "one two three"], "gold": 1},
    {"q": "Weather in Oslo?", "choices": ["3", "4"], "gold": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "Q: {{{{q}}}}\\nA:"
doc_to_target: {target}
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\nmetric_list:\n  - metric: acc'
UNTIL = (
    'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\n  do_sample: false\n'
    "metric_list:\n  - metric: exact_match"
)
RUN = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

url, folder = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=f"model=tiny,base_url={url}/v1/completions,num_concurrent=2,max_length=512",
    tasks=["toy_mc", "toy_gen"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
)
chats = lm_eval.simple_evaluate(
    model="local-chat-completions",
    model_args=f"model=tiny,base_url={url}/v1/chat/completions,num_concurrent=2",
    tasks=["toy_gen"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    log_samples=True,
    apply_chat_template=True,
    bootstrap_iters=0,
)
found["samples"]["chats"] = chats["samples"]["toy_gen"]
shown = {
    name: [{"arguments": s["arguments"], "resps": s["resps"]} for s in samples]
    for name, samples in found["samples"].items()
}
print("FOUND" + json.dumps(shown))
"""


@pytest.mark.slow
def test_lm_eval_log_likelihoods_equal_a_forward_pass(live, tmp_path):
    """Log-likelihoods through the completions and tokenizer routes are those of a forward pass; so
    is the greedy flag."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for name, kind, target, more in [
        ("toy_mc", "multiple_choice", "gold", CHOICES),
        ("toy_gen", "generate_until", '"{{choices[gold]}}"', UNTIL),
    ]:
        text = TASK.format(name=name, kind=kind, target=target, data=data, more=more)
        (tmp_path / f"{name}.yaml").write_text(text)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, live.url, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("FOUND")[2].splitlines()[0])
    network = live.engines[0].run_between_steps(lambda n: n).result()
    checked = 0
    for sample in found["toy_mc"]:
        for arguments, response in zip(sample["arguments"], sample["resps"], strict=True):
            context, continuation = arguments
            loglikelihood, greedy = response[0]
            whole = live.tokenizer.encode(context + continuation, specials=True)
            start = len(live.tokenizer.encode(context, specials=True))
            with torch.no_grad():
                logp = network.logits(whole).log_softmax(-1)
            rows = range(start - 1, len(whole) - 1)
            expected = sum(logp[i, whole[i + 1]].item() for i in rows)
            assert loglikelihood == pytest.approx(expected, abs=1e-4)
            assert greedy == all(logp[i].argmax() == whole[i + 1] for i in rows)
            checked += 1
    assert checked == 6
    for name in ("toy_gen", "chats"):
        assert len(found[name]) == 3
        assert all(isinstance(sample["resps"][0][0], str) for sample in found[name])


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_stock_router_in_front_of_two_servers(folder, tmp_path):
    """sglang-router registers both, forwards /generate unchanged, and routes a prefix to where it
    was seen before."""
    with serving(folder) as one, serving(folder) as two:
        port = free_port()
        log = (tmp_path / "router.log").open("w")
        command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls"]
        command += [one.url, two.url, "--policy", "cache_aware", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-port", str(free_port())]
        router = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(lambda: len(_workers(url)) == 2, router, tmp_path / "router.log")
            body = {
                "input_ids": list(range(40, 90)),
                "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
                "return_logprob": True,
            }
            direct = one.post("/generate", body | {"cache_salt": "apart"}).json()
            first = httpx.post(url + "/generate", json=body, timeout=PATIENCE_S).json()
            again = httpx.post(url + "/generate", json=body, timeout=PATIENCE_S).json()
            assert first["output_ids"] == again["output_ids"] == direct["output_ids"]
            logprobs = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
            expected = [entry[0] for entry in direct["meta_info"]["output_token_logprobs"]]
            assert logprobs == pytest.approx(expected, abs=1e-5)
            assert first["meta_info"]["cached_tokens"] == 0
            assert again["meta_info"]["cached_tokens"] == 48
        finally:
            router.terminate()
            router.wait(timeout=PATIENCE_S)
            log.close()


def _workers(url):
    try:
        found = httpx.get(url + "/workers", timeout=5).json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return []
    return [worker for worker in found if worker.get("is_healthy")]


def _wait_for(condition, process, log):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
