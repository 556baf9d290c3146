"""Positions, the context limit, and where the text ends."""

import numpy as np
import pytest

from dgemma.config import FULL, SLIDING
from dgemma.errors import ConfigError, ContextLengthError, PromptError
from dgemma.layout import BlockLayout, prefix_tail


def layout(**changes) -> BlockLayout:
    fields = {
        "prompt_length": 10,
        "canvas_length": 32,
        "context_length": 128,
        "max_new_tokens": 1000,
        "end_tokens": frozenset({1, 106}),
    }
    return BlockLayout(**(fields | changes))


def test_canvases_follow_the_prompt_without_a_gap_and_never_pass_the_limit():
    """B49, B59: positions are prompt + k * C + [0, C)."""
    blocks = layout()
    spans = [blocks.span(block) for block in blocks.blocks()]
    assert [span.start for span in spans] == [10, 42, 74]
    assert all(len(span) == 32 and span.stop <= 128 for span in spans)


@pytest.mark.parametrize(("prompt", "canvases"), [(1, 3), (32, 3), (33, 2), (95, 1), (96, 1)])
def test_the_context_is_spent_in_whole_canvases(prompt, canvases):
    """B59: context 128, canvas 32."""
    assert layout(prompt_length=prompt, max_new_tokens=40).capacity == canvases * 32
    assert layout(prompt_length=prompt).num_blocks == canvases


@pytest.mark.parametrize("prompt", [97, 127, 128, 500])
def test_a_prompt_that_leaves_no_canvas_is_refused_with_the_numbers(prompt):
    with pytest.raises(ContextLengthError, match=rf"{prompt}.*128.*32"):
        layout(prompt_length=prompt)


def test_an_autoregressive_decoder_needs_room_for_one_token_only():
    assert layout(prompt_length=127, block_length=1).capacity == 1
    with pytest.raises(ContextLengthError):
        layout(prompt_length=128, block_length=1)


def test_an_empty_prompt_is_refused():
    """B48."""
    with pytest.raises(PromptError, match="empty"):
        layout(prompt_length=0)


@pytest.mark.parametrize("count", [0, -1])
def test_a_reply_of_no_tokens_is_refused(count):
    with pytest.raises(ConfigError, match=f"max_new_tokens is {count}"):
        layout(max_new_tokens=count)


@pytest.mark.parametrize(("wanted", "blocks"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2)])
def test_max_new_tokens_is_exact_though_canvases_are_whole(wanted, blocks):
    shape = layout(max_new_tokens=wanted)
    assert shape.num_blocks == blocks
    emitted = 0
    for _ in shape.blocks():
        cut = shape.cut(np.full(32, 7, np.int32), emitted)
        emitted += len(cut.tokens)
    assert emitted == wanted
    assert cut.finish_reason == "length"


def test_the_first_end_token_wins_and_nothing_behind_it_is_content():
    """B37, B38: pads and noise behind the end are never emitted; pad is no end token."""
    tokens = np.array([9, 0, 9, 9, 9, 106, 0, 0, 1, 5], np.int32)
    cut = layout().cut(tokens, 0)
    assert cut.tokens.tolist() == [9, 0, 9, 9, 9]
    assert cut.end_token == 106
    assert cut.finish_reason == "stop"


def test_an_end_token_at_position_zero_gives_an_empty_reply():
    cut = layout().cut(np.array([1, 5, 5], np.int32), 0)
    assert cut.tokens.tolist() == []
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(("limit", "reason"), [(5, "length"), (6, "stop"), (7, "stop")])
def test_the_end_token_takes_a_place_of_max_new_tokens(limit, reason):
    cut = layout(max_new_tokens=limit).cut(np.array([9] * 5 + [1] + [0] * 26, np.int32), 0)
    assert cut.tokens.tolist() == [9] * 5
    assert cut.finish_reason == reason


def test_text_goes_on_after_a_canvas_without_an_end():
    cut = layout().cut(np.full(32, 9, np.int32), 0)
    assert len(cut.tokens) == 32
    assert cut.finish_reason is None


@pytest.mark.parametrize("prefix", [0, 1, 6, 7, 8, 100])
def test_a_canvas_sees_one_less_than_the_window_in_sliding_layers(prefix):
    assert prefix_tail(SLIDING, prefix, 8) == min(prefix, 7)
    assert prefix_tail(FULL, prefix, 8) == prefix
