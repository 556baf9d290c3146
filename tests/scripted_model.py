"""A whole model that says what a test wants: FakeBackend, the bundled tokenizer and template."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import dgemma
from dgemma.chat import ChatTemplate
from dgemma.model import Model
from dgemma.testing import FakeBackend, certain, tiny_config
from dgemma.tokenizer import Tokenizer

TINY = Path(dgemma.__file__).parent / "tiny"
END = 1


class ScriptedModel(Model):
    """Writes `answer` to every prompt, canvas by canvas; remembers prompts, options and loading.

    `delay_s` is slept at every pass over a canvas; `fail_at` is the canvas whose logits are NaN.
    """

    def __init__(
        self,
        answer: str,
        *,
        canvas_length: int = 16,
        context: int = 4096,
        delay_s: float = 0.0,
        fail_at: int | None = None,
    ) -> None:
        tokenizer = Tokenizer.from_folder(TINY)
        self._tokens = [*tokenizer.encode(answer), END]
        self._delay_s = delay_s
        self._fail_at = fail_at
        self.prompts: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.loaded_with: dict[str, Any] | None = None
        self.closed = False
        config = tiny_config(
            vocab_size=1024,
            canvas_length=canvas_length,
            max_position_embeddings=context,
            eos_token_ids=(END, 6),
        )
        backend = FakeBackend(config, canvas=self._logits)
        super().__init__(
            backend, tokenizer, template=ChatTemplate.from_folder(TINY), name="scripted"
        )

    def stream(self, prompt: Any, **options: Any) -> Any:
        tokens = self.encode(prompt, raw=options.get("raw", False))
        self.prompts.append(self.tokenizer.raw_decode(tokens))
        self.options.append(options)
        return super().stream(prompt, **options)

    def close(self) -> None:
        self.closed = True

    def _logits(self, prefix: tuple[int, ...], canvas: np.ndarray) -> np.ndarray:
        time.sleep(self._delay_s)
        length = len(canvas)
        written = length * (len(self._tokens) // length)
        while written and prefix[-written:] != tuple(self._tokens[:written]):
            written -= length
        if self._fail_at == written // length:
            return np.full((length, self.config.vocab_size), np.nan, dtype=np.float32)
        tokens = [*self._tokens[written:], *[0] * length][:length]
        return certain(tokens, self.config.vocab_size)


def install(model: ScriptedModel) -> ScriptedModel:
    """Makes the model what `mlx_dgemma.load()` returns in this process."""

    def load(**settings: Any) -> ScriptedModel:
        model.loaded_with = settings
        return model

    sys.modules["mlx_dgemma"] = SimpleNamespace(load=load)  # type: ignore[assignment]
    return model
