"""Tokenizers of a few tokens, one for each way of turning tokens into text."""

from __future__ import annotations

import json
import string
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from dgemma.tokenizer import Tokenizer

SPECIALS = "<pad> <eos> <bos> <|turn> <turn|> <|channel> <channel|> <|image|>".split()
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "eot_token": "<turn|>"}
LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, "\n", "▁"]


def _specials() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIALS]


def byte_fallback_library(**model: Any) -> Library:
    """Gemma's way: spaces as ▁, a character without a token as its bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {t: i for i, t in enumerate([*SPECIALS, *pieces, *LETTERS, "▁a", "th", "<|", "|>"])}
    merges = [("▁", "a"), ("t", "h"), ("<", "|"), ("|", ">")]
    library = Library(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, **model)
    )
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.add_special_tokens(_specials())
    return library


def leading_space_library() -> Library:
    """Llama's way: like Gemma's, but the text's first space is dropped when decoding."""
    library = byte_fallback_library()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return library


def byte_level_library() -> Library:
    """GPT-2's way: every token is a string of bytes, in an alphabet of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    library = Library(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(_specials())
    return library


def wrap(library: Library, named: dict[str, str] | None = None) -> Tokenizer:
    """Our tokenizer around the library's."""
    return Tokenizer.from_text(library.to_str(), NAMED if named is None else named)


def raw(library: Library) -> dict[str, Any]:
    """The content of its tokenizer.json."""
    return json.loads(library.to_str())


BUILDERS = {
    "byte fallback": byte_fallback_library,
    "leading space": leading_space_library,
    "byte level": byte_level_library,
}
