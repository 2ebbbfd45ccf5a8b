"""Weight update routes: from disk, from tensors in the body, from a process group."""

import json
import subprocess
import sys
import threading
from base64 import b64encode
from pathlib import Path

import pytest
import torch

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.weight_sync import (
    WeightUpdate,
    iter_released_tensors,
    serialize_update,
    weight_digests,
)
from paddock.engine import EngineWeightUpdater
from tests.engine.networks import paused_once_started
from tests.patience import until
from tests.serve.live import serving
from tests.serve.test_external_clients import free_port

IDS = list(range(30, 80))
REQUEST = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
REQUEST |= {"return_logprob": True, "logprob_start_len": 0}


@pytest.fixture
def live(folder):
    with serving(folder, replicas=2, weights=EngineWeightUpdater) as server:
        yield server
        assert server.audit() == []


def other(folder):
    """Another model of the same shape, as tensors."""
    network = load_pretrained(folder)
    torch.manual_seed(5)
    with torch.no_grad():
        network.head.weight += 0.5 * torch.randn_like(network.head.weight)
    return network


def weights_body(network, version=3, **only):
    tensors = {
        name: t for name, t in iter_released_tensors(network) if not only or name in only["names"]
    }
    return b64encode(serialize_update(WeightUpdate(version, tensors))).decode()


def expected(network, ids):
    with torch.no_grad():
        logp = network.logits(ids).log_softmax(-1)
    return [logp[i, token].item() for i, token in enumerate(ids[1:])]


def test_every_replica_answers_with_the_new_weights(live, folder):
    before = live.post("/generate", REQUEST).json()
    new = other(folder)
    body = {"serialized_named_tensors": [weights_body(new)], "weight_version": "3"}
    done = live.post("/update_weights_from_tensor", body).json()
    assert done["success"], done
    assert live.get("/get_weight_version").json() == {"weight_version": "3"}
    for rank in (0, 1):
        after = live.post("/generate", REQUEST | {"routed_dp_rank": rank}).json()
        meta = after["meta_info"]
        assert meta["weight_version"] == "3"
        assert meta["cached_tokens"] == 0  # nothing cached under the old weights is used
        found = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert found == pytest.approx(expected(new, IDS), abs=1e-5)
    assert found != pytest.approx(
        [e[0] for e in before["meta_info"]["input_token_logprobs"][1:]], abs=1e-3
    )
    checked = live.post("/weights_checker", {"action": "checksum"}).json()
    assert len(set(checked["per_engine_checksum"])) == 1
    assert checked["ranks"][1]["checksums"] == weight_digests(new)


def test_weights_can_be_loaded_from_disk_and_back(live, folder):
    new = other(folder)
    live.post("/update_weights_from_tensor", {"serialized_named_tensors": [weights_body(new)]})
    assert live.get("/get_weight_version").json() == {"weight_version": "1"}  # the next version
    done = live.post("/update_weights_from_disk", {"model_path": str(folder)}).json()
    assert done["success"] and done["num_paused_requests"] == 0
    sums = live.post("/weights_checker", {}).json()["ranks"][0]["checksums"]
    assert sums == weight_digests(load_pretrained(folder))
    assert live.get("/get_weight_version").json() == {"weight_version": "2"}


def test_weights_can_change_during_a_request(live, folder):
    slow = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
    found = {}
    thread = threading.Thread(
        target=lambda: found.update(live.post("/generate", slow | {"routed_dp_rank": 0}).json())
    )
    body = {"serialized_named_tensors": [weights_body(other(folder))], "weight_version": "8"}
    with paused_once_started(live.engines[0]):
        thread.start()
        until(lambda: live.engines[0].stats().running)
        assert live.post("/update_weights_from_tensor", body).json()["num_paused_requests"] == 1
    thread.join(timeout=60)
    versions = found["meta_info"]["weight_versions"]
    assert [version for _, version in versions] == ["0", "8"] and versions[1][0] > 0


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("tensor", {"serialized_named_tensors": ["%%%"]}, "base64"),
        ("tensor", {"serialized_named_tensors": ["gASVCgAAAAAAAAB9lIwBYZRLAXMu"]}, "pickle"),
        ("tensor", {"serialized_named_tensors": [], "weight_version": 5}, "weight_version"),
        ("disk", {"model_path": "/nowhere/at/all"}, "nowhere"),
        ("disk", {}, "model_path"),
    ],
)
def test_an_invalid_update_changes_nothing(live, folder, path, body, why):
    found = live.post(f"/update_weights_from_{path}", body)
    assert found.status_code == 400 and why in found.text
    sums = live.post("/weights_checker", {}).json()["ranks"][0]["checksums"]
    assert sums == weight_digests(load_pretrained(folder))
    assert live.post("/generate", REQUEST).status_code == 200


