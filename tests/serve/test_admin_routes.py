"""Admin routes: abort, pause, flush cache, weight version; and routing to replicas."""

import threading
import time

import pytest

from paddock.serve.load_balancer import rendezvous_order
from tests.engine.networks import paused_once_started
from tests.patience import until
from tests.serve.live import serving

SLOW = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
QUICK = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


class BackgroundRequest:
    """A request running in its own thread."""

    def __init__(self, live, body):
        self.reply = None

        def run():
            self.reply = live.post("/generate", body)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def done(self):
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        assert self.reply.status_code == 200, self.reply.text
        return self.reply.json()


def running(live, count=1):
    until(lambda: sum(e.stats().running for e in live.engines) >= count)


def test_abort_by_request_id(live):
    with paused_once_started(live.engines[0]):
        pending = BackgroundRequest(live, SLOW | {"rid": "doomed"})
        running(live)
        assert live.post("/abort_request", {"rid": "someone else"}).json()["aborted"] == 0
        assert live.post("/abort_request", {"rid": "doomed"}).json()["aborted"] == 1
        meta = pending.done()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 150


def test_a_request_aborted_before_prefill_has_no_logprobs(live):
    live.post("/pause_generation", {"mode": "in_place"})
    scored = SLOW | {"rid": "waits", "return_logprob": True, "logprob_start_len": 0}
    pending = BackgroundRequest(live, scored | {"top_logprobs_num": 1})
    until(lambda: "waits" in live.service.live)
    live.post("/abort_request", {"rid": "waits"})
    meta = pending.done()["meta_info"]
    live.post("/continue_generation", {})
    assert meta["input_token_logprobs"] == [[None, 5, None], [None, 6, None], [None, 7, None]]
    assert meta["output_token_logprobs"] == [] and meta["input_top_logprobs"] == [None] * 3


def test_abort_ends_all_choices_of_a_request(live):
    body = SLOW | {"rid": "many", "sampling_params": SLOW["sampling_params"] | {"n": 3}}
    with paused_once_started(live.engines[0], 3):
        pending = BackgroundRequest(live, body)
        running(live, 3)
        assert live.post("/abort_request", {"rid": "many"}).json()["aborted"] == 3
    assert {r["meta_info"]["finish_reason"]["type"] for r in pending.done()} == {"abort"}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_and_continue(live, mode):
    (engine,) = live.engines
    with paused_once_started(engine):
        pending = BackgroundRequest(live, SLOW)
        running(live)
        assert live.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
        before = engine.stats().counters.generated_tokens
        late = BackgroundRequest(live, QUICK)
        time.sleep(0.05)
        assert engine.stats().counters.generated_tokens == before
        assert live.get("/health_generate").status_code == 200
        if mode != "abort":
            assert live.get("/flush_cache").status_code == 400
        assert live.post("/continue_generation", {}).json()["status"] == "ok"
    assert late.done()["meta_info"]["completion_tokens"] == 2
    meta = pending.done()["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert meta["num_retractions"] == (mode == "retract")


def test_an_unknown_pause_mode_is_rejected(live):
    assert live.post("/pause_generation", {"mode": "gently"}).status_code == 400
    assert not live.engines[0].stats().paused


def test_the_cache_is_flushed_only_when_idle(live):
    long = {"input_ids": list(range(20, 60)), "sampling_params": {"max_new_tokens": 1}}
    live.post("/generate", long)
    assert live.post("/generate", long).json()["meta_info"]["cached_tokens"] == 32
    with paused_once_started(live.engines[0]):
        pending = BackgroundRequest(live, SLOW)
        running(live)
        busy = live.get("/flush_cache")
        assert busy.status_code == 400 and not busy.json()["success"]
        live.post("/abort_request", {"abort_all": True})
    assert live.post("/flush_cache?timeout=10", {}).json()["success"]
    pending.done()
    assert live.post("/generate", long).json()["meta_info"]["cached_tokens"] == 0
    assert live.get("/flush_cache?timeout=soon").status_code == 400


def test_the_weight_version_can_be_set(folder):
    with serving(folder) as live:
        pending = BackgroundRequest(live, SLOW)
        running(live)
        body = {"new_version": "7", "abort_all_requests": False}
        assert live.post("/update_weight_version", body).json()["success"]
        assert live.get("/get_weight_version").json() == {"weight_version": "7"}
        meta = pending.done()["meta_info"]
        (first, old), (second, new) = meta["weight_versions"]
        assert (first, old, new) == (0, "0", "7") and 0 < second < 150
        assert meta["weight_version"] == "7"
        # Trainers may use any string as a version.
        assert live.post("/update_weight_version", {"new_version": "step-9"}).json()["success"]
        assert live.get("/get_weight_version").json() == {"weight_version": "step-9"}
        assert live.post("/generate", QUICK).json()["meta_info"]["weight_version"] == "step-9"


def test_weight_routes_without_an_updater_are_an_error(live):
    found = live.post("/update_weights_from_disk", {"model_path": "x"})
    assert found.status_code == 400 and "weights" in found.json()["error"]["message"]


# --- replicas -------------------------------------------------------------------------------------


def test_losing_a_replica_moves_only_its_sessions():
    for i in range(200):
        three = rendezvous_order(f"s{i}", 3)
        assert [r for r in three if r != 2] == rendezvous_order(f"s{i}", 2)


def test_sessions_spread_over_replicas():
    counts = [0] * 4
    for i in range(400):
        counts[rendezvous_order(f"session-{i}", 4)[0]] += 1
    assert min(counts) > 60


@pytest.fixture(scope="module")
def pair(folder):
    with serving(folder, replicas=2, engine={"max_running_requests": 2}) as server:
        yield server
        assert server.audit() == []


def rank(live, body, **headers):
    return live.post("/generate", QUICK | body, headers=headers).json()["meta_info"]["dp_rank"]


def test_a_session_keeps_its_replica_with_every_session_header(pair):
    for name in ("a", "b", "c", "d", "e"):
        favourite = rendezvous_order(name, 2)[0]
        assert rank(pair, {"session_id": name}) == favourite
        assert rank(pair, {"routing_key": name}) == favourite
        header = {"X-SMG-Routing-Key": name}
        assert rank(pair, {"session_id": "other"}, **header) == favourite
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "user": name}
        chat["return_meta_info"] = True
        done = pair.post("/v1/chat/completions", chat).json()
        assert done["choices"][0]["meta_info"]["dp_rank"] == favourite
    assert {rendezvous_order(name, 2)[0] for name in "abcde"} == {0, 1}


