"""transformers' own network behind our seam: separates a fault of the core from a backend's."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache

from dgemma.backend import Backend, Denoise, Extend, Statistics
from dgemma.config import ModelConfig
from dgemma.testing import statistics_of


class TorchPrefix:
    """A prefix that is its tokens; the oracle encodes them anew at each pass."""

    bytes = 0
    earliest_rewind = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def fork(self) -> "TorchPrefix":
        copy = TorchPrefix()
        copy.tokens = list(self.tokens)
        return copy


class TorchBackend(Backend):
    """Slow and obvious: the reference model with a dynamic cache, one row at a time."""

    name = "torch-oracle"

    def __init__(self, model, config: ModelConfig) -> None:
        self.model = model.eval()
        self.config = config

    def new_prefix(self) -> TorchPrefix:
        return TorchPrefix()

    @torch.no_grad()
    def extend(self, rows: Sequence[Extend]) -> list[Statistics | None]:
        results: list[Statistics | None] = []
        for row in rows:
            start = row.prefix.length
            row.prefix.tokens += row.tokens.tolist()
            if not len(row.read):
                results.append(None)
                continue
            hidden = self.model.model.encoder(
                input_ids=torch.tensor([row.prefix.tokens]), cache=self._cache()
            ).last_hidden_state[0, start:]
            logits = self._softcapped(self.model.lm_head(hidden[row.read.tolist()]))
            uniforms = np.full(len(row.read), 0.5) if row.uniforms is None else row.uniforms
            results.append(
                statistics_of(logits.numpy(), row.temperature, uniforms, row.targets, row.top_k)
            )
        return results

    @torch.no_grad()
    def denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        results = []
        for row in rows:
            cache = self._cache()
            self.model.model.encoder(input_ids=torch.tensor([row.prefix.tokens]), cache=cache)
            logits = self.model(
                decoder_input_ids=torch.from_numpy(row.canvas)[None].long(),
                cache=cache,
                self_conditioning_logits=row.conditioning,
            ).logits[0]
            found = statistics_of(logits.numpy(), row.temperature, row.uniforms, None, row.top_k)
            dtype = self.model.dtype
            shaped = (logits / np.float32(row.temperature)).to(dtype)[None]
            object.__setattr__(found, "conditioning", shaped)
            results.append(found)
        return results

    def _cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _softcapped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits.float() / cap) * cap
