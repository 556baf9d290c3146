"""`dgemma bench`: how fast a checkpoint runs here, and beside a peer.

Not here: the measuring (`dgemma/bench/`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.commands.flags import UsageError, add_model_flags, at_least, default_backend, load_model
from dgemma.terminal import TextOutput, say

if TYPE_CHECKING:
    from dgemma.model import Model

DESCRIPTION = (
    "Measures prefill, one denoising step, the host's share, whole replies and peak memory. A "
    "table, then one JSON object as the last line. With --peer: the same work by another program, "
    "in alternating processes."
)


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    add_model_flags(parser, backend)
    add = parser.add_argument_group("measuring").add_argument
    add(
        "--random",
        choices=("bench", "small"),
        help="measure random weights of this shape instead of a checkpoint; no replies then",
    )
    add("--prompt-tokens", type=at_least(1), default=1024, metavar="N", help="default: 1024")
    add("--rows", type=at_least(1), nargs="+", default=[1], metavar="B", help="canvases at once")
    add("--repeats", type=at_least(1), default=5, metavar="N", help="default: 5")
    add("--prompts", type=Path, metavar="FILE", help="real prompts for whole replies, one a line")
    add("--mode", choices=("diffusion", "autoregressive", "hybrid"), default="diffusion")
    add("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: 256")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--peer", choices=("mlx-vlm",), help="compare with this program instead")
    add("--peer-python", metavar="PATH", help="the interpreter that has the peer installed")
    add("--steps", type=at_least(2), default=8, metavar="N", help="of a compared canvas; default 8")
    add("--out", type=Path, metavar="FILE", help="append the JSON object to this file too")


def run(args: argparse.Namespace) -> int:
    if args.random and args.model:
        raise UsageError("--random and --model exclude each other")
    prompts = _prompts(args.prompts)
    _check_writable(args.out)
    with tempfile.TemporaryDirectory(prefix="dgemma-bench-") as folder:
        if args.random:
            from dgemma.bench.random_checkpoint import SHAPES, write_random_checkpoint

            say(f"writing random weights of shape {args.random!r}")
            args.model = str(
                write_random_checkpoint(
                    Path(folder) / args.random,
                    SHAPES[args.random],
                    dtype=args.dtype or "bfloat16",
                    seed=args.seed,
                )
            )
        lines = _compare(args) if args.peer else _measure(args, prompts)
    out = TextOutput()
    out.write("\n".join(lines))
    out.finish()
    return 0


def _measure(args: argparse.Namespace, prompts: tuple[str, ...]) -> list[str]:
    from dgemma.bench import report

    with closing(load_model(args)) as model:
        say("measuring prefill, steps and the host")
        record: dict[str, Any] = {"command": _command(), "model": model.name}
        record |= report.run_backend(
            model,
            prompt_tokens=_fitting(args.prompt_tokens, model),
            rows=args.rows,
            repeats=args.repeats,
            seed=args.seed,
        )
        lines = [report.table(record["figures"])]
        if not args.random:
            say("measuring whole replies")
            record["replies"] = report.run_replies(
                model,
                prompts or report.default_prompts(model),
                args.repeats,
                mode=args.mode,
                max_new_tokens=args.max_new_tokens,
                seed=args.seed,
            )
            lines.append(report.table(record["replies"]["figures"]))
        for kind, flops in record["left_out_flops"].items():
            lines.append(f"left out, {kind.replace('_', ' ')}: {flops / 1e9:.2f} GFLOP")
        for name in ("peak_memory_bytes", "resident_bytes"):
            if record[name] is not None:
                lines.append(f"{name.removesuffix('_bytes')}: {record[name] / 1e6:.1f} MB")
    return [*lines, report.finish(record, args.out)]


def _compare(args: argparse.Namespace) -> list[str]:
    from dgemma.bench import report
    from dgemma.bench.compare import compare
    from dgemma.hub import resolve_model

    found = compare(
        resolve_model(args.model),
        peer=args.peer,
        backend=args.backend or default_backend(),
        prompt_tokens=args.prompt_tokens,
        steps=args.steps,
        pairs=args.repeats,
        peer_python=args.peer_python,
    )
    record = {"command": _command(), **found.to_dict()}
    return [report.comparison_table(found), report.finish(record, args.out)]


def _fitting(wanted: int, model: Model) -> int:
    """The prompt length, cut so that a canvas fits behind it."""
    room = model.config.max_position_embeddings - model.config.canvas_length
    if wanted > room:
        say(f"a prompt of {wanted} tokens does not fit the context; measuring {room}")
    return min(wanted, room)


def _prompts(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
    lines = tuple(line for line in text.splitlines() if line.strip())
    if not lines:
        raise UsageError(f"{path} holds no prompts")
    return lines


def _check_writable(path: Path | None) -> None:
    """Finds out before the measuring, not after it."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from error


def _command() -> str:
    """The command that repeats this run."""
    return shlex.join(["dgemma", *sys.argv[1:]])