def test_a_requested_rank_overrides_the_session(pair):
    for wanted in (0, 1):
        assert rank(pair, {"routed_dp_rank": wanted, "session_id": "a"}) == wanted
        assert rank(pair, {"data_parallel_rank": wanted}) == wanted


def test_requests_without_a_session_are_round_robin(pair):
    assert {rank(pair, {}) for _ in range(4)} == {0, 1}


def test_an_overloaded_replica_is_skipped(pair):
    favourite = rendezvous_order("hot", 2)[0]
    pending = [BackgroundRequest(pair, SLOW | {"routed_dp_rank": favourite}) for _ in range(3)]
    running(pair, 2)
    assert rank(pair, {"session_id": "hot"}) == 1 - favourite
    for each in pending:
        each.done()
    assert rank(pair, {"session_id": "hot"}) == favourite


def test_requests_beyond_the_queue_limit_get_503(folder):
    with serving(folder, engine={"max_running_requests": 1, "max_queued_requests": 1}) as live:
        pending = BackgroundRequest(
            live, SLOW | {"sampling_params": SLOW["sampling_params"] | {"n": 2}}
        )
        running(live)
        found = live.post("/v1/completions", {"prompt": "x"})
        assert found.status_code == 503
        assert found.json()["error"]["code"] == "overloaded"
        pending.done()


def test_a_pause_applies_to_every_replica(pair):
    pair.post("/pause_generation", {})
    assert all(engine.stats().paused for engine in pair.engines)
    pair.post("/continue_generation", {})
    assert not any(engine.stats().paused for engine in pair.engines)
    assert [load["dp_rank"] for load in pair.get("/v1/loads").json()] == [0, 1]


def test_a_failed_engine_is_unhealthy(folder):
    with serving(folder) as live:
        (engine,) = live.engines

        def spoil(network):
            network.head.weight.data = network.head.weight.data[:, :5]

        engine.run_between_steps(spoil).result()
        found = live.post("/v1/completions", {"prompt": "x"})
        assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
        assert live.get("/health").status_code == 503
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 500


BREAKING = {
    "/generate": {"text": "x", "sampling_params": {"ignore_eos": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 50},
    "/v1/responses": {"input": "Say hello."},
}


@pytest.mark.parametrize("path", BREAKING)
def test_a_failing_stream_ends_with_an_error_event(folder, path):
    steps = []

    def breaks(module, given):
        steps.append(module)
        if len(steps) == 4:
            raise RuntimeError("the network fell over")

    with serving(folder) as live:
        (engine,) = live.engines
        engine.run_between_steps(
            lambda network: network.head.register_forward_pre_hook(breaks)
        ).result()
        found = live.post(path, BREAKING[path] | {"stream": True, "temperature": 0})
    assert found.status_code == 200
    lines = [line for line in found.text.splitlines() if line]
    assert "the network fell over" in found.text
    if path in ("/v1/messages", "/v1/responses"):
        assert lines[-2] == "event: error" and "[DONE]" not in found.text
    else:
        assert lines[-2].startswith('data: {"error":') and lines[-1] == "data: [DONE]"
