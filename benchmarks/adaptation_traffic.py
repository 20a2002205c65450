"""Makes synthetic support tickets: one long system prompt, one kind of answer, e-mails to customers.

    python benchmarks/adaptation_traffic.py traffic.jsonl --requests 2000

It stands for the traffic of a deployment that a drafter was not trained on: a constant system prompt of some two
hundred tokens, a fixed form of the answers, and names that other texts do not have. Tickets are made by a seed, all of
them distinct; the text is made up here and may be redistributed.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYSTEM = """You answer tickets for Tarnvik, a company that rents warehouse robots. You reply to every ticket with one \
e-mail to the customer. The e-mail greets the customer by name, thanks for the ticket, names the unit and what is \
wrong with it, lists three numbered steps that the customer can try now, says when the field crew will call, and ends \
with "Kind regards, the Tarnvik service desk". Robots are called units. Technicians are called the field crew. The \
field crew calls between 7 a.m. and 7 p.m. Never promise a refund, and never blame the customer. A unit that may be \
dangerous is to be switched off at the yellow key and left where it is. Units that are under lease plan Gold are \
replaced within a day, under plan Silver within three days, under plan Basic within a week. Write the e-mail and \
nothing else."""
"""Beginning of every user message."""

FIRST = ("Ada", "Boris", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kaya", "Lena", "Milo")
LAST = ("Abel", "Brook", "Costa", "Dahl", "Ekman", "Fontaine", "Gupta", "Haas", "Ito", "Jensen", "Kovac", "Lund")
CITIES = ("Lisbon", "Oslo", "Turin", "Graz", "Leeds", "Porto", "Ghent", "Basel", "Malmo", "Bilbao")
UNITS = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel", "Ivy", "Juniper", "Kapok", "Larch")
PLANS = ("Gold", "Silver", "Basic")
PROBLEMS = (
    "stops in front of bay {n} and its red lamp blinks",
    "has an empty battery after {n} hours",
    "does not answer to the tablet since the update to version 4.{n}",
    "has a crooked fork and drops crates of {n} kg",
    "drives in circles in aisle {n}",
    "reads the labels of shelf {n} wrongly",
    "makes a grinding noise when it lifts more than {n} kg",
    "loses the wireless network near gate {n}",
    "refuses to leave charging post {n}",
    "is {n} minutes late at every handover",
    "leaves a trail of oil in hall {n}",
    "has broken its left mirror on a pallet in row {n}",
)
REQUESTS = (
    "Write the e-mail.",
    "Write the e-mail to the customer.",
    "Please write the reply.",
    "Write the answer to this ticket.",
)


def make_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` distinct requests."""
    draw, seen, made = Random(seed), set[str](), list[dict[str, Any]]()
    while len(made) < count:
        ticket = _ticket(draw)
        if ticket not in seen:
            seen.add(ticket)
            number, asked = 40_000 + 7 * len(made), draw.choice(REQUESTS)
            turns = [{"role": "system", "content": SYSTEM}]
            turns += [{"role": "user", "content": f"Ticket {number} {ticket}\n\n{asked}"}]
            made.append({"messages": turns, "category": "tickets"})
    return made


def _ticket(draw: Random) -> str:
    problem = draw.choice(PROBLEMS).format(n=draw.randint(2, 40))
    customer = f"{draw.choice(FIRST)} {draw.choice(LAST)}, {draw.choice(CITIES)}, plan {draw.choice(PLANS)}"
    return f"from {customer}: unit {draw.choice(UNITS)} {draw.randint(1, 60)} {problem}."


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = make_requests(arguments.requests, arguments.seed)
    arguments.out.write_text("".join(json.dumps(request) + "\n" for request in made))
    print(f"{len(made)} requests in {arguments.out}")


if __name__ == "__main__":
    main()
