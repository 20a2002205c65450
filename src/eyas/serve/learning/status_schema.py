"""JSON schemas of the learner's part of /status."""

from typing import Any

_NUMBER = {"type": "integer", "description": "Of the learnt drafter; 0 is the one that the server was started with."}

LEARNER_SCHEMA: dict[str, Any] = {
    "type": ["object", "null"],
    "description": "The loop that adapts the drafter to the answers; null: they are only kept.",
    "properties": {
        "state": {"enum": ["collecting", "adapting", "ready", "watching", "backing_off", "no_drafter"]},
        "share": {"type": "number", "description": "Of the device's time that an adaptation may take."},
        "new_answers": {"type": "integer", "description": "Answers that no adaptation has learnt from."},
        "needed_answers": {"type": "integer", "description": "So many begin an adaptation."},
        "not_before_seconds": {"type": "number", "description": "Until the next adaptation may begin."},
        "attempts": {"type": "integer"},
        "failures": {"type": "integer", "description": "In a row; each doubles the wait."},
        "last": {
            "type": ["object", "null"],
            "description": "How the last adaptation ended.",
            "properties": {
                "attempt": {"type": "integer"},
                "asked_by": {"enum": ["answers", "alarm"]},
                "outcome": {"enum": ["better", "not_better", "failed", "refused", "superseded"]},
                "reason": {"type": "string"},
                "answers": {"type": "integer"},
                "seconds": {"type": "number"},
                "gate": {"type": ["object", "null"], "description": "Old and new drafter on held-out answers."},
            },
        },
        "drafter": {
            "type": "object",
            "description": "The drafter at work and, if it was learnt, its story.",
            "required": ["number"],
            "properties": {"number": _NUMBER},
        },
        "watch": {
            "type": ["object", "null"],
            "description": "The watch over a drafter that was swapped in.",
            "properties": {name: {"type": "integer"} for name in ("passes", "next_look", "last_look")},
        },
    },
}
