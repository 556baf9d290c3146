"""`dgemma doctor`: what is installed, which backends run here, what a checkpoint holds.

Not here: the finding out (`dgemma/doctor.py`).
"""

from __future__ import annotations

import argparse
import json

from dgemma.terminal import TextOutput, printable

DESCRIPTION = (
    "Says which versions, devices and backends there are, what a checkpoint holds and how much "
    "memory it needs."
)


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    parser.add_argument(
        "--model", metavar="M", help="a folder or a Hub id; default: the bundled checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from dgemma import doctor

    report = doctor.report(args.model)
    out = TextOutput()
    out.write(json.dumps(report, indent=2) if args.json else printable(doctor.render(report)))
    out.finish()
    return 0
