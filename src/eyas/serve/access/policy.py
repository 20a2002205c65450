"""Access rules: which keys, host names and origins a server accepts, and who may change it.

A server on the loopback address without keys is open to every program of its machine, so it must tell a program's
request from one that a web page slipped past the browser: with DNS rebinding the Host is another name, across sites the
Origin is.
"""

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from starlette.types import Scope

from eyas.errors import UserError
from eyas.serve.access.caller import caller_of
from eyas.serve.api_error import ApiError

ANY = "*"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"\[(?P<v6>[0-9a-f:.]+)\](:\d+)?|(?P<name>[^\s/:@\[\]]+)(:\d+)?")
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/@?#]+")


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """The operator's decisions. By default everything is open, which suits tests and embedded servers."""

    api_keys: tuple[str, ...] = ()
    """Without any, requests need none."""
    admin_keys: tuple[str, ...] = ()
    """Keys that may also change the server."""
    learn_keys: tuple[str, ...] = ()
    """The keys that opted in to have their answers kept; `*` for every caller."""
    open_changes: bool = True
    """Whether a server without any keys accepts changes from everyone."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names that requests may be addressed to, as `host_name` writes them; None for all."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages elsewhere that may call this server; `*` for all."""

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise UserError(f"allowed origin {origin!r} is not * or like https://example.com:8080; change it")

    def allows_host(self, header: str) -> bool:
        """Whether requests may carry this Host header."""
        return self.allowed_hosts is None or host_name(header) in self.allowed_hosts

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether a web page of this origin may call a server that it addresses as `host`."""
        _, separator, authority = origin.lower().partition("://")
        same = separator != "" and authority == host.lower()
        return same or ANY in self.allowed_origins or origin.lower() in self.allowed_origins

    def require_admin(self, scope: Scope) -> None:
        """Raise an error unless the request may change the server."""
        caller = caller_of(scope)
        if self.admin_keys and not caller.admin:
            message = "changes need the administrator's key; send it as Authorization: Bearer KEY"
            raise ApiError(401 if caller.key_digest is None else 403, message, code="admin_key_required")
        if not self.admin_keys and (self.api_keys or not self.open_changes):
            message = "changes need an administrator's key and this server has none; start it with --admin-key"
            raise ApiError(403, message, code="admin_key_required")


def host_name(header: str) -> str | None:
    """The name in a Host header, without port, brackets, capitals or last dot; None if it is not valid."""
    found = _HOST.fullmatch(header.strip().lower())
    return None if found is None else found["v6"] or found["name"].removesuffix(".")


def access_rules(
    host: str,
    *,
    api_keys: Iterable[str] = (),
    admin_keys: Iterable[str] = (),
    allowed_hosts: Iterable[str] = (),
    allowed_origins: Iterable[str] = (),
) -> AccessRules:
    """The rules of a server that listens on `host`.

    On loopback without API keys only loopback names are accepted, and every caller may change the server. Elsewhere
    names are checked if some are given, and changes need an administrator's key.
    """
    api_keys = _keys("--api-key", "EYAS_API_KEY", api_keys)
    admin_keys = _keys("--admin-key", "EYAS_ADMIN_KEY", admin_keys)
    listed = [name for text in allowed_hosts for name in text.replace(",", " ").split()]
    names = []
    for text in listed:
        name = host_name(f"[{text}]" if text.count(":") > 1 and "[" not in text else text)
        if name is None:
            raise UserError(f"allowed host {text!r} is no name or address; give it without scheme and path")
        names.append(name)
    guarded = is_loopback(host) and not api_keys
    hosts = None
    if ANY not in listed and (listed or guarded):
        hosts = tuple(dict.fromkeys([*LOOPBACK_HOSTS, host.lower(), *names]))
    return AccessRules(
        api_keys=api_keys,
        admin_keys=admin_keys,
        open_changes=guarded and hosts is not None,
        allowed_hosts=hosts,
        allowed_origins=tuple(
            origin.lower().rstrip("/") for text in allowed_origins for origin in text.replace(",", " ").split()
        ),
    )


def _keys(option: str, variable: str, given: Iterable[str]) -> tuple[str, ...]:
    """The keys that were given. An empty one is refused: it would leave a server open that should not be."""
    keys = tuple(given)
    if not all(key.strip() for key in keys):
        raise UserError(f"{option} is empty; give a key, or leave {option} and {variable} out to run without one")
    if not keys and not os.environ.get(variable, "-").strip():  # which the command line takes for not set
        raise UserError(f"{variable} is empty; give it a key, or run without one: unset {variable}")
    return keys


def with_learning(rules: AccessRules, host: str, learn_keys: Iterable[str]) -> AccessRules:
    """Add the keys whose answers are kept to learn from; `*` for all.

    On loopback without API keys there is one user, the operator: there all answers are kept unless keys are named.
    """
    keys, known = tuple(key for key in learn_keys if key), {*rules.api_keys, *rules.admin_keys}
    for key in keys:
        if key != ANY and key not in known:
            name = sha256(key.encode()).hexdigest()[:8]
            raise UserError(
                f"a --learn-key (its SHA-256 begins with {name}) is none of the server's keys; name it by --api-key too"
            )
    if not keys and rules.api_keys:
        raise UserError(
            f"--learn keeps answers of keys that opted in, and none of the {len(rules.api_keys)} has; name those that "
            "have by --learn-key, or * for all"
        )
    if not keys and not is_loopback(host):
        raise UserError(
            f"--learn on {host} without --api-key would keep the answers of everybody who can reach it; give --api-key "
            "and --learn-key, or allow it by --learn-key '*'"
        )
    return replace(rules, learn_keys=keys or (ANY,))


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
