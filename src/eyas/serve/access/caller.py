"""The sender of a request: the address and, if a known key came with it, the key's digest."""

from dataclasses import dataclass
from hashlib import sha256

from starlette.types import Scope

_SCOPE_KEY = "eyas.caller"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The sender of one request."""

    address: str | None = None
    key_digest: str | None = None
    """SHA-256 of the key in hex; None without a known key."""
    admin: bool = False
    learns: bool = False
    """Whether answers to it may be kept to learn from."""

    @property
    def fingerprint(self) -> str | None:
        """The key's name in logs: it tells keys apart and reveals none."""
        return None if self.key_digest is None else self.key_digest[:8]

    @property
    def log_fields(self) -> dict[str, str | None]:
        """Address and key, as log lines have them."""
        return {"client": self.address, "key": self.fingerprint}

    def cache_salt(self, given: str | None) -> str | None:
        """The salt of this caller's prefixes: callers with other keys, or other salts of their own, share none."""
        if self.key_digest is None and given is None:
            return None
        # A digest, because cached blocks keep it: of fixed size, whatever was given.
        return sha256(f"{self.key_digest or ''}/{given or ''}".encode()).hexdigest()


def set_caller(scope: Scope, caller: Caller) -> None:
    """Keep the caller with the request."""
    scope[_SCOPE_KEY] = caller


def caller_of(scope: Scope) -> Caller:
    """The caller of a request."""
    caller = scope.get(_SCOPE_KEY)
    return caller if isinstance(caller, Caller) else Caller(address=address_of(scope))


def address_of(scope: Scope) -> str | None:
    """The address of the other end of the connection."""
    client = scope.get("client")
    return str(client[0]) if client else None
