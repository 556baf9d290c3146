"""`dgemma doctor`: what is installed, which backends run here, what a checkpoint holds.

Not here: the finding out (`dgemma/doctor.py`).
"""

from __future__ import annotations

import argparse
import json

from dgemma.terminal import TextOutput, printable, say

DESCRIPTION = (
    "Says which versions, devices and backends there are, what a checkpoint holds, how much memory "
    "it needs, and what was ever fetched from the network. Fetches nothing."
)


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    add = parser.add_argument
    add("--model", metavar="M", help="a folder or a Hub id; default: the bundled checkpoint")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; fails, after it, where the checkpoint cannot be opened."""
    from dgemma import doctor

    report = doctor.report(args.model, revision=args.revision)
    out = TextOutput()
    out.write(json.dumps(report) if args.json else printable(doctor.render(report)))
    out.finish()
    error = report["checkpoint"].get("error")
    if error is not None:
        say(f"error: {error}")
    return 0 if error is None else 1
