"""The last hour of the server's state, for a page that has just been opened: GET /status/history.

A sample is what /status counts and measures at that moment, without names and alarms. Samples are kept as JSON text:
the ring holds at most `SAMPLES` of them, and answering costs no more than joining them.
"""

import asyncio
import json
from collections import deque
from typing import Any

from eyas.serve.context import ServerContext
from eyas.serve.monitoring.status import STATUS_SCHEMA, status_of

SAMPLE_SECONDS = 10
SAMPLES = 3600 // SAMPLE_SECONDS
FIELDS = ("at_seconds", "load", "kv_blocks", "counts", "latency")
"""What of /status changes by itself; the page computes rates and quantiles from two samples."""

HISTORY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["sample_seconds", "samples"],
    "properties": {
        "sample_seconds": {"type": "integer"},
        "samples": {
            "type": "array",
            "description": "The oldest first; the fields are those of /status.",
            "items": {
                "type": "object",
                "required": list(FIELDS),
                "properties": {name: STATUS_SCHEMA["properties"][name] for name in FIELDS},
            },
        },
    },
}


class StatusHistory:
    """A ring of samples."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._samples: deque[str] = deque(maxlen=SAMPLES)

    async def sample(self) -> None:
        """Add a sample of this moment."""
        status = await status_of(self._context)
        self._samples.append(json.dumps({name: status[name] for name in FIELDS}, separators=(",", ":")))

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def to_json(self) -> str:
        """The samples as JSON text, the oldest first."""
        return f'{{"sample_seconds":{SAMPLE_SECONDS},"samples":[{",".join(self._samples)}]}}'
