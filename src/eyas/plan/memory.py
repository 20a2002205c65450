"""Where the memory goes, decided and said before anything is allocated: the engine's plan and `eyas plan` alike.

    weights, drafter      what is loaded
    runtime               what the device's own libraries take before anything is loaded
    working               what a pass needs while it runs
    recorded              what recorded steps (CUDA graphs) keep for good
    pages                 keys and values of requests; they get what is left, or what is granted

A page holds `page_size` positions of one request in every layer of the target and, with it, of the drafter.
"""

from dataclasses import dataclass

from eyas.errors import UserError

SHARE_OF_FREE = 0.5
"""Of the memory that is free once the weights are loaded, what pages may take unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a target with its drafter, of everything but the pages, and of a token in them."""

    weights: int
    drafter: int
    token: int
    """Keys and values of one token in every layer of the target."""
    drafter_token: int
    """The same in the drafter."""
    working: int
    recorded: int
    runtime: int = 0

    @property
    def per_token(self) -> int:
        """What one token takes in both caches."""
        return self.token + self.drafter_token

    @property
    def beside_pages(self) -> int:
        """All but the pages."""
        return self.runtime + self.weights + self.drafter + self.beside_weights

    @property
    def beside_weights(self) -> int:
        """What running takes, once everything is loaded and before there is a page."""
        return self.working + self.recorded


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """What the caches will take."""

    pages: int
    page_size: int
    bytes_per_page: int
    max_length: int

    @property
    def bytes(self) -> int:
        """All pages together, and the one behind them that takes what is not real."""
        return (self.pages + 1) * self.bytes_per_page

    @property
    def positions(self) -> int:
        """Tokens that fit at the same time, over all requests."""
        return self.pages * self.page_size

    def __str__(self) -> str:
        return (
            f"{self.pages:,} pages of {self.page_size} tokens, {size(self.bytes)}: {self.positions:,} tokens at once, "
            f"{self.positions // self.max_length} requests of {self.max_length:,}"
        )


def pages_of(length: int, page_size: int) -> int:
    """Pages of a request of that length, and one more for the moment when it crosses a boundary."""
    return -(-length // page_size) + 1


def plan_pages(
    *,
    footprint: Footprint,
    page_size: int,
    max_rows: int,
    max_length: int,
    free_bytes: int,
    memory: int | None = None,
    share: float = SHARE_OF_FREE,
) -> PageBudget:
    """Pages for `max_rows` requests of `max_length`, or as many as memory allows; refused if not even one fits.

    `free_bytes` is what is free once the weights are loaded; running takes its part of that first. `memory` is what
    the user grants to pages; without it, they may have a `share` of what is left.
    """
    if page_size < 1:
        raise UserError(f"page_size is {page_size}; it must be 1 or more")
    left = max(0, free_bytes - footprint.beside_weights)
    if memory is not None and memory > left:
        raise UserError(
            f"memory for pages is {size(memory)}, above the {size(left)} that are free beside "
            f"{size(footprint.beside_weights)} for running; lower it"
        )
    granted = int(left * share) if memory is None else memory
    bytes_per_page = footprint.per_token * page_size
    per_request = pages_of(max_length, page_size)
    pages = min(granted // bytes_per_page, per_request * max_rows)
    if pages < per_request:
        raise UserError(
            f"one request of {max_length:,} tokens needs {size(per_request * bytes_per_page)} of pages, above the "
            f"{size(granted)} granted ({size(free_bytes)} are free); lower max_length to "
            f"{longest(granted, footprint.per_token, page_size):,} or grant more"
        )
    return PageBudget(pages=pages, page_size=page_size, bytes_per_page=bytes_per_page, max_length=max_length)


def longest(granted: int, per_token: int, page_size: int) -> int:
    """The longest request whose pages fit."""
    return max(0, (granted // (per_token * page_size) - 1) * page_size)


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"
