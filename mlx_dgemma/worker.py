"""One thread that owns every MLX operation of a backend.

MLX's streams belong to the thread that made them (mlx >= 0.31.2), so work that is started from
several threads meets "There is no Stream in current thread". Here callers of any thread hand their
work to one owner thread and wait for it; loading the weights is such work too.

Not here: what is run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dgemma.errors import BackendError

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Runs functions one at a time, in the order they came, always on the same thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False
        self._thread: threading.Thread = self._pool.submit(threading.current_thread).result()

    @property
    def thread(self) -> threading.Thread:
        """The thread everything runs on."""
        return self._thread

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns `function(*args, **kwargs)`, run on the owner thread.

        What it raises is raised here. Work that is already on the owner thread runs at once, so
        that one piece of work may be written in terms of another. Raises `BackendError` after
        `close`.
        """
        if self._closed:
            raise BackendError("the backend is closed; load the model again to use it")
        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        future = self._pool.submit(function, *args, **kwargs)
        try:
            return future.result()
        except BaseException:
            # A caller who stops waiting (Ctrl-C) no longer wants work that has not begun.
            future.cancel()
            raise

    def close(self) -> None:
        """Lets the work under way finish and ends the thread. Closing twice is harmless."""
        self._closed = True
        self._pool.shutdown(wait=threading.current_thread() is not self._thread)
