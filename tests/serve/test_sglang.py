"""SGLang's /generate and vLLM's equivalent."""

import base64
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.serve.live import serving
from tests.serve.memorized_model import COUNT, SILENT

IDS = [5, 9, 17, 33, 60, 61, 62]


def generate(live, **body):
    found = live.post("/generate", body)
    assert found.status_code == 200, found.text
    return found.json()


def logprobs(live, ids, temperature=1.0):
    """Logprobs of each token but the first, by a forward pass of the network."""
    network = live.engines[0].run_between_steps(lambda n: n).result()
    with torch.no_grad():
        logp = (network.logits(ids) / temperature).log_softmax(-1)
    return [logp[i, token].item() for i, token in enumerate(ids[1:])]


def test_the_payload_of_a_trainer(live):
    """As slime: ids, sampling_params, return_logprob; it reads output_token_logprobs and finish."""
    done = generate(
        live,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 3},
        return_logprob=True,
    )
    meta = done["meta_info"]
    ids = [entry[1] for entry in meta["output_token_logprobs"]]
    assert ids == done["output_ids"] and meta["output_token_logprobs_length"] == len(ids)
    expected = logprobs(live, IDS + ids, 0.8)[len(IDS) - 1 :]
    assert [e[0] for e in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-5)
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), len(ids))
    assert meta["weight_version"] == "0" and meta["weight_versions"] == [[0, "0"]]
    assert meta["dp_rank"] == 0 and meta["num_retractions"] == 0


