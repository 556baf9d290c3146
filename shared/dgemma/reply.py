"""From events to text to one reply.

    Draft, Commit, Finish  --ReplyBuilder-->  DraftText, Text, ..., Reply

Each layer is a thin loop over the one below; `Model.stream` yields what the builder makes, and
`Model.generate` keeps the last of it.

Not here: tokens to text (`tokenizer.py`), what goes on a screen (`view.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dgemma.backend import Int32
from dgemma.decoders import Commit, Draft, Event, Finish, Mode
from dgemma.layout import FinishReason
from dgemma.options import Plan
from dgemma.text import StopStrings, TextStream, tokens_within
from dgemma.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a reply cost. Times are in seconds from the call, memory in bytes."""

    prompt_tokens: int
    emitted_tokens: int
    """Content and, where one was met, the end token: what the rates count."""
    canvases: int
    steps: int
    """Denoising steps."""
    passes: int
    """All forward passes; the prompt's counts only where it yields a token."""
    tokens_per_forward: float
    """Emitted tokens a step (diffusion, as the reference counts) or a pass (the other modes)."""
    first_draft_s: float | None
    first_text_s: float | None
    total_s: float
    tokens_per_second: float
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """A finished reply; the last thing a stream yields."""

    text: str
    raw_text: str
    """The text with special tokens shown."""
    tokens: list[int]
    """The content: no end token, nothing behind a stop string."""
    finish_reason: FinishReason | Literal["error"]
    seed: int
    mode: Mode
    model: str
    stats: Stats
    error: Exception | None = None
    """Of a reply in a batch that failed alone; `generate` and `stream` raise it instead."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: the keys others may rely on, fewer than `Stats` has."""
        stats = asdict(self.stats)
        del stats["prompt_tokens"], stats["emitted_tokens"], stats["passes"]
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "model": self.model,
            "mode": self.mode,
            "stats": stats,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftText:
    """A canvas after one step, with its text up to the first end token."""

    text: str
    draft: Draft


@dataclass(frozen=True, kw_only=True)
class Text:
    """A piece of final text; the pieces joined are the reply's text."""

    text: str


StreamEvent = DraftText | Text | Reply


class ReplyBuilder:
    """Turns one request's events into stream events and, at the end, a `Reply`."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        stop: StopStrings,
        model: str,
        peak_memory: Callable[[], int | None],
    ) -> None:
        self.plan = plan
        self.finished = False
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._stop = stop
        self._model = model
        self._peak_memory = peak_memory
        self._started = time.perf_counter()
        self._first_draft_s: float | None = None
        self._first_text_s: float | None = None
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._ended = 0
        self._pads = 0  # at the end of what was committed so far
        self._canvases = self._steps = self._passes = 0

    def feed(self, event: Event) -> Iterator[StreamEvent]:
        """What follows from one event; after a `Reply`, `finished` is True and nothing follows."""
        if isinstance(event, Draft):
            if self._first_draft_s is None:
                self._first_draft_s = self._elapsed()
            yield DraftText(text=self._draft_text(event.tokens), draft=event)
        elif isinstance(event, Commit):
            tokens = self._count(event)
            yield from self._emit(self._stop.feed(self._stream.feed(tokens)))
            if self._stop.found:
                yield self._finish("stop")
            elif self._padded_out:
                yield from self._last("stop")
        else:
            assert isinstance(event, Finish)
            yield from self._last(event.reason)

    def _last(self, reason: FinishReason) -> Iterator[StreamEvent]:
        """What was held back, and the reply."""
        yield from self._emit(self._stop.feed(self._stream.finish()))
        yield from self._emit(self._stop.finish())
        yield self._finish("stop" if self._stop.found else reason)

    def fail(self, error: Exception) -> Reply:
        """The reply of a request that failed within a batch: what there is, and why no more."""
        return self._finish("error", error)

    def _count(self, commit: Commit) -> list[int]:
        """Counts what was committed, and returns its tokens as far as the text goes.

        Pads are no text, and no end token either; but a model that writes a canvas's worth of them
        in a row has nothing left to say, where the reference would go on to `max_new_tokens`.
        """
        self._canvases += commit.steps > 0
        self._steps += commit.steps
        self._passes += commit.passes
        tokens = commit.tokens.tolist()
        for index, token in enumerate(tokens):
            self._pads = self._pads + 1 if token == self._tokenizer.pad_id else 0
            if self._padded_out:
                tokens = tokens[:index]
                break
        else:
            self._ended += commit.end_token is not None
        self._tokens += [token for token in tokens if token != self._tokenizer.pad_id]
        return tokens

    @property
    def _padded_out(self) -> bool:
        return self._pads >= self.plan.request.layout.canvas_length

    def _emit(self, text: str) -> Iterator[Text]:
        if text:
            if self._first_text_s is None:
                self._first_text_s = self._elapsed()
            self._pieces.append(text)
            yield Text(text=text)

    def _draft_text(self, tokens: Int32) -> str:
        ends = np.flatnonzero(np.isin(tokens, list(self.plan.request.layout.end_tokens)))
        shown = tokens[: ends[0]] if len(ends) else tokens
        return self._tokenizer.decode(shown.tolist())

    def _finish(
        self, reason: FinishReason | Literal["error"], error: Exception | None = None
    ) -> Reply:
        self.finished = True
        text = "".join(self._pieces)
        tokens, ended = self._tokens, self._ended
        if self._stop.found:  # what lies behind the stop string was not emitted, an end included
            tokens, ended = tokens_within(self._tokenizer, tokens, text), 0
        total = self._elapsed()
        emitted = len(tokens) + ended
        spent = self._steps if self.plan.mode == "diffusion" else self._passes
        return Reply(
            text=text,
            raw_text=self._tokenizer.raw_decode(tokens),
            tokens=tokens,
            finish_reason=reason,
            seed=self.plan.seed,
            mode=self.plan.mode,
            model=self._model,
            stats=Stats(
                prompt_tokens=len(self.plan.request.prompt),
                emitted_tokens=emitted,
                canvases=self._canvases,
                steps=self._steps,
                passes=self._passes,
                tokens_per_forward=emitted / spent if spent else 0.0,
                first_draft_s=self._first_draft_s,
                first_text_s=self._first_text_s,
                total_s=total,
                tokens_per_second=emitted / total if total else 0.0,
                peak_memory_bytes=self._peak_memory(),
            ),
            error=error,
        )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started
