"""Runs many decoders at once, step by step, batching what they ask for.

    decoder 1 --Denoise--+                          +--> decoder 1
    decoder 2 --Extend---+--> one backend call      +--> decoder 2     then: everyone's events
    decoder 3 --Denoise--+    a kind of work        +--> decoder 3

Batching is invisible to a decoder, and a request's tokens do not depend on who shares its batch.
Requests join and leave between steps. A failure ends the requests it concerns and no others.

Not here: text, threads, queues with limits (a server's matter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dgemma.backend import Backend, Denoise, Extend, Statistics, Work
from dgemma.decoders import Decoding, Event
from dgemma.errors import NonFiniteError

W = TypeVar("W", Extend, Denoise)


@dataclass(frozen=True, kw_only=True, eq=False)
class Failed:
    """A request that ended with an error instead of a `Finish`."""

    error: Exception


class Ticket:
    """One running request; what `Scheduler.add` returns and its events are tagged with."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.work: Work | None = None  # what it waits for
        self.done = False


class Scheduler:
    """Advances any number of decoders over one backend. Not thread-safe: one thread drives it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._fresh: list[Ticket] = []
        self._running: list[Ticket] = []

    def add(self, decoding: Decoding) -> Ticket:
        """Takes on a decoder; it starts with the next step."""
        ticket = Ticket(decoding)
        self._fresh.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drops a request; it yields no further events."""
        ticket.done = True
        ticket.decoding.close()
        self._fresh = [other for other in self._fresh if other is not ticket]
        self._running = [other for other in self._running if other is not ticket]

    @property
    def idle(self) -> bool:
        """Nothing left to do."""
        return not (self._running or self._fresh)

    def step(self) -> list[tuple[Ticket, Event | Failed]]:
        """Runs everything that is waited for, as one call a kind of work; returns new events."""
        events: list[tuple[Ticket, Event | Failed]] = []
        fresh, self._fresh = self._fresh, []
        for ticket in fresh:
            self._advance(ticket, None, events)
        self._running += fresh
        extends = [(t, t.work) for t in self._running if isinstance(t.work, Extend)]
        denoises = [(t, t.work) for t in self._running if isinstance(t.work, Denoise)]
        if extends:
            self._run(extends, self.backend.extend, events)
        if denoises:
            self._run(denoises, self.backend.denoise, events)
        self._running = [ticket for ticket in self._running if not ticket.done]
        return events

    def run(self, decoding: Decoding) -> Iterator[Event]:
        """A single decoder's events, as they come. Raises what the decoder or backend raises."""
        ticket = self.add(decoding)
        try:
            while not ticket.done:
                for _, event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            self.cancel(ticket)

    def _run(
        self,
        pairs: Sequence[tuple[Ticket, W]],
        call: Callable[[Sequence[W]], Sequence[Statistics | None]],
        events: list[tuple[Ticket, Event | Failed]],
    ) -> None:
        try:
            results = call([work for _, work in pairs])
        except Exception as error:
            for ticket, _ in pairs:
                self._fail(ticket, error, events)
            return
        for (ticket, work), statistics in zip(pairs, results, strict=True):
            try:
                if statistics is not None:
                    check_finite(self.backend, work, statistics)
            except NonFiniteError as error:
                self._fail(ticket, error, events)
            else:
                self._advance(ticket, statistics, events)

    def _advance(
        self,
        ticket: Ticket,
        statistics: Statistics | None,
        events: list[tuple[Ticket, Event | Failed]],
    ) -> None:
        """Sends a result in and collects events up to the next work."""
        ticket.work = None
        answer = statistics
        try:
            while True:
                item = ticket.decoding.send(answer)
                answer = None
                if isinstance(item, (Extend, Denoise)):
                    ticket.work = item
                    return
                events.append((ticket, item))
        except StopIteration:
            ticket.done = True
        except Exception as error:
            self._fail(ticket, error, events)

    def _fail(
        self, ticket: Ticket, error: Exception, events: list[tuple[Ticket, Event | Failed]]
    ) -> None:
        ticket.done = True
        ticket.work = None
        ticket.decoding.close()
        events.append((ticket, Failed(error=error)))


def check_finite(backend: Backend, work: Work, statistics: Statistics) -> None:
    """Raises `NonFiniteError`, naming the work and the place, at the first NaN or infinity.

    Entropy alone is looked at: it is finite only if every logit of the row is.
    """
    # The sum is finite if all are (entropies are at most log V), and one pass costs half of two.
    if math.isfinite(np.add.reduce(statistics.entropy)):
        return
    where = backend.diagnose(work)
    place = f"; it first appears in {where}" if where else ""
    raise NonFiniteError(
        f"NaN or infinity in {work.label or 'a forward pass'}{place}; "
        "the checkpoint is broken, or its dtype too small (float16 overflows: use bfloat16)"
    )