def test_a_tensor_can_be_read_by_name(live):
    name = "model.embed_tokens.weight"
    assert len(live.post("/get_weights_by_name", {"name": name, "truncate_size": 4}).json()) == 4
    assert live.post("/get_weights_by_name", {"name": "no.such"}).status_code == 400


# The sequence of a trainer such as slime: a process group with the engines besides torch's default
# one; then pause, flush until it succeeds, announce buckets over HTTP, broadcast them, continue.
TRAINER = """
import json, sys, threading, time
from datetime import timedelta
import httpx, torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.weight_sync import weight_digests, iter_released_tensors

url, folder, port = sys.argv[1:]
http = httpx.Client(base_url=url, timeout=60)
def post(path, **body):
    found = http.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()
def post_later(path, **body):
    pending = threading.Thread(target=lambda: replies.append(post(path, **body)), daemon=True)
    pending.start()
    return pending
replies = []

assert http.get("/health_generate").status_code == 200
name = "slime-pp_0"
pending = post_later("/init_weights_update_group", master_address="127.0.0.1",
                     master_port=int(port), rank_offset=1, world_size=3, group_name=name,
                     backend="gloo")
patience = timedelta(seconds=60)
store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 3, timeout=patience))
store = dist.PrefixStore(name, store)
group, _ = c10d._new_process_group_helper(3, 0, [], dist.Backend("gloo"), store, group_name=name,
                                          timeout=patience)
c10d._world.pg_group_ranks[group] = {i: i for i in range(3)}
pending.join()

network = load_pretrained(folder)
torch.manual_seed(5)
with torch.no_grad():
    for parameter in network.parameters():
        parameter += 0.01 * torch.randn_like(parameter)
tensors = [(name, tensor.contiguous()) for name, tensor in iter_released_tensors(network)]

post("/pause_generation", mode="retract")
while http.get("/flush_cache").status_code != 200:
    post("/abort_request", abort_all=True)
    time.sleep(0.05)
for start in range(0, len(tensors), 20):
    bucket = tensors[start : start + 20]
    pending = post_later("/update_weights_from_distributed", group_name=name, weight_version="12",
                    names=[n for n, _ in bucket], flush_cache=False,
                    dtypes=[str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    shapes=[list(t.shape) for _, t in bucket])
    for _, tensor in bucket:
        dist.broadcast(tensor, 0, group=group)
    pending.join()
post("/continue_generation")
found = post("/weights_checker", action="checksum")
post("/destroy_weights_update_group", group_name=name)
print("FOUND" + json.dumps({"buckets": len(replies), "sums": weight_digests(network),
      "success": all(r["success"] for r in replies), "ranks": found["ranks"]}))
"""


@pytest.mark.slow
def test_the_update_sequence_of_a_trainer_over_a_gloo_group(live, folder):
    slow = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    late = threading.Thread(target=lambda: live.post("/generate", slow))
    late.start()
    command = [sys.executable, "-c", TRAINER, live.url, str(folder), str(free_port())]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("FOUND")[2])
    late.join(timeout=60)
    assert found["success"] and found["buckets"] >= 3
    assert [rank["checksums"] for rank in found["ranks"]] == [found["sums"]] * 2
    assert live.get("/get_weight_version").json() == {"weight_version": "12"}
    for rank in (0, 1):
        meta = live.post("/generate", REQUEST | {"routed_dp_rank": rank}).json()["meta_info"]
        assert meta["weight_versions"] == [[0, "12"]] and meta["cached_tokens"] == 0
