"""Requests to a server without keys: cross-site requests and DNS rebinding are rejected."""

import httpx
import pytest
from starlette.datastructures import Headers

from paddock.serve import ApiKeys, ServeSettings
from paddock.serve.auth import AuthMiddleware
from paddock.serve.routes.admin import ADMIN_PATHS
from tests.serve.live import serving

HERE = "127.0.0.1:8000"
READS = ("/v1/models", "/server_info", "/metrics", "/openapi.json")


def auth_error(path, method="POST", *, keys=None, settings=None, **headers):
    shown = {"host": HERE} | {name.replace("_", "-"): value for name, value in headers.items()}
    guard = AuthMiddleware(None, keys or ApiKeys(), settings or ServeSettings())
    return guard.find_error(method, path, Headers(shown))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "", "["]
)
def test_a_keyless_loopback_server_rejects_foreign_host_names(host):
    for path in (*ADMIN_PATHS, "/v1/chat/completions", "/tokenize"):
        found = auth_error(path, host=host, origin=f"http://{host}")
        assert found is not None and found.status == 403, path
    for path in READS:
        assert auth_error(path, "GET", host=host).status == 403, path
    assert auth_error("/health", "GET", host=host) is None  # it reveals nothing


@pytest.mark.parametrize("host", [HERE, "localhost:8000", "[::1]:8000", "192.168.0.7"])
def test_local_addresses_are_allowed(host):
    assert auth_error("/v1/chat/completions", host=host) is None


def test_configured_host_names_are_allowed():
    named = ServeSettings(allowed_hosts=("llm.lan",))
    assert auth_error("/generate", settings=named, host="llm.lan:80") is None
    assert auth_error("/generate", settings=named, host="evil.example").status == 403


def test_with_a_key_or_on_a_public_address_any_host_name_is_allowed():
    """A foreign page does not know the key; a public address is reached by name."""
    shown = {"authorization": "Bearer a", "host": "llm.example"}
    assert auth_error("/generate", keys=ApiKeys(api="a"), **shown) is None
    public = ServeSettings(host="0.0.0.0")
    assert auth_error("/generate", settings=public, host="gpu-node:8000") is None


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
def test_cross_site_requests_are_rejected(method, sent):
    assert auth_error("/flush_cache", method, **sent).status == 403
    assert auth_error("/v1/chat/completions", "POST", **sent).status == 403


def test_the_chat_page_and_plain_clients_are_allowed():
    page = {"origin": f"http://{HERE}", "sec_fetch_site": "same-origin"}
    for sent in ({}, page, {"sec_fetch_site": "none"}):
        assert auth_error("/flush_cache", "GET", **sent) is None
        assert auth_error("/v1/chat/completions", "POST", **sent) is None


def test_invalid_host_headers_are_rejected_without_a_server_error(folder):
    with serving(folder, keys=ApiKeys(api="a")) as live:
        key = {"authorization": "Bearer a"}
        for headers in ({"origin": "http://["}, {"host": "["}, {"host": "[", "origin": "http://["}):
            for path in ("/v1/nothing", "/generate", "/v1/messages"):
                with httpx.Client() as client:
                    sent = client.build_request("POST", live.url + path, json={})
                    sent.headers.update(key | headers)
                    assert 400 <= client.send(sent).status_code < 500, (headers, path)
