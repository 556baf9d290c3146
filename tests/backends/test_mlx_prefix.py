"""The MLX backend's prefix: rewinding, forking, what it keeps, and what it costs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import NOBODY, Pair, assert_same_statistics, fresh_rng, pair, read_all, step
from oracle import CANVAS, WINDOW, Oracle, memory_checkpoint, relative_error

from dgemma.backend import Extend
from mlx_dgemma.backend import MlxBackend
from mlx_dgemma.cache import LayerStore

SAME = 1e-5


@pytest.mark.parametrize("length", [3, WINDOW, 4 * WINDOW + 1, 8 * WINDOW + 5])
@pytest.mark.parametrize("back", [1, CANVAS - 1, CANVAS])
def test_rewinding_and_extending_again_equals_a_fresh_prefix(length: int, back: int) -> None:
    """B50: also where the sliding layers have forgotten their beginning."""
    both, rng = pair(20, chunk=9), fresh_rng()
    back = min(back, length)
    tokens, other, canvas = both.tokens(rng, length), both.tokens(rng, 19), both.tokens(rng)
    prefix = both.prefix(tokens)
    prefix.rewind(length - back)
    assert prefix.length == length - back
    found = both.backend.logits(read_all(prefix, other))
    fresh = both.prefix(tokens[: length - back])
    assert relative_error(found, both.backend.logits(read_all(fresh, other))) <= SAME
    wanted = both.backend.logits(step(fresh, canvas))
    assert relative_error(both.backend.logits(step(prefix, canvas)), wanted) <= SAME


def test_a_canvas_can_always_be_rewound() -> None:
    """`earliest_rewind` is at most a canvas back, whatever the pieces the prefix came in."""
    both, rng = pair(20, chunk=9), fresh_rng()
    prefix = both.backend.new_prefix()
    for _ in range(25):
        tokens = both.tokens(rng, int(rng.integers(1, 3 * WINDOW)))
        both.backend.extend([Extend(prefix=prefix, tokens=tokens, read=NOBODY)])
        assert 0 <= prefix.earliest_rewind <= max(0, prefix.length - CANVAS)


def test_rewinding_too_far_or_forward_is_refused_and_changes_nothing() -> None:
    both, rng = pair(20), fresh_rng()
    prefix = both.prefix(both.tokens(rng, 10 * WINDOW))
    earliest = prefix.earliest_rewind
    assert earliest > 0
    for length in (earliest - 1, -1, prefix.length + 1):
        with pytest.raises(ValueError, match=f"cannot rewind to length {length}"):
            prefix.rewind(length)
    assert prefix.length == 10 * WINDOW
    prefix.rewind(earliest)
    assert prefix.length == earliest


def test_an_empty_prefix_can_be_rewound_to_nothing() -> None:
    both, rng = pair(20), fresh_rng()
    prefix = both.prefix(both.tokens(rng, 7))
    prefix.rewind(0)
    assert prefix.length == 0
    canvas = both.tokens(rng)
    wanted = both.backend.logits(step(both.backend.new_prefix(), canvas))
    assert relative_error(both.backend.logits(step(prefix, canvas)), wanted) <= SAME


@pytest.mark.parametrize("length", [5, 5 * WINDOW])
def test_forks_do_not_see_each_others_tokens(length: int) -> None:
    both, rng = pair(21), fresh_rng()
    tokens, canvas = both.tokens(rng, length), both.tokens(rng)
    tails = [both.tokens(rng, 11) for _ in range(3)]
    trunk = both.prefix(tokens)
    branches = [trunk.fork(), trunk, trunk.fork().fork()]
    for branch, tail in zip(branches, tails, strict=True):
        both.backend.extend([Extend(prefix=branch, tokens=tail, read=NOBODY)])
    branches[0].rewind(length)
    both.backend.extend([Extend(prefix=branches[0], tokens=tails[2], read=NOBODY)])
    for branch, tail in zip(branches, (tails[2], tails[1], tails[2]), strict=True):
        assert branch.length == length + 11
        fresh = both.prefix(np.concatenate([tokens, tail]))
        wanted = both.backend.logits(step(fresh, canvas))
        assert relative_error(both.backend.logits(step(branch, canvas)), wanted) <= SAME


def test_denoising_leaves_the_prefix_as_it_was() -> None:
    both, rng = pair(21), fresh_rng()
    prefix = both.prefix(both.tokens(rng, 30))
    before = [(store.keys, store.values, store.start, store.length) for store in prefix.layers]
    both.backend.denoise([step(prefix, both.tokens(rng))])
    after = [(store.keys, store.values, store.start, store.length) for store in prefix.layers]
    assert prefix.length == 30
    assert all(
        old is new
        for pair_ in zip(before, after, strict=True)
        for old, new in zip(*pair_, strict=True)
    )


def test_sliding_layers_stop_growing_and_full_layers_do_not() -> None:
    both, rng = pair(21), fresh_rng()
    short, long = (both.prefix(both.tokens(rng, count)) for count in (600, 2400))
    per_layer = [(a.bytes, b.bytes) for a, b in zip(short.layers, long.layers, strict=True)]
    for layer, (before, after) in zip(both.backend.config.layers, per_layer, strict=True):
        assert (after == before) if layer.is_sliding else (after > before)
    assert long.bytes == sum(after for _, after in per_layer)


def test_stored_keys_equal_a_plain_list_under_random_appends_and_rewinds() -> None:
    """The store alone, against the obvious implementation."""
    rng = fresh_rng()
    for keep in (None, 5, 13):
        store, plain = LayerStore(keep), np.empty((2, 0, 3), np.float32)
        for _ in range(60):
            new = rng.standard_normal((2, int(rng.integers(1, 20)), 3)).astype(np.float32)
            start = store.start
            store.append(mx.array(new), mx.array(-new))
            plain = np.concatenate([plain, new], axis=1)
            assert store.length == plain.shape[1]
            # No more is forgotten than what lies `keep` before the end.
            assert store.start <= max(start, 0 if keep is None else store.length - keep)
            keys, values = store.view(store.start, store.length)
            assert np.array_equal(np.array(keys), plain[:, store.start :])
            assert np.array_equal(np.array(values), -plain[:, store.start :])
            if rng.random() < 0.3:
                length = int(rng.integers(store.start, store.length + 1))
                store.rewind(length)
                plain = plain[:, :length]


class _Roomy:
    """A backend whose prefixes are large against everything else, to see copies of them."""

    def __init__(self, chunk: int = 256) -> None:
        kinds = ["sliding_attention", "full_attention"]
        oracle = Oracle.build(
            22,
            vocab_size=64,
            head_dim=64,
            global_head_dim=64,
            num_hidden_layers=2,
            layer_types=kinds,
        )
        backend = MlxBackend.from_checkpoint(memory_checkpoint(oracle), prefill_chunk=chunk)
        self.both = Pair(oracle, backend)

    def growth(self, prefix_tokens: int) -> tuple[int, int, int]:
        """Bytes that a one-token canvas, and one more token, need above what is held; and the
        bytes of the smallest full layer's keys."""
        both, rng = self.both, fresh_rng()
        prefix = both.prefix(both.tokens(rng, prefix_tokens))
        canvas, token = both.tokens(rng, 1), both.tokens(rng, 1)
        results: list[int] = []
        for work in (
            lambda: both.backend.denoise([step(prefix, canvas)]),
            lambda: both.backend.extend([Extend(prefix=prefix, tokens=token, read=NOBODY)]),
        ):
            held = mx.get_active_memory()
            both.backend.reset_peak_memory()
            work()
            peak = both.backend.peak_memory_bytes()
            assert peak is not None
            results.append(peak - held)
        keys = prefix.layers[1].keys
        assert keys is not None
        return results[0], results[1], keys.nbytes


