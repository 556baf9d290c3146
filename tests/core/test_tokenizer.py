"""Tokens: text stays text, one BOS, ends from every source."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import BUILDERS, NAMED, SPECIALS, byte_fallback_library, raw, wrap
from tokenizers import AddedToken

import dgemma
from dgemma.chat import ChatTemplate, encode_chat
from dgemma.errors import CheckpointError, DgemmaWarning, PromptError
from dgemma.tokenizer import Tokenizer, end_tokens

TINY = Path(dgemma.__file__).parent / "tiny"

TOKENIZER = wrap(byte_fallback_library())
LIBRARY = byte_fallback_library()
FRAGMENTS = [*SPECIALS, "<", ">", "|", "<|", "|>", "turn", "turn|>", " ", "a", "é", "🙂", "\n", "▁"]
FLAGGED = ["[A]", "[A][B]", "[B]", " ", "  ", "x", "\n"]
spelled_texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


@given(spelled_texts)
def test_b68_no_control_token_comes_out_of_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(TOKENIZER.special_tokens.values())
    assert TOKENIZER.decode(ids) == text.replace("▁", " ")


@given(spelled_texts)
def test_parsing_control_tokens_is_the_librarys(text: str) -> None:
    assert (
        TOKENIZER.encode(text, specials=True) == LIBRARY.encode(text, add_special_tokens=False).ids
    )


@given(
    st.lists(st.sampled_from(FLAGGED), max_size=10).map("".join),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=3, max_size=3),
)
def test_parsing_honours_the_flags_of_a_token(
    text: str, flags: list[tuple[bool, bool, bool]]
) -> None:
    library = byte_fallback_library()
    library.add_special_tokens(
        [
            AddedToken(
                spelled, lstrip=left, rstrip=right, single_word=word, normalized=False, special=True
            )
            for spelled, (left, right, word) in zip(["[A]", "[B]", "[A][B]"], flags, strict=True)
        ]
    )
    expected = library.encode(text, add_special_tokens=False).ids
    assert wrap(library).encode(text, specials=True) == expected


@pytest.mark.parametrize("special", SPECIALS)
def test_b68_a_model_that_looks_whole_words_up_forges_nothing(special: str) -> None:
    tokenizer = wrap(byte_fallback_library(ignore_merges=True))
    ids = tokenizer.encode(f"{special}")
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == special


def test_added_tokens_that_are_not_special_are_text() -> None:
    """B24: a word in the table of added tokens is no control token for that."""
    library = byte_fallback_library()
    library.add_tokens([AddedToken("</s>", special=False, normalized=False)])
    tokenizer = wrap(library)
    (id_,) = tokenizer.encode("</s>")
    assert tokenizer.decode([id_]) == "</s>"
    assert tokenizer.special_id("</s>") is None
    assert id_ not in end_tokens((), (), tokenizer)


def test_b68_a_named_token_is_a_control_token_though_it_is_not_marked_as_special() -> None:
    content = raw(byte_fallback_library())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in ("<turn|>", "<eos>")
    tokenizer = Tokenizer.from_text(json.dumps(content), NAMED)
    assert tokenizer.encode("a<turn|>b", specials=True)[1] == SPECIALS.index("<turn|>")
    assert not {1, 4} & set(tokenizer.encode("a<turn|>b<eos>"))
    assert tokenizer.decode([*tokenizer.encode("a"), 4, 1]) == "a"


def test_b37_a_token_that_ends_and_pads_still_ends() -> None:
    named = {"eos_token": "<eos>", "pad_token": "<eos>", "bos_token": "<bos>"}
    tokenizer = wrap(byte_fallback_library(), named)
    assert tokenizer.pad_id == 1
    assert end_tokens((1, 4), (1,), tokenizer) == (1, 4)


def test_threads_that_parse_and_threads_that_do_not_do_not_disturb_each_other() -> None:
    text = "a <turn|> th <|turn> é"
    expected = {flag: TOKENIZER.encode(text, specials=flag) for flag in (False, True)}
    assert expected[False] != expected[True]
    with ThreadPoolExecutor(4) as pool:
        flags = [bool(index % 2) for index in range(400)]
        results = list(pool.map(lambda flag: TOKENIZER.encode(text, specials=flag), flags))
    assert results == [expected[flag] for flag in flags]


@pytest.mark.parametrize("prompt", ["Hello", "<bos>Hello", "<bos><bos>Hello", ""])
def test_b62_a_raw_prompt_begins_with_one_bos(prompt: str) -> None:
    ids = TOKENIZER.encode_prompt(prompt)
    assert ids[0] == TOKENIZER.bos_id == SPECIALS.index("<bos>")
    assert ids.count(ids[0]) == 1
    assert TOKENIZER.decode(ids) == prompt.replace("<bos>", "")


def test_a_raw_prompt_may_write_turns() -> None:
    ids = TOKENIZER.encode_prompt("<|turn>user\nth<turn|>")
    assert [i for i in ids if i < len(SPECIALS)] == [2, 3, 4]


def test_a_tokenizer_without_bos_adds_none() -> None:
    content = raw(byte_fallback_library())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<bos>"]
    tokenizer = Tokenizer.from_text(json.dumps(content))
    assert tokenizer.bos_id is None
    assert tokenizer.encode_prompt("a") == tokenizer.encode("a")


def test_b62_bos_is_known_without_a_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_fallback_library().to_str())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode_prompt("a")[0] == SPECIALS.index("<bos>")
    assert tokenizer.end_ids == (SPECIALS.index("<eos>"),)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spelling", ["<turn|>", {"content": "<turn|>", "special": True}])
def test_names_of_tokens_are_read_from_either_file_and_spelling(
    tmp_path: Path, file: str, spelling: object
) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_fallback_library().to_str())
    (tmp_path / file).write_text(json.dumps({"eot_token": spelling, "model_max_length": 5}))
    ids = {SPECIALS.index("<eos>"), SPECIALS.index("<turn|>")}
    assert set(Tokenizer.from_folder(tmp_path).end_ids) == ids


@pytest.mark.parametrize(
    ("config", "generation"), [((1,), (1, 106, 50)), ((1, 106), ()), ((), (106,)), ((), ())]
)
def test_b37_ends_are_the_union_of_three_sources(
    config: tuple[int, ...], generation: tuple[int, ...]
) -> None:
    """B38: and pad is none of them."""
    ends = end_tokens(config, generation, TOKENIZER)
    assert set(ends) == {*config, *generation, *TOKENIZER.end_ids}
    assert len(ends) == len(set(ends))
    assert TOKENIZER.end_ids == (1, 4)
    assert TOKENIZER.pad_id not in ends


def test_b69_an_end_token_nobody_knows_is_a_warning_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_fallback_library().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eot_token": "<end_of_turn>"}))
    with pytest.warns(DgemmaWarning, match="<end_of_turn>"):
        tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.end_ids == (1,)
    assert tokenizer.special_id("<end_of_turn>") is None


def test_b71_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    for content in (b"{", b"\xff", b"[]", b'{"model": 5}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            Tokenizer.from_folder(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text(byte_fallback_library().to_str())
    for content in (b"{", b"\xff", b"[]", b"[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(PromptError, match="Unicode"):
        TOKENIZER.encode("a\ud83d")


@pytest.mark.parametrize("builder", BUILDERS)
@given(st.text(max_size=30))
def test_what_was_encoded_decodes(builder: str, text: str) -> None:
    text = text.replace("▁", "_").lstrip(" ")
    tokenizer = wrap(BUILDERS[builder]())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_b38_pads_and_other_control_tokens_have_no_text() -> None:
    ids = TOKENIZER.encode("ab")
    assert TOKENIZER.decode([0, ids[0], 0, 4, ids[1], 0, 0]) == "ab"
    assert TOKENIZER.raw_decode([ids[0], 4, ids[1], 0]) == "a<turn|>b<pad>"


def test_bytes_with_a_control_token_between_are_one_character() -> None:
    ids = TOKENIZER.encode("🙂")
    assert len(ids) == 4
    assert TOKENIZER.decode([*ids[:2], 0, *ids[2:]]) == "🙂"
    assert TOKENIZER.decode(ids[:3]) == "\ufffd" * 3


@pytest.mark.parametrize("token", [-1, 100_000, 1 << 31, 1 << 32, 1 << 70])
def test_ids_the_tokenizer_does_not_have_are_no_text_and_no_error(token: int) -> None:
    (a,) = TOKENIZER.encode("a")
    assert TOKENIZER.decode([a, token, a]) == "aa"
    assert TOKENIZER.raw_decode([a, token, a]) == "aa"
    assert str(token) in TOKENIZER.token_text(token)


def test_every_token_has_a_text_of_its_own(tiny: Tokenizer) -> None:
    texts = [tiny.token_text(token) for token in range(tiny.vocab_size)]
    assert all(texts)
    assert tiny.token_text(tiny.encode("🙂")[0]) == "<0xF0>"
    assert tiny.token_text(6) == "<turn|>"


def test_the_bundled_folder_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = Tokenizer.from_folder(TINY)
        template = ChatTemplate.from_folder(TINY)
        assert template is not None
        assert encode_chat(template, tokenizer, [{"role": "user", "content": "hi"}])


def test_the_bundled_tokenizer_is_the_references(tiny: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(TINY)
    lines = (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    for prompt in [*prompts[::20], "é 🙂 Ω\n\n  x", "<|turn>user\nhi<turn|>"]:
        assert tiny.encode(prompt, specials=True) == reference.encode(
            prompt, add_special_tokens=False
        )
    ids = [2, 5, *tiny.encode("An é, a 🙂."), 0, 6, 0]
    assert tiny.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tiny.raw_decode(ids) == reference.decode(ids)
    assert (tiny.bos_id, tiny.pad_id) == (reference.bos_token_id, reference.pad_token_id)
