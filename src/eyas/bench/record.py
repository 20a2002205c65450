"""JSON record of a bench, from which the table, the HTML report and comparisons are made.

The schema is stable: keys are added, never renamed; a breaking change raises the number in `schema`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.atomic import new_file
from eyas.bench.experiment import Experiment, Run
from eyas.bench.measures import acceptance, make_rows, requests_json, rounded, throughput, user_speed
from eyas.bench.provenance import host, versions, without_secrets
from eyas.bench.variants import Variant
from eyas.bench.warnings import find_warnings
from eyas.errors import UserError

SCHEMA = "eyas.bench/1"
Json = dict[str, Any]


class RecordBuilder:
    """Makes the record of an experiment, also before its end."""

    def __init__(self, experiment: Experiment, command: str) -> None:
        self._experiment, self._command = experiment, command
        self._started, self._host = datetime.now(UTC), host()

    def build(self, stopped: str | None = None) -> Json:
        """The record so far; `stopped` says what ended the experiment early."""
        experiment, config = self._experiment, self._experiment.config
        workload = config.workload
        rows = make_rows(experiment.runs)
        return {
            "schema": SCHEMA,
            "whole": experiment.whole,
            "stopped": stopped or (None if experiment.whole else "; ".join(experiment.problems) or "still under way"),
            "started": self._started.isoformat(timespec="seconds"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self._command,
            "versions": versions(),
            "host": self._host | {"load_average_after": host()["load_average"]},
            "plan": {
                "loads": [asdict(load) for load in config.loads],
                "repetitions": config.repetitions,
                "warmup": config.warmup,
                "prefill": config.prefill,
                "timeout": config.timeout,
                **asdict(config.options),
            },
            "workload": {
                "sha256": workload.sha256,
                "conversations": len(workload.tasks),
                "requests": sum(task.requests for task in workload.tasks),
                "categories": workload.categories,
                "files": [asdict(source) for source in workload.sources],
            },
            "servers": [_server(variant) for variant in config.variants],
            "warnings": [*experiment.problems, *find_warnings(config, rows)],
            "rows": rows,
            "runs": [_run(run) for run in experiment.runs],
        }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record atomically."""
    with new_file(path) as staging:
        staging.write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_record(path: Path) -> Json:
    """Read a record of an earlier bench."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); give the bench.json of a run") from error
    found = record.get("schema") if isinstance(record, dict) else None
    if found != SCHEMA:
        raise UserError(f"{path} is no record of eyas bench: its schema is {found!r}, not {SCHEMA!r}")
    return dict(record)


def _server(variant: Variant) -> Json:
    server = variant.server
    return {
        "name": variant.name,
        "mode": variant.mode,
        "url": server.address.url,
        "kind": server.kind,
        "version": server.version,
        "model": server.model,
        "card": dict(server.card),
        "drafts": server.drafts,
        "command": None if server.command is None else without_secrets(server.command),
        "extra_body": dict(variant.extra),
    }


def _run(run: Run) -> Json:
    return {
        "server": run.variant.name,
        "mode": run.variant.mode,
        "users": run.load.users,
        "rate": run.load.rate,
        "repetition": run.repetition + 1,
        "whole": run.whole,
        "seconds": round(run.seconds, 4),
        "tokens_per_second": rounded(throughput(run)),
        "user_tokens_per_second": rounded(user_speed(run.answers)),
        "acceptance": acceptance([run]),
        "client_cpu_share": round(run.client_cpu_share, 4),
        "requests": requests_json(run),
    }