def test_neither_a_step_nor_an_append_copies_the_prefix() -> None:
    step_bytes, append_bytes, layer_bytes = _Roomy().growth(4000)
    assert step_bytes < layer_bytes / 2
    assert append_bytes < layer_bytes / 2


def test_prefill_memory_grows_with_the_prompt_only_as_the_prefix_does() -> None:
    """B54: a dense mask would be 4,096 x 4,096; one chunk's share of it is 32 x 4,096."""
    both, rng = _Roomy(chunk=32).both, fresh_rng()
    peaks: list[int] = []
    sizes: list[int] = []
    for count in (1024, 4096):
        both.backend.reset_peak_memory()
        held = mx.get_active_memory()
        prefix = both.prefix(both.tokens(rng, count))
        peak = both.backend.peak_memory_bytes()
        assert peak is not None
        peaks.append(peak - held)
        sizes.append(prefix.bytes)
        del prefix
    scores = 4 * 32 * 4 * 4096  # float32, 4 heads, one tile
    assert peaks[1] - peaks[0] < 2 * (sizes[1] - sizes[0]) + 3 * scores < 4096 * 4096


def test_statistics_of_a_rewound_prefix_equal_those_before() -> None:
    both, rng = pair(23), fresh_rng()
    tokens, draft, canvas = both.tokens(rng, 40), both.tokens(rng), both.tokens(rng)
    prefix = both.prefix(tokens)
    (before,) = both.backend.denoise([step(prefix, canvas)])
    both.backend.extend([Extend(prefix=prefix, tokens=draft, read=NOBODY)])
    prefix.rewind(40)
    (after,) = both.backend.denoise([step(prefix, canvas)])
    assert_same_statistics(after, before)
