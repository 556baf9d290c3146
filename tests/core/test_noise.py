"""Randomness: counter-based, and depending on nothing but (seed, row, block, step, purpose)."""

import numpy as np
import pytest

from dgemma.noise import Noise


def draws(noise: Noise) -> list[np.ndarray]:
    return [
        noise.canvas(0, 33),
        noise.uniforms(0, 0, 33),
        noise.renoise(0, 0, 33),
        noise.token_uniforms(0, 33),
    ]


def test_the_same_seed_gives_the_same_numbers_whatever_was_drawn_before():
    first, second = Noise(7, vocab_size=1000), Noise(7, vocab_size=1000)
    second.uniforms(5, 3, 17)
    second.canvas(1, 255)
    second.token_uniforms(1000, 3)
    for a, b in zip(draws(first), draws(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "other", [Noise(8, vocab_size=1000), Noise(7, vocab_size=1000, row=1)], ids=["seed", "row"]
)
def test_another_seed_or_row_gives_other_numbers(other):
    for a, b in zip(draws(Noise(7, vocab_size=1000)), draws(other), strict=True):
        assert (a != b).mean() > 0.9


def test_blocks_steps_and_purposes_do_not_share_numbers():
    noise = Noise(7, vocab_size=2**31 - 1)
    seen = [
        noise.uniforms(block, step, 16).tobytes() for block in range(3) for step in range(3)
    ] + [noise.token_uniforms(0, 16).tobytes()]
    assert len(set(seen)) == len(seen)
    tokens = [noise.canvas(block, 16).tobytes() for block in range(3)]
    tokens += [noise.renoise(block, step, 16).tobytes() for block in range(3) for step in range(3)]
    assert len(set(tokens)) == len(tokens)


def test_numbers_are_numpys_philox_words_at_the_documented_counter():
    words = np.random.Philox(key=[11, 2], counter=[0, 4, 9, 1]).random_raw(5)
    expected = [(int(word) >> 11) / 2**53 for word in words]
    assert Noise(11, vocab_size=10, row=2).uniforms(4, 9, 5).tolist() == expected


def test_large_seeds_that_differ_in_the_last_bit_differ():
    a, b = Noise(2**63, vocab_size=99), Noise(2**63 + 1, vocab_size=99)
    assert (a.uniforms(0, 0, 64) != b.uniforms(0, 0, 64)).all()


def test_a_longer_canvas_begins_like_a_shorter_one():
    noise = Noise(1, vocab_size=50)
    np.testing.assert_array_equal(noise.canvas(2, 257)[:63], noise.canvas(2, 63))


@pytest.mark.parametrize("start", [0, 1, 255, 256, 511])
@pytest.mark.parametrize("count", [0, 1, 2, 257, 600])
def test_token_uniforms_are_indexed_by_position_and_cross_chunks(start, count):
    whole = Noise(3, vocab_size=5).token_uniforms(0, 1200)
    np.testing.assert_array_equal(
        Noise(3, vocab_size=5).token_uniforms(start, count), whole[start : start + count]
    )


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 5, 10**30])
def test_any_integer_is_a_seed_taken_modulo_two_to_the_64(seed):
    """B101: negative and huge seeds follow a stated rule."""
    np.testing.assert_array_equal(
        Noise(seed, vocab_size=99).canvas(0, 20), Noise(seed % 2**64, vocab_size=99).canvas(0, 20)
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 1024, 262_144])
def test_tokens_stay_in_the_vocabulary_even_at_the_largest_uniform(vocabulary):
    assert int((1 - 2.0**-53) * vocabulary) < vocabulary
    tokens = Noise(0, vocab_size=vocabulary).canvas(0, 4096)
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary


def test_tokens_and_uniforms_are_uniform():
    noise = Noise(12345, vocab_size=16)
    counts = np.bincount(noise.canvas(0, 64_000), minlength=16)
    # 64,000 draws over 16 bins: chi-square with 15 degrees of freedom, far below its 1e-6 tail.
    assert ((counts - 4000) ** 2 / 4000).sum() < 60
    uniforms = noise.uniforms(0, 0, 100_000)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert abs(uniforms.mean() - 0.5) < 0.005
