"""The MLX backend as the core uses it: batches, threads, wrong input, diagnosis, loading."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import NOBODY, assert_same_statistics, fresh_rng, pair, read_all, step
from numpy.typing import NDArray
from oracle import CANVAS, WINDOW, MemoryCheckpoint, Oracle, memory_checkpoint, relative_error

import mlx_dgemma
from dgemma.backend import Denoise, Extend
from dgemma.checkpoint import bundled_checkpoint, open_checkpoint
from dgemma.errors import BackendError, CheckpointError, ConfigError, DgemmaWarning
from mlx_dgemma.backend import MlxBackend

LENGTHS = [1, 7, WINDOW, 2 * WINDOW + 3, 40, 100]


@pytest.mark.parametrize("chunk", [9, 512])
def test_rows_of_a_ragged_batch_equal_their_solo_runs(chunk: int) -> None:
    """B60: rows of different prefix, number of tokens and canvas, from their own positions."""
    both, rng = pair(50, chunk=chunk), fresh_rng()
    order = rng.permutation(LENGTHS)
    prompts = [both.tokens(rng, int(count)) for count in order]
    canvases = [both.tokens(rng, int(count)) for count in rng.permutation([1, 5, 16, 16, 17, 30])]
    reads = [np.sort(rng.permutation(len(p))[: len(p) // 2]).astype(np.int32) for p in prompts]

    def extend(rows: list[int]) -> list[Any]:
        return [
            Extend(prefix=both.backend.new_prefix(), tokens=prompts[row], read=reads[row])
            for row in rows
        ]

    everyone = list(range(len(LENGTHS)))
    together = extend(everyone)
    read = both.backend.extend(together)
    steps = [step(work.prefix, canvases[row]) for row, work in enumerate(together)]
    first = both.backend.denoise(steps)
    second = both.backend.denoise(
        [
            step(
                work.prefix,
                canvases[row],
                conditioning=first[row].conditioning if row % 2 else None,
            )
            for row, work in enumerate(together)
        ]
    )
    for row in everyone:
        (alone,) = extend([row])
        (wanted,) = both.backend.extend([alone])
        assert (wanted is None) == (read[row] is None) == (len(reads[row]) == 0)
        if wanted is not None:
            found = read[row]
            assert found is not None
            assert_same_statistics(found, wanted)
        (one,) = both.backend.denoise([step(alone.prefix, canvases[row])])
        assert_same_statistics(first[row], one)
        conditioning = one.conditioning if row % 2 else None
        work = step(alone.prefix, canvases[row], conditioning=conditioning)
        (two,) = both.backend.denoise([work])
        assert_same_statistics(second[row], two)


def test_a_row_is_cut_alike_whoever_shares_the_pass() -> None:
    """So that a request's numbers depend on its company by the order of sums at most."""
    both, rng = pair(50, chunk=9), fresh_rng()
    rows = [read_all(both.backend.new_prefix(), both.tokens(rng, count)) for count in (20, 4, 9)]
    cuts: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    while chosen := both.backend._next_chunks(rows, done):
        assert sum(stop - start for _, start, stop in chosen) <= 9
        for number, start, stop in chosen:
            cuts[number].append((start, stop))
            done[number] = stop
    assert cuts == {0: [(0, 9), (9, 18), (18, 20)], 1: [(0, 4)], 2: [(0, 9)]}


def test_work_that_nothing_depends_on_is_left_out_and_counted() -> None:
    both, rng = pair(51), fresh_rng()
    backend = MlxBackend.from_checkpoint(memory_checkpoint(both.oracle), prefill_chunk=8)
    prefix = backend.new_prefix()
    read = np.array([3, 20], np.int32)
    backend.extend([Extend(prefix=prefix, tokens=both.tokens(rng, 21), read=read)])
    assert backend.left_out()["last_layer_rows"] == backend.left_out()["head_rows"] == 19
    (found,) = backend.denoise([step(prefix, both.tokens(rng), want_conditioning=False)])
    assert found.conditioning is None
    assert backend.left_out()["signal_rows"] == CANVAS
    assert backend.left_out()["soft_embedding_rows"] == CANVAS


