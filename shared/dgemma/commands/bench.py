"""`dgemma bench`: what a pass, a reply and the host cost on this machine; one JSON object last.

Not here: the measuring (`dgemma/bench/`).
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.commands.flags import UsageError, add_model_flags, at_least, backend_of, load_model
from dgemma.terminal import OutputError, TextOutput, printable

if TYPE_CHECKING:
    from dgemma.options import Options

DESCRIPTION = (
    "Measures prefill, denoising steps, the host's share, whole replies and memory; or, with "
    "--against, the same work side by side with a peer. The last line is one JSON object."
)
_PEER_FLAGS = ("peer_python", "steps", "pairs")


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    add_model_flags(parser, backend)
    add = parser.add_argument_group("measuring").add_argument
    add("--prompt-tokens", type=at_least(1), default=1024, metavar="N", help="default: 1024")
    add("--rows", type=at_least(1), nargs="+", default=[1], metavar="B", help="rows of a step")
    add("--repeats", type=at_least(1), default=5, metavar="N", help="default: 5")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--mode", choices=("diffusion", "autoregressive", "hybrid"), help="of the whole replies")
    add("--prompt", action="append", metavar="TEXT", help="of the whole replies; repeatable")
    add("--out", type=Path, metavar="FILE", help="append the JSON object to FILE as well")
    add = parser.add_argument_group("comparing").add_argument
    add("--against", metavar="PEER", choices=("mlx-vlm",), help="a peer: mlx-vlm")
    add("--peer-python", metavar="PATH", help="the interpreter the peer is installed in")
    add("--steps", type=at_least(1), metavar="N", help="fixed steps of the canvas; default: 8")
    add("--pairs", type=at_least(1), metavar="N", help="pairs of runs; default: 3")


def run(args: argparse.Namespace) -> int:
    from dgemma.bench import report

    if not args.against:
        for name in _PEER_FLAGS:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --against")
    _check_writable(args.out)
    text, record = _compare(args) if args.against else _measure(args)
    out = TextOutput()
    out.write(printable(f"{text}\n"))
    out.write(report.finish(record, args.out))
    out.finish()
    return 0


def _measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from dgemma.bench import report

    with closing(load_model(args)) as model:
        passes = report.run_backend(
            model,
            prompt_tokens=args.prompt_tokens,
            rows=args.rows,
            repeats=args.repeats,
            seed=args.seed,
        )
        options: Options = {"seed": args.seed}
        if args.mode is not None:
            options["mode"] = args.mode
        prompts = args.prompt or report.default_prompts(model)
        replies = report.run_replies(model, prompts, args.repeats, **options)
        record = {"model": model.name, "backend": model.backend.name, **passes, "replies": replies}
    return report.table([*passes["figures"], *replies["figures"]]), record


def _compare(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from dgemma.bench import report
    from dgemma.bench.compare import compare
    from dgemma.checkpoint import bundled_checkpoint

    settings: dict[str, Any] = {
        name: getattr(args, name) for name in _PEER_FLAGS if getattr(args, name) is not None
    }
    found = compare(
        Path(args.model) if args.model is not None else bundled_checkpoint(),
        peer=args.against,
        backend=backend_of(args),
        prompt_tokens=args.prompt_tokens,
        **settings,
    )
    return report.comparison_table(found), found.to_dict()


def _check_writable(out: Path | None) -> None:
    """Finds out before the measuring, not after it."""
    if out is None:
        return
    try:
        out.open("a").close()
    except OSError as error:
        raise OutputError(f"cannot write to {out}: {error.strerror}") from error
