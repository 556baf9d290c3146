"""`dgemma generate`: one prompt, one reply.

Not here: the live canvas (`view.py`), exit statuses (`cli.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, cast

from dgemma.commands.flags import (
    add_decoding_flags,
    add_model_flags,
    check_flags,
    load_model,
    options_of,
)
from dgemma.errors import PromptError
from dgemma.terminal import TextOutput, say, standard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from dgemma.model import Model
    from dgemma.reply import Reply, StreamEvent
    from dgemma.view import View

DESCRIPTION = (
    "Writes one reply to a prompt. The text goes to standard output and nothing else does; "
    "progress, warnings and statistics go to standard error."
)


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    parser.add_argument("prompt", help="the question; - reads it from standard input")
    add_model_flags(parser, backend)
    add_decoding_flags(parser)
    add = add_output_flags(parser)
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--raw", action="store_true", help="use the prompt as it is, without the chat template")


def add_output_flags(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Flags of `generate` and `chat` that say what is shown; returns what adds to their group."""
    add = parser.add_argument_group("input and output").add_argument
    add("--watch", action="store_true", help="show the canvas being denoised, on standard error")
    add("--quiet", action="store_true", help="no statistics on standard error")
    return add


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    prompt = read_prompt(args.prompt)
    with closing(load_model(args)) as model:
        options = options_of(args, model.generation)
        if args.raw:
            options["raw"] = True
        reply = show(model.stream(prompt, **options), model, args, text=not args.json)
    if args.json:
        out = TextOutput()
        out.write(json.dumps(reply.to_dict()))
        out.finish()
    report(reply, quiet=args.quiet)
    return 0


def read_prompt(argument: str) -> str:
    """The prompt itself, or standard input for "-". Raises `PromptError` when it is no text."""
    if argument != "-":
        prompt, source = argument, "the prompt"
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding, as Python smuggles them
            raise PromptError("the prompt is not UTF-8 text") from error
    else:
        source = "standard input"
        if standard("stdin") is None:
            raise PromptError("the prompt should come from standard input, which is closed")
        try:
            prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 text (byte {error.start})") from error
    if not prompt.strip():
        raise PromptError(f"{source} is empty; a prompt is needed")
    return prompt


def show(
    events: Iterator[StreamEvent], model: Model, args: argparse.Namespace, *, text: bool
) -> Reply:
    """Shows a stream as it comes (its text only with `text`), and returns the reply at its end.

    Interrupted, it leaves what is final on standard output.
    """
    from dgemma.reply import Reply, Text

    with ExitStack() as stack:
        view = _view(model, args)
        out = TextOutput(hold=view is not None and view.live)
        stack.callback(out.finish)
        if view is not None:
            stack.enter_context(view)
        stack.enter_context(closing(cast("Generator[StreamEvent]", events)))
        reply = None
        for event in events:
            if view is not None:
                view.show(event)
            if isinstance(event, Text) and text:
                out.write(event.text)
            if isinstance(event, Reply):
                reply = event
    assert reply is not None
    return reply


def _view(model: Model, args: argparse.Namespace) -> View | None:
    """What standard error shows of the drafts."""
    from dgemma.view import WaitingView, can_redraw, open_view

    stream = standard("stderr")
    if stream is None:
        return None
    if args.watch:
        return open_view(model.tokenizer, model.end_tokens, stream)
    if not args.quiet and can_redraw(stream):
        return WaitingView(stream)
    return None


def report(reply: Reply, *, quiet: bool) -> None:
    """Says what a reply cost; and, whatever `quiet` says, that an empty one is empty (B111)."""
    if not reply.text.strip():
        say(f"note: the reply is empty (finish_reason: {reply.finish_reason})")
    if quiet:
        return
    stats = reply.stats
    steps = f"{_count(stats.steps, 'step')}, {_count(stats.canvases, 'canvas', 'canvases')}"
    passes = _count(stats.passes, "pass", "passes")
    work = {"diffusion": steps, "autoregressive": passes, "hybrid": f"{steps}, {passes}"}
    say(
        f"{_count(stats.emitted_tokens, 'token')}, {work[reply.mode]}, {stats.total_s:.1f} s, "
        f"{stats.tokens_per_second:.1f} tok/s, {stats.tokens_per_forward:.1f} tokens a forward, "
        f"{reply.mode}, seed {reply.seed}, finish_reason {reply.finish_reason}"
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