def test_prompts_can_be_scored_without_a_reply(live):
    done = generate(
        live,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[3, 4],
        return_text_in_logprobs=True,
    )
    meta = done["meta_info"]
    assert (done["text"], done["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["output_token_logprobs"] == []
    first, *rest = meta["input_token_logprobs"]
    assert first[:2] == [None, IDS[0]]
    assert [e[0] for e in rest] == pytest.approx(logprobs(live, IDS), abs=1e-5)
    assert [e[1] for e in rest] == IDS[1:]
    assert rest[0][2] == live.tokenizer.decode([IDS[1]])
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 2
    assert [e[1] for e in meta["input_token_ids_logprobs"][1]] == [3, 4]


def test_one_token_prompts_are_scored_too(live):
    done = generate(
        live,
        input_ids=[7],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert done["meta_info"]["input_token_logprobs"] == [[None, 7, None]]


def test_batches_come_back_as_lists(live):
    params = {"max_new_tokens": 3, "temperature": 0}
    many = generate(live, input_ids=[IDS, IDS[:4]], sampling_params=params, rid="a")
    assert [m["meta_info"]["id"] for m in many] == ["a_0", "a_1"]
    one = generate(live, input_ids=[IDS], sampling_params=params)
    assert [one[0]["output_ids"]] == [many[0]["output_ids"]]
    assert len(generate(live, input_ids=IDS, sampling_params=params | {"n": 3})) == 3
    each = generate(live, text=["one two", "one"], sampling_params=[params, params], rid=["x", "y"])
    assert [m["meta_info"]["id"] for m in each] == ["x", "y"]


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


REQUEST = {
    "input_ids": IDS,
    "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 1,
    "rid": "streamed",
}


def test_a_stream_is_cumulative(live):
    whole = generate(live, **REQUEST)
    chunks = events(live.post("/generate", REQUEST | {"stream": True}))
    assert [len(e["output_ids"]) for e in chunks] == [1, 2, 3, 4, 5, 6]
    assert all(e["meta_info"]["finish_reason"] is None for e in chunks[:-1])
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    assert all(b["text"].startswith(a["text"]) for a, b in pairwise(chunks))
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert len(chunks[-1]["meta_info"][name]) == 6 == len(whole["meta_info"][name])


def test_a_stream_can_be_incremental(folder):
    with serving(folder, incremental_streaming_output=True) as live:
        whole = generate(live, **REQUEST)
        chunks = events(live.post("/generate", REQUEST | {"stream": True}))
    assert [i for e in chunks for i in e["output_ids"]] == whole["output_ids"]
    assert "".join(e["text"] for e in chunks) == whole["text"]
    scores = [x for e in chunks for x in e["meta_info"]["output_token_logprobs"]]
    assert [x[1] for x in scores] == whole["output_ids"]


def test_stop_strings_are_trimmed_unless_disabled(live):
    ids = list(live.renderer.render_prompt([COUNT], thinking=SILENT).token_ids)  # it counts to ten
    params = {"temperature": 0, "max_new_tokens": 50, "stop": ["ur f"]}
    done = generate(live, input_ids=ids, sampling_params=params)
    assert done["text"] == "one two three fo"
    assert done["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ur f"}
    kept = generate(live, input_ids=ids, sampling_params=params | {"no_stop_trim": True})
    assert kept["text"].startswith("one two three four f")
    assert kept["output_ids"] == done["output_ids"]
    chunks = events(
        live.post("/generate", {"input_ids": ids, "sampling_params": params, "stream": True})
    )
    texts = [e["text"] for e in chunks]
    assert texts[-1] == done["text"]
    assert all(b.startswith(a) for a, b in pairwise(texts))


def test_routed_experts_are_returned(folder):
    with serving(folder, engine={"capture_routing": True}) as live:
        done = generate(
            live,
            input_ids=IDS,
            sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
            return_routed_experts=True,
            routed_experts_start_len=2,
            return_indexer_topk=True,
        )
    rows = len(IDS) + 4 - 1
    experts = np.frombuffer(base64.b64decode(done["meta_info"]["routed_experts"]), "<i4")
    assert experts.reshape(rows - 2, 1, 2).max() < 6 and experts.min() >= 0
    chosen = np.frombuffer(base64.b64decode(done["meta_info"]["indexer_topk"]), "<i4")
    assert chosen.reshape(rows, 2, 256)[3, 0, :5].tolist() == [0, 1, 2, 3, -1]


def test_draft_tokens_are_reported(folder):
    """The MTP layer is untrained; what is reported is what the engine counted."""
    with serving(folder, engine={"num_speculative_tokens": 2}) as live:
        meta = generate(live, **REQUEST)["meta_info"]
    assert meta["spec_verify_ct"] >= 2 and meta["spec_num_proposed_drafts"] > 0
    assert meta["spec_accept_length"] == pytest.approx(6 / meta["spec_verify_ct"])


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [-1]},
        {"input_ids": [10**9]},
        {"input_ids": [1.5]},
        {"input_ids": "abc"},
        {"input_ids": [True]},
        {"text": 5},
        {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [1], "sampling_params": {"top_p": 7}},
        {"input_ids": [1], "sampling_params": {"n": 0}},
        {"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}},
        {"input_ids": [1, 2], "sampling_params": [{}, {}]},
        {"input_ids": [1], "rid": ["a", "b"]},
        {"input_ids": [1], "logprob_start_len": 9, "return_logprob": True},
        {"input_ids": [1], "return_logprob": True, "top_logprobs_num": -3},
        {"input_ids": [1], "return_logprob": True, "token_ids_logprob": [10**7]},
        {"input_ids": [1], "return_routed_experts": True},
        {"input_ids": [1], "return_hidden_states": True},
        {"input_ids": [1], "routed_dp_rank": 1},
    ],
)
def test_an_invalid_request_gets_400(live, wrong):
    found = live.post("/generate", wrong)
    assert found.status_code == 400, found.text
    assert set(found.json()["error"]) == {"message", "type", "code", "param", "retryable"}


def test_nulls_and_unknown_keys_are_tolerated(live):
    """The Rust router forwards every field it knows, most of them null."""
    nulls = dict.fromkeys(["model", "text", "rid", "session_id", "custom_logit_processor", "lora"])
    done = generate(live, **REQUEST | nulls | {"something_new": {"a": [1]}})
    assert len(done["output_ids"]) == 6


def test_the_vllm_generate_route(live):
    request = {
        "request_id": "x",
        "token_ids": IDS,
        "sampling_params": {"max_tokens": 5, "temperature": 0, "logprobs": 1, "prompt_logprobs": 0},
        "model": None,
        "cache_salt": "v7",
    }
    done = live.post("/inference/v1/generate", request).json()
    (choice,) = done["choices"]
    native = generate(live, input_ids=IDS, sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert (done["request_id"], choice["token_ids"]) == ("x", native["output_ids"])
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in choice["token_ids"]]
    assert done["prompt_logprobs"][0] is None
    found = [next(iter(e.values()))["logprob"] for e in done["prompt_logprobs"][1:]]
    assert found == pytest.approx(logprobs(live, IDS), abs=1e-5)
    chunks = events(live.post("/inference/v1/generate", request | {"stream": True}))
    assert [i for e in chunks for i in e["choices"][0]["token_ids"]] == choice["token_ids"]


def test_cache_salts_separate_prefix_caches(live):
    ids = list(range(40, 80))

    def cached(**salt):
        params = {"max_new_tokens": 1}
        return generate(live, input_ids=ids, sampling_params=params, **salt)["meta_info"][
            "cached_tokens"
        ]

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") == 32
    assert cached(cache_salt="two") == 0
    assert cached(extra_key="one") == 32