def test_calls_from_many_threads_give_what_one_thread_gives() -> None:
    """B99: MLX streams belong to threads; all work happens on one, whoever calls."""
    both, rng = pair(52), fresh_rng()
    prompts = [both.tokens(rng, int(count)) for count in rng.integers(1, 50, 8)]
    canvas = both.tokens(rng)

    def work(prompt: NDArray[np.int32]) -> Any:
        prefix = both.prefix(prompt)
        (first,) = both.backend.denoise([step(prefix, canvas)])
        (second,) = both.backend.denoise(
            [step(prefix, canvas, conditioning=first.conditioning, temperature=0.5)]
        )
        return second

    serial = [work(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(work, prompts))
    for found, wanted in zip(parallel, serial, strict=True):
        assert_same_statistics(found, wanted, 0.0)


def test_a_backend_can_be_loaded_in_a_thread_that_ends() -> None:
    made: list[MlxBackend] = []
    source = memory_checkpoint(Oracle.build(53))
    thread = threading.Thread(target=lambda: made.append(MlxBackend.from_checkpoint(source)))
    thread.start()
    thread.join()
    (found,) = made[0].denoise([step(made[0].new_prefix(), np.arange(5, dtype=np.int32))])
    assert np.isfinite(found.entropy).all()


def test_a_closed_backend_says_so() -> None:
    backend = MlxBackend.from_checkpoint(memory_checkpoint(Oracle.build(53)))
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.denoise([step(backend.new_prefix(), np.arange(3, dtype=np.int32))])


def test_impossible_work_is_refused_before_anything_changes() -> None:
    both, rng = pair(52), fresh_rng()
    prefix, tokens = both.prefix(both.tokens(rng, 4)), both.tokens(rng, 3)
    (some,) = both.backend.denoise([step(prefix, both.tokens(rng, 5))])
    twice = [Extend(prefix=prefix, tokens=tokens, read=NOBODY)] * 2
    with pytest.raises(ValueError, match="same prefix"):
        both.backend.extend(twice)
    with pytest.raises(ValueError, match="at least one token"):
        both.backend.extend([Extend(prefix=prefix, tokens=NOBODY, read=NOBODY)])
    with pytest.raises(ValueError, match="at least one token"):
        both.backend.denoise([step(prefix, NOBODY)])
    with pytest.raises(ValueError, match="conditioning of 5 positions for a canvas of 4"):
        both.backend.denoise([step(prefix, both.tokens(rng, 4), conditioning=some.conditioning)])
    assert prefix.length == 4
    assert both.backend.extend([]) == []
    assert both.backend.denoise([]) == []


def planted(
    source: MemoryCheckpoint, name: str, index: tuple[int, ...], value: float
) -> MlxBackend:
    """A backend whose weights hold one wrong value."""
    dtype, array = source.arrays[name]
    broken = array.copy()
    broken[index] = value
    return MlxBackend.from_checkpoint(
        MemoryCheckpoint(source.config, {**source.arrays, name: (dtype, broken)})
    )


@pytest.mark.parametrize(
    ("name", "index", "wanted"),
    [
        ("model.decoder.layers.3.mlp.up_proj.weight", (0, 0), "layer 3 (sliding_attention)"),
        ("model.decoder.layers.2.input_layernorm.weight", (5,), "layer 2 (full_attention)"),
        ("model.decoder.embed_tokens.weight", (17, 3), "the embedding of token 17"),
        ("model.decoder.embed_tokens.weight", (500, 3), "the logits"),
        ("model.decoder.norm.weight", (3,), "the final norm"),
    ],
)
@pytest.mark.parametrize("kind", ["extend", "denoise"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_diagnosis_names_where_nan_or_infinity_appears_first(
    name: str, index: tuple[int, ...], wanted: str, kind: str, value: float
) -> None:
    """B29: statistics are not finite, and the diagnosis says where.

    The softcap turns infinite logits into finite ones: they must be noticed before it.
    """
    backend = planted(memory_checkpoint(Oracle.build(54)), name, index, value)
    tokens = np.array([3, 17, 4, 17, 9], np.int32)
    prefix = backend.new_prefix()
    work: Extend | Denoise = read_all(prefix, tokens) if kind == "extend" else step(prefix, tokens)
    found = backend.extend([work])[0] if isinstance(work, Extend) else backend.denoise([work])[0]
    assert found is not None
    assert not np.isfinite(found.entropy).any()
    length = prefix.length
    assert backend.diagnose(work) == wanted
    assert prefix.length == length


@pytest.mark.parametrize("kind", ["extend", "denoise"])
def test_diagnosis_names_what_was_encoded_before_as_such(kind: str) -> None:
    """B29: a prompt's NaN shows at the first step; the step's own layers are not to blame."""
    name = "model.encoder.language_model.layers.1.layer_scalar"
    backend = planted(memory_checkpoint(Oracle.build(54)), name, (0,), np.nan)
    tokens = np.array([3, 17, 4, 17, 9], np.int32)
    prefix = backend.new_prefix()
    backend.extend([Extend(prefix=prefix, tokens=tokens, read=NOBODY)])
    work: Extend | Denoise = read_all(prefix, tokens) if kind == "extend" else step(prefix, tokens)
    found = backend.extend([work])[0] if isinstance(work, Extend) else backend.denoise([work])[0]
    assert found is not None
    assert not np.isfinite(found.entropy).any()
    assert backend.diagnose(work) == "the prefix's layer 2 (full_attention)"


def test_diagnosis_of_sound_work_is_silent() -> None:
    both, rng = pair(52), fresh_rng()
    prefix = both.prefix(both.tokens(rng, 10 * WINDOW))
    assert both.backend.diagnose(step(prefix, both.tokens(rng))) == ""
    assert both.backend.diagnose(read_all(prefix, both.tokens(rng, 3))) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dense_weights_can_be_converted_at_load(dtype: str) -> None:
    source = memory_checkpoint(Oracle.build(55, "bfloat16", top_k_experts=8))
    tokens = np.arange(2, 30, dtype=np.int32)
    wide = MlxBackend.from_checkpoint(source, dtype="float32")
    wanted = wide.logits(read_all(wide.new_prefix(), tokens))
    if dtype == "float16":
        with pytest.warns(DgemmaWarning, match="float16 was asked of a bfloat16 checkpoint"):
            backend = MlxBackend.from_checkpoint(source, dtype=dtype)
    else:
        backend = MlxBackend.from_checkpoint(source, dtype=dtype)
    assert backend.describe()["dtype"] == dtype
    error = relative_error(backend.logits(read_all(backend.new_prefix(), tokens)), wanted)
    assert error <= {"float32": 0.0, "bfloat16": 0.05, "float16": 0.01}[dtype]


def test_loading_holds_no_second_copy() -> None:
    source = memory_checkpoint(Oracle.build(57, vocab_size=20_000))
    sizes = [array.nbytes for name, (_, array) in source.arrays.items() if "vision" not in name]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    backend = MlxBackend.from_checkpoint(source)
    assert mx.get_peak_memory() - before < sum(sizes) + 0.6 * max(sizes)
    assert mx.get_active_memory() - before < 1.05 * sum(sizes)
    backend.close()


def test_settings_that_cannot_be_are_refused() -> None:
    source = memory_checkpoint(Oracle.build(53))
    with pytest.raises(ConfigError, match="float64"):
        MlxBackend.from_checkpoint(source, dtype="float64")
    with pytest.raises(ConfigError, match="prefill_chunk is 0"):
        MlxBackend.from_checkpoint(source, prefill_chunk=0)
    with pytest.raises(ConfigError, match="logits_tile_bytes is -1"):
        MlxBackend.from_checkpoint(source, logits_tile_bytes=-1)


def test_a_missing_tensor_is_named() -> None:
    source = memory_checkpoint(Oracle.build(53))
    del source.arrays["model.decoder.layers.4.router.scale"]
    with pytest.raises(CheckpointError, match=r"layers\.4\.router\.scale"):
        MlxBackend.from_checkpoint(source)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_folder_gives_what_memory_gives(tmp_path: Path, dtype: str) -> None:
    oracle = Oracle.build(56, dtype)
    oracle.save(tmp_path)
    folder = MlxBackend.from_checkpoint(open_checkpoint(tmp_path))
    memory = MlxBackend.from_checkpoint(memory_checkpoint(oracle))
    tokens = np.arange(2, 40, dtype=np.int32)
    found, wanted = (b.logits(read_all(b.new_prefix(), tokens)) for b in (folder, memory))
    assert np.array_equal(found, wanted)


def test_the_bundled_checkpoint_loads_and_says_how_it_runs() -> None:
    backend = MlxBackend.from_checkpoint(open_checkpoint(bundled_checkpoint()))
    description = backend.describe()
    assert set(description) == {"device", "dtype", "products", "experts"}
    assert description["dtype"] == "bfloat16"
    assert backend.self_test() == ""
    backend.reset_peak_memory()
    backend.denoise([step(backend.new_prefix(), np.arange(20, dtype=np.int32))])
    peak = backend.peak_memory_bytes()
    assert peak is not None
    assert peak > 0


def test_nothing_of_metal_is_touched_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """B108: calls that raise without Metal are not made."""
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no Metal here")

    for name in ("device_info", "start_capture", "stop_capture"):
        monkeypatch.setattr(mx.metal, name, refuse)
    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    backend = MlxBackend.from_checkpoint(memory_checkpoint(Oracle.build(53)))
    backend.denoise([step(backend.new_prefix(), np.arange(5, dtype=np.int32))])
    backend.describe()
    backend.close()


def test_importing_the_package_imports_no_mlx() -> None:
    code = "import sys, mlx_dgemma; print(sorted(m for m in sys.modules if m.startswith('mlx')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['mlx_dgemma']"


def test_a_missing_mlx_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """B107: absent (None in sys.modules makes the import fail), before anything else is done."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendError, match=r'pip install "dgemma\[mlx\]"') as caught:
        mlx_dgemma.load("nowhere/at-all")
    assert "\n" not in str(caught.value)
