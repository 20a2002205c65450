"""How many pages the caches get, decided and said before anything is allocated.

A page holds `page_size` positions of one request in every layer of the target and, with it, of the drafter.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.errors import UserError

SHARE_OF_FREE = 0.5
"""Of the memory that is free once the weights are loaded, what pages may take unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """What the caches will take."""

    pages: int
    page_size: int
    bytes_per_page: int
    max_length: int

    @property
    def bytes(self) -> int:
        """All pages together."""
        return self.pages * self.bytes_per_page

    @property
    def positions(self) -> int:
        """Tokens that fit at the same time, over all requests."""
        return self.pages * self.page_size

    def __str__(self) -> str:
        return (
            f"{self.pages:,} pages of {self.page_size} tokens, {_size(self.bytes)}: {self.positions:,} tokens at once, "
            f"{self.positions // self.max_length} requests of {self.max_length:,}"
        )


def plan_pages(
    *,
    bytes_per_token: int,
    page_size: int,
    max_rows: int,
    max_length: int,
    free_bytes: int,
    memory: int | None = None,
) -> PageBudget:
    """Pages for `max_rows` requests of `max_length`, or as many as memory allows; refused if not even one fits.

    `memory` is what the user grants in bytes; without it, half of what is free.
    """
    if page_size < 1:
        raise UserError(f"page_size is {page_size}; it must be 1 or more")
    if memory is not None and memory > free_bytes:
        raise UserError(f"memory for pages is {_size(memory)}, above the {_size(free_bytes)} that are free; lower it")
    granted = int(free_bytes * SHARE_OF_FREE) if memory is None else memory
    bytes_per_page = bytes_per_token * page_size
    # One page more for the request that just crosses a boundary.
    per_request = -(-max_length // page_size) + 1
    pages = min(granted // bytes_per_page, per_request * max_rows)
    if pages < per_request:
        needed = per_request * bytes_per_page
        raise UserError(
            f"one request of {max_length:,} tokens needs {_size(needed)} of pages, above the {_size(granted)} granted "
            f"({_size(free_bytes)} are free); lower max_length to "
            f"{max(0, (granted // bytes_per_page - 1) * page_size):,} or grant more"
        )
    return PageBudget(pages=pages, page_size=page_size, bytes_per_page=bytes_per_page, max_length=max_length)


def free_bytes(device: torch.device) -> int:
    """Memory that is free where the caches will lie."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = [line.split()[1] for line in _meminfo() if line.startswith("MemAvailable:")]
    if available:
        return int(available[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> list[str]:
    """Linux counts what it could drop as available; other systems have no such file."""
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
