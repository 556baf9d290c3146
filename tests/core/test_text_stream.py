"""Text piece by piece: the same text however it comes, and stops found wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import BUILDERS, SPECIALS, wrap

from dgemma.errors import PromptError
from dgemma.text import StopStrings, TextStream, tokens_within

TOKENIZERS = {name: wrap(build()) for name, build in BUILDERS.items()}


def cut(data: st.DataObject, items: list[int] | str) -> list[list[int] | str]:
    """Some partition of `items`, empty pieces included."""
    places = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=8), "cuts"))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.data())
def test_the_pieces_joined_are_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    size = tokenizer.vocab_size
    text = st.text("ab ▁é🙂Ω\ufffd", max_size=8).map(tokenizer.encode)
    noise = st.lists(st.integers(0, size + 2), max_size=6)
    parts = data.draw(st.lists(st.one_of(text, noise), max_size=5), "tokens")
    ids = [token for part in parts for token in part]
    stream = TextStream(tokenizer)
    pieces = [stream.feed(piece) for piece in cut(data, ids)] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    one_by_one = TextStream(tokenizer)
    pieces = [one_by_one.feed([token]) for token in ids] + [one_by_one.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_half_a_character_is_never_shown(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a🙂")
    stream = TextStream(tokenizer)
    assert stream.feed(ids[:1]) == "a"
    assert stream.feed(ids[1:3]) == ""
    assert stream.feed([*ids[3:], *tokenizer.encode("b")]) == "🙂b"
    assert stream.finish() == ""


def test_a_character_that_never_ends_is_shown_at_the_finish() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("a🙂")[:3]
    assert stream.feed(ids) + stream.finish() == tokenizer.decode(ids) == "a\ufffd\ufffd"


def test_text_comes_at_once_where_it_is_final() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    stream = TextStream(tokenizer)
    for character in "a th b\n":
        assert stream.feed(tokenizer.encode(character)) == character


def test_b38_control_tokens_are_not_shown_and_do_not_part_a_character() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.encode("🙂")
    stream = TextStream(tokenizer)
    shown = stream.feed(ids[:2]) + stream.feed([0, SPECIALS.index("<turn|>")])
    assert shown + stream.feed(ids[2:]) + stream.finish() == "🙂"


def test_an_id_the_tokenizer_does_not_have_does_not_part_a_run_of_bytes() -> None:
    """The bytes around it are judged together, and one that is broken breaks them all."""
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [*tokenizer.encode("é"), tokenizer.vocab_size + 5, tokenizer.encode("é")[0]]
    stream = TextStream(tokenizer)
    shown = "".join(stream.feed([token]) for token in ids) + stream.finish()
    assert shown == tokenizer.decode(ids) == "\ufffd" * 3


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.data())
def test_tokens_within_a_text_are_the_longest_beginning_of_it(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    text = st.text("ab é🙂\ufffd", max_size=4).map(tokenizer.encode)
    noise = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3)
    parts = data.draw(st.lists(st.one_of(text, noise), max_size=4), "tokens")
    ids = [token for part in parts for token in part]
    whole = tokenizer.decode(ids)
    within = whole[: data.draw(st.integers(0, len(whole)), "length")]
    fits = [n for n in range(len(ids) + 1) if within.startswith(tokenizer.decode(ids[:n]))]
    assert tokens_within(tokenizer, ids, within) == ids[: max(fits)]


def expected_stop(text: str, stops: list[str]) -> str:
    """The shortest beginning of the text that ends with a stop, without it."""
    for size in range(1, len(text) + 1):
        ends = [len(stop) for stop in stops if stop and text[:size].endswith(stop)]
        if ends:
            return text[: size - max(ends)]
    return text


@given(st.data())
def test_the_stop_that_is_complete_first_counts_however_the_text_is_cut(
    data: st.DataObject,
) -> None:
    text = data.draw(st.text("ab", max_size=12), "text")
    stops = data.draw(st.lists(st.text("ab", max_size=4), max_size=3), "stops")
    finder = StopStrings.from_option(stops, TOKENIZERS["byte fallback"])
    shown = "".join(finder.feed(str(piece)) for piece in cut(data, text))
    shown += finder.finish()
    assert shown == expected_stop(text, stops)
    assert finder.found == any(stop and stop in text for stop in stops)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert finder.feed("one\n") == "one"
    assert finder.feed("\ntwo") == "\n\ntwo"
    assert finder.feed("\n\nUse") == ""
    assert finder.feed("r: x") == ""
    assert finder.found
    assert finder.feed("more") + finder.finish() == ""


@pytest.mark.parametrize("option", ["", [""], [], None, ("", "")])
def test_b102_empty_stops_are_none(option: object) -> None:
    finder = StopStrings.from_option(option, TOKENIZERS["byte fallback"])
    assert (finder.strings, finder.token_ids) == ((), frozenset())
    assert finder.feed("text") == "text"


@pytest.mark.parametrize("option", [[5], 5, b"a", ["a", None], {"a": 1}, [["a"]], True])
def test_b102_stops_that_are_no_text_are_refused(option: object) -> None:
    with pytest.raises(PromptError, match="stop"):
        StopStrings.from_option(option, TOKENIZERS["byte fallback"])


def test_b67_a_stop_that_is_one_control_token_is_its_id() -> None:
    finder = StopStrings.from_option(["<turn|>", "x<turn|>", "th"], TOKENIZERS["byte fallback"])
    assert finder.token_ids == {SPECIALS.index("<turn|>")}
    assert finder.strings == ("x<turn|>", "th")


def test_b69_a_users_own_stop_is_honoured_and_no_other() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    text = "say <end_of_turn> now"
    assert StopStrings.from_option(None, tokenizer).feed(text) == text
    assert StopStrings.from_option("<end_of_turn>", tokenizer).feed(text) == "say "


@pytest.mark.parametrize("pieces", [["xabab"], ["xa", "bab"], list("xabab")])
def test_a_short_stop_inside_a_longer_one_is_complete_first(pieces: list[str]) -> None:
    finder = StopStrings(["abab", "b"])
    assert "".join(map(finder.feed, pieces)) + finder.finish() == "xa"
