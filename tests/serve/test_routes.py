"""All routes: invalid bodies, API keys, size limits, methods, info and metrics."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers

from paddock.checkpoint import load_pretrained
from paddock.engine import Engine, EngineSettings
from paddock.serve import ApiKeys, ServeSettings, build_app
from paddock.serve.auth import AuthMiddleware
from paddock.serve.routes.admin import ADMIN_PATHS
from paddock.text import Tokenizer
from tests.serve.live import listening, serving

POSTS = ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
         "/v1/messages/count_tokens", "/inference/v1/generate", "/tokenize", "/detokenize",
         "/apply-template", "/abort_request", "/pause_generation"]  # fmt: skip
DEEP = b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"a": \xff\xfe}', b'{"a": NaN}', b'{"a": 1e999}', b"[]", b"null", b'"x"', DEEP],
    ids=["empty", "cut", "not utf-8", "nan", "inf", "list", "null", "text", "deep"],
)
def test_an_invalid_body_gets_400_in_every_api(live, path, data):
    found = live.http.post(path, content=data)
    assert found.status_code == 400, found.text
    answer = found.json()
    assert answer["error"]["message"]
    assert ("type" in answer) == path.startswith("/v1/messages")


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_lone_surrogate_is_replaced(live, path):
    text = b'"half \\ud83d a pair"'
    data = b'{"text": ' + text + b', "messages": [{"role": "user", "content": ' + text + b"}]"
    data += b', "max_tokens": 2, "sampling_params": {"max_new_tokens": 2}}'
    assert live.http.post(path, content=data).status_code == 200


def test_unknown_routes_and_methods_get_an_error_in_the_shape_of_the_api(live):
    assert live.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert live.get("/v1/messages/nothing").json()["type"] == "error"
    assert live.get("/v1/messages").status_code == 405
    assert live.get("/generate").json()["error"]["code"] == 405


def test_too_large_bodies_are_rejected(folder):
    with serving(folder, max_body_bytes=1000) as live:
        long = {"text": "x" * 2000}
        assert live.post("/generate", long).status_code == 413

        def pieces():
            for _ in range(20):
                yield b"x" * 100

        found = httpx.post(live.url + "/v1/messages", content=pieces())  # without Content-Length
        assert (found.status_code, found.json()["error"]["type"]) == (413, "request_too_large")


# --- keys -----------------------------------------------------------------------------------------


def test_keys_authorize_their_routes(folder):
    with serving(folder, keys=ApiKeys(api="open", admin="sesame")) as live:
        hello = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1}
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Basic open"}, 401),
            ({"Authorization": "Bearer open"}, 200),
            ({"x-api-key": "open"}, 200),
            ({"x-api-key": "sesame"}, 200),
        ]:
            for path in ("/v1/chat/completions", "/v1/messages"):
                assert live.post(path, hello, headers=headers).status_code == status, headers
        denied = live.post("/v1/messages", hello)
        assert denied.json()["error"]["type"] == "authentication_error"
        for path in ("/metrics", "/v1/models", "/server_info", "/openapi.json", "/health_generate"):
            assert live.get(path).status_code == 401
        assert live.get("/health").status_code == live.get("/").status_code == 200
        for path in ADMIN_PATHS:
            assert live.post(path, {}).status_code == 401
            assert live.post(path, {}, headers={"x-api-key": "open"}).status_code == 401
        admin = {"Authorization": "Bearer sesame"}
        assert live.post("/flush_cache", {}, headers=admin).status_code == 200


def auth_error(bind, keys, path, method="POST", **headers):
    guard = AuthMiddleware(None, keys, ServeSettings(host=bind))
    return guard.find_error(method, path, Headers({"host": "127.0.0.1:8000"} | headers))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "::", "gpu-node"])
def test_admin_routes_on_a_public_address_need_the_admin_key(host):
    for keys in (ApiKeys(), ApiKeys(api="open")):
        for path in (*ADMIN_PATHS, "/pause_generation/"):
            found = auth_error(host, keys, path, authorization="Bearer open")
            assert found.status == 403, path
    assert auth_error(host, ApiKeys(), "/generate") is None
    assert auth_error(host, ApiKeys(admin="s"), "/flush_cache").status == 401
    assert auth_error(host, ApiKeys(admin="s"), "/flush_cache", authorization="Bearer s") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_admin_routes_on_loopback_need_no_key(host):
    assert auth_error(host, ApiKeys(), "/flush_cache") is None
    assert auth_error(host, ApiKeys(api="a"), "/flush_cache").status == 401


# --- info -----------------------------------------------------------------------------------------


def test_info_routes_for_routers_and_trainers(live):
    info = live.get("/model_info").json()
    assert info["is_generation"] and info["weight_version"] == "0"
    assert info == live.get("/get_model_info").json()
    server = live.get("/server_info").json()
    assert server["dp_size"] == 1 and len(server["internal_states"]) == 1
    assert live.get("/get_weight_version").json() == {"weight_version": "0"}
    (load,) = live.get("/v1/loads").json()
    assert load == live.get("/get_load").json()[0] and load["num_reqs"] == 0
    assert live.get("/health_generate").status_code == 200


def test_metrics_count_requests_and_tokens(live):
    def read():
        text = live.get("/metrics").text
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    before = read()
    prompt = list(range(30, 70))
    for _ in range(2):
        live.post(
            "/generate",
            {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}},
        )
    after = read()

    def grew(name):
        return after[f"sglang:{name}"] - before[f"sglang:{name}"]

    assert grew("generation_tokens_total") == 10
    assert grew("prompt_tokens_total") == 80
    assert grew("cached_tokens_total") == 32
    assert grew("time_to_first_token_seconds_count") == 2
    assert grew("e2e_request_latency_seconds_count") == 2
    assert after["sglang:num_running_reqs"] == 0
    assert after["sglang:weight_version"] == 0
    assert {f"sglang:{name}" for name in (
        "num_queue_reqs", "num_used_tokens", "token_usage", "cache_hit_rate", "gen_throughput",
        "inter_token_latency_seconds_count", "queue_time_seconds_count", "spec_accept_length",
        "spec_accept_rate", "num_retracted_reqs", "num_paused_reqs", "evicted_tokens_total",
        "num_aborted_requests_total", "routing_keys_active", "num_grammar_queue_reqs",
        "thinking_tokens_total",
    )} <= set(after)  # fmt: skip


def test_the_metrics_prefix_is_configurable(folder):
    with serving(folder, metrics_prefix="vllm:") as live:
        assert "vllm:num_running_reqs" in live.get("/metrics").text


def test_tokenizer_routes(live):
    text = "one two three <think> \U0001f600"
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == live.tokenizer.encode(text, specials=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = live.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back["prompt"] == live.tokenizer.decode(answer["tokens"])
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    shown = live.post("/apply-template", chat).json()["prompt"]
    assert shown == "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    assert (
        live.post("/tokenize", chat).json()["tokens"]
        == live.post("/apply-template", chat).json()["tokens"]
    )
    info = live.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and "{%-" in info["chat_template"]
    for wrong in ({"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": "x"}):
        assert live.post("/detokenize", wrong).status_code == 400


def test_a_model_without_a_chat_template_serves_completions(folder):
    tokenizer = Tokenizer.load(folder)
    with Engine(
        load_pretrained(folder), tokenizer, EngineSettings(kv_cache_bytes=1 << 22)
    ) as engine:
        app = build_app([engine], tokenizer, None, ServeSettings())
        with listening(app) as url:
            chat = {"messages": [{"role": "user", "content": "x"}]}
            refused = httpx.post(url + "/v1/chat/completions", json=chat)
            assert refused.status_code == 404 and "chat template" in refused.text
            done = httpx.post(url + "/v1/completions", json={"prompt": "one", "max_tokens": 2})
            assert done.status_code == 200
