"""An adaptation's record as tables for people."""

from collections.abc import Mapping
from typing import Any

from eyas.cli.tables import titled_table, wide_console

NAMES = {"traffic": "the traffic", "replay": "what is replayed"}


def print_adaptation(record: Mapping[str, Any]) -> None:
    """Lengths before and after, acceptance by depth, and the verdicts, to stdout."""
    console = wide_console(120, highlight=False)
    depth, changes = record["depth"], record["changes"]
    title = f"acceptance length at depth {depth}, estimated on what was held out"
    lengths = titled_table(title, ["on", "conversations", "before", "after", "change", "95 % interval"])
    for name, change in changes.items():
        gain = change["gain"]
        lengths.add_row(
            NAMES[name],
            str(change["conversations"]),
            f"{change['before']['acceptance_length']:.3f}",
            f"{change['after']['acceptance_length']:.3f}",
            f"{gain['value']:+.1%}",
            f"{gain['low']:+.1%} to {gain['high']:+.1%}",
        )
    console.print(lengths)
    shares = titled_table("accepted, given all before it were", ["on", "", *(str(k + 1) for k in range(depth))])
    for name, change in changes.items():
        for when in ("before", "after"):
            row = ["-" if share is None else f"{share:.3f}" for share in change[when]["conditional"]]
            shares.add_row(NAMES[name], when, *row)
    console.print(shares)
    doctor = record["doctor"]
    console.print(f"doctor: {doctor['text']}" if "text" in doctor else f"doctor: skipped {doctor['skipped']}")
    seconds, answered = record["seconds"], record["data"]["conversations"]
    console.print(
        f"{answered:,} conversations, {record['steps']:,} steps in {seconds['training'] / 60:.1f} "
        f"minutes of training; {seconds['total'] / 60:.1f} minutes in all"
    )
    if (share := record["device_share"])["asked"] < 1:
        console.print(f"{share['taken']:.1%} of the device's time, of {share['asked']:.1%} that it was allowed")
    console.print(record["verdict"], style="bold")
