"""Access control: names, origins and keys; refusals are logged, and keys share no cached prefixes."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from typing import Any

import pytest

from each import each
from eyas.errors import UserError
from eyas.serve.access.policy import AccessRules, access_rules, host_name, is_loopback
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.json_logging import JsonFormatter
from serve.test_operation import metrics

LOOPBACK = access_rules("127.0.0.1")
PROMPT = "abcdefgh" * 12


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@each(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost.:80", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("::1", None),
        ("", None),
        ("localhost@evil.example", None),
        ("evil.example/localhost", None),
        ("localhost:80:80", None),
        ("localhost evil", None),
    ],
)
def test_host_headers_are_normalised(header: str, name: str | None) -> None:
    assert host_name(header) == name


def test_access_rules_depend_on_address_and_keys() -> None:
    assert LOOPBACK.allowed_hosts == ("localhost", "127.0.0.1", "::1")
    assert LOOPBACK.open_changes
    keyed = access_rules("127.0.0.1", api_keys=["key"])
    assert (keyed.api_keys, keyed.allowed_hosts, keyed.open_changes) == (("key",), None, False)
    elsewhere = access_rules("0.0.0.0")
    assert (elsewhere.allowed_hosts, elsewhere.open_changes) == (None, False)
    everyone = access_rules("localhost", allowed_hosts=["*"])
    assert (everyone.allowed_hosts, everyone.open_changes) == (None, False)
    named = access_rules("127.0.0.9", allowed_hosts=["Box.Example:9,::2", "[fe80::1]"])
    assert named.allowed_hosts == ("localhost", "127.0.0.1", "::1", "127.0.0.9", "box.example", "::2", "fe80::1")
    assert access_rules("0.0.0.0", allowed_hosts=["box"]).allowed_hosts is not None
    assert access_rules("::1", allowed_origins=["https://A.example/"]).allowed_origins == ("https://a.example",)
    with pytest.raises(UserError, match="'http://box' is no name"):
        access_rules("127.0.0.1", allowed_hosts=["http://box"])
    for origin in ("a.example", "https://a.example/path", "https://"):
        with pytest.raises(UserError, match="allowed origin"):
            access_rules("127.0.0.1", allowed_origins=[origin])
    assert [is_loopback(host) for host in ("127.8.8.8", "::1", "LOCALHOST", "0.0.0.0", "::", "box")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_empty_key_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in ({"api_keys": [""]}, {"api_keys": ["key", " "]}, {"admin_keys": [""]}):
        with pytest.raises(UserError, match=r"--(api|admin)-key is empty; .*out to run without one"):
            access_rules("127.0.0.1", **keys)
    for variable in ("EYAS_API_KEY", "EYAS_ADMIN_KEY"):
        for empty in ("", " "):
            monkeypatch.setenv(variable, empty)
            with pytest.raises(UserError, match=f"^{variable} is empty; .*run without one: unset {variable}$"):
                access_rules("127.0.0.1")
        assert access_rules("127.0.0.1", api_keys=["key"], admin_keys=["admin"]).api_keys == ("key",)
        monkeypatch.delenv(variable)
    assert access_rules("127.0.0.1").api_keys == ()


def test_dns_rebinding_is_refused(new_server: Any) -> None:
    with new_server(access=LOOPBACK) as client:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example", ""):
            for path in ("/", "/health", "/metrics", "/v1/models", "/status", "/nowhere"):
                client.get(path, headers={"host": host}).assert_refused(421, repr(host), "--allowed-hosts")
            client.post("/v1/drafter", {"model": "none"}, headers={"host": host}).assert_refused(421)
        twice = [("host", "localhost"), ("host", "evil.example")]
        client.get("/v1/models", headers=twice).assert_refused(421)
        assert client.get("/v1/drafter", headers={"host": "localhost"}).json["drafter"] == "tiny-drafter"
        for host in ("localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
            assert client.get("/v1/models", headers={"host": host}).status == 200
    with new_server(access=access_rules("127.0.0.1", allowed_hosts=["box.example"])) as client:
        assert client.get("/health", headers={"host": "box.example:80"}).status == 200
        client.get("/health", headers={"host": "other.example"}).assert_refused(421)


def test_requests_of_other_origins_are_refused(new_server: Any) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with new_server(access=LOOPBACK) as client:
        local = {"host": "localhost:8000"}
        for origin in ("https://evil.example", "http://localhost:3000", "http://localhost", "null", "localhost:8000"):
            headers = local | {"origin": origin}
            reply = client.post("/v1/completions", {"prompt": "a"}, headers=headers)
            reply.assert_refused(403, origin, "--allowed-origins")
            assert "access-control-allow-origin" not in reply.headers
            client.get("/v1/models", headers=headers).assert_refused(403)
            reply = client.request("OPTIONS", "/v1/completions", headers=headers | preflight)
            reply.assert_refused(403)
            assert "access-control-allow-origin" not in reply.headers
        assert client.get("/v1/models", headers=local | {"origin": "http://localhost:8000"}).status == 200
        client.get("/v1/models", headers={"host": "", "origin": "null"}).assert_refused(421)


def test_pages_of_allowed_origins_can_read_answers_and_errors(new_server: Any) -> None:
    friend, stranger = {"origin": "https://a.example"}, {"origin": "https://b.example"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    rules = AccessRules(api_keys=("key",), allowed_origins=("https://a.example",))
    with new_server(access=rules) as client:
        reply = client.request("OPTIONS", "/v1/chat/completions", headers=friend | preflight)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reply.headers
        for headers, status in ((friend, 401), (friend | bearer("key"), 200)):
            reply = client.get("/v1/models", headers=headers)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, "https://a.example")
            assert "Origin" in reply.headers["vary"]
        client.get("/v1/models", headers=stranger | bearer("key")).assert_refused(403)
    with new_server(access=AccessRules(allowed_origins=("*",))) as client:
        assert client.get("/v1/models", headers=stranger).headers["access-control-allow-origin"] == "*"


def test_all_other_paths_need_a_key(new_server: Any) -> None:
    with new_server(keys=("key",)) as client:
        routes = {route.path for route in client.application.asgi.routes}
        opened = {path for path in routes if client.get(path).status != 401}
        assert {"/", "/health", "/metrics", "/openapi.json"} <= opened
        assert {path for path in opened if not path.startswith("/page/")} <= {
            "/", "/health", "/ping", "/load", "/version", "/metrics", "/openapi.json",
        }  # fmt: skip
        for path in ("/nowhere", "/v1/nowhere", "/healthy", "//v1/models", "/page", "/V1/models"):
            client.get(path).assert_refused(401)


def test_every_refusal_leaves_one_line_and_one_count(new_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    rules = AccessRules(api_keys=("key", "other"), allowed_hosts=("server",))
    kind, key = {"content-type": "text/plain"}, sha256(b"key").hexdigest()[:8]
    with (
        new_server(access=rules, limits=ServerLimits(body_bytes=100)) as client,
        caplog.at_level(logging.INFO, logger="eyas.serve"),
    ):
        client.get("/v1/models", headers=bearer("wrong secret"))
        client.get("/v1/models/another", headers=bearer("key"))
        client.get("/v1/completions", headers=bearer("key"))
        client.get("/" + "x" * 5000, headers=bearer("key"))
        client.get("/v1/models", headers=bearer("key") | {"host": "evil.example"})
        client.get("/v1/models", headers=bearer("key") | {"origin": "https://evil.example"})
        client.post("/v1/completions", content=b"{}", headers=bearer("key") | kind)
        client.post("/v1/completions", {"prompt": "a" * 200}, headers=bearer("key"))
        client.post("/v1/drafter", content=b"{}", headers=bearer("key"))
        lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        told = metrics(client)
    assert [(line["event"], line["status"], line["outcome"], line.get("key")) for line in lines] == [
        ("refused", 401, "bad_key", None),
        ("refused", 404, "model_not_found", key),
        ("refused", 405, "405", key),
        ("refused", 404, "404", key),
        ("refused", 421, "unknown_host", None),
        ("refused", 403, "origin_not_allowed", None),
        ("request", 415, "unsupported_media_type", key),
        ("request", 413, "too_large", key),
        ("refused", 403, "admin_key_required", key),
    ]
    assert all(line["client"] == "127.0.0.1" for line in lines)
    assert lines[1]["path"] == "/v1/models/{name:path}"
    assert len(lines[3]["path"]) == 100
    assert (lines[4]["host"], lines[5]["origin"]) == ("evil.example", "https://evil.example")
    assert not any("secret" in json.dumps(line) for line in lines)
    counted = {name: value for name, value in told.items() if name.startswith("eyas_requests_total")}
    assert sum(counted.values()) == len(lines)
    assert told["eyas_requests_total,endpoint=/v1/models,outcome=bad_key"] == 1
    assert told["eyas_requests_total,endpoint=other,outcome=404"] == 1


def test_unknown_paths_do_not_grow_the_metrics(new_server: Any) -> None:
    with new_server() as client:
        for number in range(50):
            client.get(f"/stranger/{number}")
            client.get(f"/v1/models/stranger{number}")
        counted = [name for name in metrics(client) if name.startswith("eyas_requests_total")]
        assert len(counted) == 2, counted


def cached(client: Any, key: str | None = None, **fields: Any) -> int:
    """KV blocks that the prefix cache had of the prompt."""
    before = client.engine.block_manager.hits
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | fields
    reply = client.post("/v1/completions", body, headers={} if key is None else bearer(key))
    assert reply.status == 200, reply.text
    return int(client.engine.block_manager.hits - before)


def test_keys_share_no_cached_prefixes(new_server: Any) -> None:
    with new_server(keys=("first", "second")) as client:
        assert cached(client, "first") == 0
        assert cached(client, "second") == 0
        most = cached(client, "first")
        assert most == cached(client, "second") > 0
        assert cached(client, "first", cache_salt="mine") == 0
        assert cached(client, "second", cache_salt="mine") == 0
        assert cached(client, "first", cache_salt="mine") == most
        # A salt cannot be made to look like another key's name.
        for salt in (sha256(b"second").hexdigest(), f"{sha256(b'second').hexdigest()}/", "/", "second"):
            assert cached(client, "first", cache_salt=salt) == 0
        client.all_back()


def test_without_keys_a_salt_keeps_prefixes_apart(new_server: Any, load_other: Any) -> None:
    with new_server(load=load_other, drafters=("other",)) as client:
        assert cached(client) == 0
        most = cached(client)
        assert most > 0
        assert [cached(client, cache_salt=salt) for salt in "aabba"] == [0, most, 0, most, most]
        client.post("/v1/drafter", {"model": "other"})
        off = {"speculative": {"mode": "off"}}
        assert [cached(client, cache_salt=salt, **off) for salt in "abc"] == [most, most, 0], "a swap keeps them apart"
        client.post("/v1/completions", {"prompt": "a", "cache_salt": ""}).assert_refused(
            400, "cache_salt", "at least 1"
        )


@pytest.fixture
def load_other(tiny_drafter: Any) -> Any:
    return lambda _: tiny_drafter


def test_metrics_tell_nothing_of_keys_and_salts(new_server: Any) -> None:
    with new_server(keys=("sesame", "barley")) as client:
        cached(client, "sesame", cache_salt="pepper")
        client.get("/v1/models", headers=bearer("wheat"))
        text = client.get("/metrics").text
        digests = [sha256(key.encode()).hexdigest()[:8] for key in ("sesame", "barley", "wheat", "pepper")]
        assert not any(word in text for word in ("sesame", "barley", "wheat", "pepper", *digests))
