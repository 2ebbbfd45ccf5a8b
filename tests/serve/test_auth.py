"""Who may ask a keyless server: pages of other sites may not, by whatever name they come."""

import httpx
import pytest
from starlette.datastructures import Headers

from paddock.serve import ApiKeys, ServeSettings
from paddock.serve.auth import AuthMiddleware
from paddock.serve.routes.admin import ADMIN_PATHS
from tests.serve.live import serving

HERE = "127.0.0.1:8000"
READS = ("/v1/models", "/server_info", "/metrics", "/openapi.json")


def objection(path, method="POST", *, keys=None, settings=None, **headers):
    shown = {"host": HERE} | {name.replace("_", "-"): value for name, value in headers.items()}
    guard = AuthMiddleware(None, keys or ApiKeys(), settings or ServeSettings())
    return guard.find_error(method, path, Headers(shown))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "", "["]
)
def test_a_keyless_loopback_server_refuses_names_that_only_point_here(host):
    for path in (*ADMIN_PATHS, "/v1/chat/completions", "/tokenize"):
        found = objection(path, host=host, origin=f"http://{host}")
        assert found is not None and found.status == 403, path
    for path in READS:
        assert objection(path, "GET", host=host).status == 403, path
    assert objection("/health", "GET", host=host) is None  # it says nothing


@pytest.mark.parametrize("host", [HERE, "localhost:8000", "[::1]:8000", "192.168.0.7"])
def test_addresses_of_this_machine_are_answered(host):
    assert objection("/v1/chat/completions", host=host) is None


def test_names_of_ones_own_are_allowed():
    named = ServeSettings(allowed_hosts=("llm.lan",))
    assert objection("/generate", settings=named, host="llm.lan:80") is None
    assert objection("/generate", settings=named, host="evil.example").status == 403


def test_with_a_key_or_on_a_public_address_any_name_will_do():
    """No page knows the key; and a public address is reached by name."""
    shown = {"authorization": "Bearer a", "host": "llm.example"}
    assert objection("/generate", keys=ApiKeys(api="a"), **shown) is None
    public = ServeSettings(host="0.0.0.0")
    assert objection("/generate", settings=public, host="gpu-node:8000") is None


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://["},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},  # an image, a link: they send no Origin
        {"sec_fetch_site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_other_sites_change_nothing(method, sent):
    assert objection("/flush_cache", method, **sent).status == 403
    assert objection("/v1/chat/completions", "POST", **sent).status == 403


def test_the_chat_page_and_plain_clients_may():
    page = {"origin": f"http://{HERE}", "sec_fetch_site": "same-origin"}
    for sent in ({}, page, {"sec_fetch_site": "none"}):
        assert objection("/flush_cache", "GET", **sent) is None
        assert objection("/v1/chat/completions", "POST", **sent) is None


def test_headers_that_are_no_addresses_are_refused_not_failed(folder):
    with serving(folder, keys=ApiKeys(api="a")) as live:
        key = {"authorization": "Bearer a"}
        for headers in ({"origin": "http://["}, {"host": "["}, {"host": "[", "origin": "http://["}):
            for path in ("/v1/nothing", "/generate", "/v1/messages"):
                with httpx.Client() as client:
                    sent = client.build_request("POST", live.url + path, json={})
                    sent.headers.update(key | headers)
                    assert 400 <= client.send(sent).status_code < 500, (headers, path)
