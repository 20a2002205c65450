"""Connection limit and eviction.

The cap keeps the process below its limit of open files: beyond that limit no connection is accepted at all, and the
listening socket stays readable. At the cap, a connection whose client is slow or silent is closed for a new one;
connections that are being answered are kept. A few places above the cap are for /health and /metrics alone.
"""

import resource
from collections import Counter
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Protocol

from eyas.errors import UserError

DEFAULT_MAX_CONNECTIONS = 2048
RESERVED_PLACES = 16
"""Places above the cap, for probes."""
RESERVED_FILES = 64
"""Of the limit of open files: for those places, for connections about to be closed, and for files."""
LEAST_CONNECTIONS = 8


class OpenConnection(Protocol):
    """A connection as the limiter sees it."""

    address: str

    @property
    def in_request(self) -> bool:
        """Whether a request's head was read and its answer has not ended."""

    @property
    def waiting_since(self) -> float | None:
        """The time since which the server waits for the client, by the monotonic clock; None while the client waits."""

    def evict(self) -> None:
        """Close at once, in favour of another connection."""


class ConnectionLimiter:
    """All open connections. It is used on the event loop only."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._open: set[OpenConnection] = set()
        self._reserved: set[OpenConnection] = set()
        self._per_address: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Connections that hold a place."""
        return len(self._open)

    def add(self, connection: OpenConnection) -> bool:
        """Take a place, if necessary by evicting another connection. False if there is none."""
        full = self.open >= self.max_connections and not self._evict_one()
        if full and self.open >= self.max_connections + RESERVED_PLACES:
            return False
        if full:
            self._reserved.add(connection)
        self._open.add(connection)
        self._per_address[connection.address] += 1
        return True

    def only_probes(self, connection: OpenConnection) -> bool:
        """Whether a connection is on a place above the cap."""
        return connection in self._reserved and self.open > self.max_connections

    def remove(self, connection: OpenConnection) -> None:
        """Give a place back, if it was not yet."""
        if connection in self._open:
            self._open.remove(connection)
            self._reserved.discard(connection)
            self._per_address[connection.address] -= 1
            if not self._per_address[connection.address]:
                del self._per_address[connection.address]

    def _evict_one(self) -> bool:
        """Evict from the address with most connections: idle before in a request, then the longest wait."""
        waiting = [(connection, since) for connection in self._open if (since := connection.waiting_since) is not None]
        if not waiting:
            return False
        victim, _ = max(
            waiting, key=lambda pair: (self._per_address[pair[0].address], not pair[0].in_request, -pair[1])
        )
        self.remove(victim)  # at once, so that it is not chosen again before its socket closes
        victim.evict()
        return True


def client_network(address: str) -> str:
    """The address that connections are counted by: the first 64 bits of IPv6, since one client has all the others."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> 64 << 64))


def connection_cap(wanted: int | None) -> int:
    """The connection limit: the one given, or as the limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted or DEFAULT_MAX_CONNECTIONS
    room = soft - sum(1 for _ in Path("/dev/fd").iterdir()) - RESERVED_FILES
    if room < max(wanted or 0, LEAST_CONNECTIONS):
        asked = f"--max-connections {wanted}" if wanted else "a server"
        raise UserError(
            f"the limit of open files is {soft}, which leaves {max(room, 0)} connections, too few for {asked}; "
            f"raise it (ulimit -n {soft + max(wanted or 0, LEAST_CONNECTIONS) - room})"
        )
    return wanted or min(room, DEFAULT_MAX_CONNECTIONS)
