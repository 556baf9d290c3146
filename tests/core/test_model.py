"""What a user holds: one text by every road, honest figures, errors at the call."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dgemma
from dgemma.chat import ChatTemplate
from dgemma.config import GenerationConfig
from dgemma.decoders.hybrid import Exact
from dgemma.errors import ConfigError, ContextLengthError, DgemmaError, NonFiniteError, PromptError
from dgemma.model import Model
from dgemma.reply import DraftText, Reply, Text
from dgemma.sampler import ConfidenceThreshold, Plateau
from dgemma.testing import FakeBackend, certain, tiny_config
from dgemma.tokenizer import Tokenizer

TINY = Path(dgemma.__file__).parent / "tiny"
TOKENIZER = Tokenizer.from_folder(TINY)
TEMPLATE = ChatTemplate.from_folder(TINY)
PAD, EOS, TURN_END = 0, 1, 6
CANVAS = 8
BROKEN = -1
"""In a script: logits that are NaN."""
STEPS = 2
"""A canvas of which the model is certain is stable at its second step, the earliest there is."""
MODES = ("diffusion", "autoregressive", "hybrid")


class Scripted(Model):
    """Writes to each prompt what it was told to, then pads for ever."""

    def __init__(self, vocab_size: int = 1024, context: int = 512, **parts: Any) -> None:
        config = tiny_config(
            vocab_size=vocab_size,
            canvas_length=CANVAS,
            max_position_embeddings=context,
            eos_token_ids=(EOS,),
        )
        self.fake = FakeBackend(config, canvas=self._canvas, causal=self._causal)
        generation = GenerationConfig(eos_token_ids=(EOS, TURN_END))
        parts = {"template": TEMPLATE, "generation": generation, "name": "scripted"} | parts
        super().__init__(self.fake, TOKENIZER, **parts)
        self.scripts: dict[tuple[int, ...], list[int]] = {}

    def say(self, prompt: Any, tokens: Sequence[int], **how: Any) -> Scripted:
        self.scripts[tuple(self.encode(prompt, **how))] = list(tokens)
        return self

    def _written(self, prefix: tuple[int, ...], count: int) -> list[int]:
        prompt = max((p for p in self.scripts if prefix[: len(p)] == p), key=len)
        start = len(prefix) - len(prompt)
        return [*self.scripts[prompt][start : start + count], *[PAD] * count][:count]

    def _canvas(self, prefix: tuple[int, ...], canvas: np.ndarray) -> np.ndarray:
        return self._logits(self._written(prefix, len(canvas)))

    def _causal(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self._logits(self._written(prefix, 1))[0]

    def _logits(self, tokens: list[int]) -> np.ndarray:
        logits = certain([max(token, 0) for token in tokens], self.config.vocab_size)
        logits[np.array(tokens) == BROKEN] = np.nan
        return logits


def restless() -> Model:
    """A model whose every token depends on the draws."""
    config = tiny_config(vocab_size=1024, canvas_length=CANVAS, eos_token_ids=())
    return Model(FakeBackend(config), TOKENIZER, template=TEMPLATE)


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def texts(events: Sequence[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def test_a_reply_says_what_was_written_and_what_it_cost() -> None:
    answer = words("The answer is 4 2 . ok")
    model = Scripted().say("?", [*answer, TURN_END])
    reply = model.generate("?", seed=7)
    canvases = -(-(len(answer) + 1) // CANVAS)
    assert canvases > 1, "the answer should need several canvases"
    assert reply.text == reply.raw_text == "The answer is 4 2 . ok"
    assert reply.tokens == answer
    assert (reply.finish_reason, reply.seed) == ("stop", 7)
    assert (reply.mode, reply.model, reply.error) == ("diffusion", "scripted", None)
    stats = reply.stats
    assert stats.prompt_tokens == len(model.encode("?"))
    assert (stats.canvases, stats.steps) == (canvases, STEPS * canvases)
    assert stats.passes == STEPS * canvases + canvases - 1
    assert stats.tokens_per_forward == (len(answer) + 1) / (STEPS * canvases)
    assert stats.first_draft_s is not None
    assert stats.first_text_s is not None
    assert 0 < stats.first_draft_s <= stats.first_text_s <= stats.total_s
    assert stats.tokens_per_second == pytest.approx((len(answer) + 1) / stats.total_s)
    assert stats.peak_memory_bytes is None


def test_a_stream_drafts_then_writes_and_ends_with_the_reply() -> None:
    answer = words("one two three four five six")
    model = Scripted().say("?", [*answer, EOS])
    events = list(model.stream("?", seed=1))
    assert isinstance(events[0], DraftText)
    assert isinstance(events[-1], Reply)
    assert sum(isinstance(event, Reply) for event in events) == 1
    assert all(event.text for event in events if isinstance(event, Text))
    assert texts(events) == events[-1].text == model.generate("?").text
    assert sum(isinstance(event, DraftText) for event in events) == events[-1].stats.steps


def test_a_draft_shows_nothing_behind_its_end_token() -> None:
    model = Scripted().say("?", [*words("ab"), TURN_END, *words("junk")])
    first = next(model.stream("?"))
    assert isinstance(first, DraftText)
    assert first.text == "ab"


def expected(tokens: list[int], limit: int, stops: list[str]) -> tuple[str, str]:
    """Text and finish reason, from the whole script at once."""
    content, reason = tokens[:limit], "length"
    for index, token in enumerate(content):
        if token in (EOS, TURN_END):
            content, reason = content[:index], "stop"
            break
    for index in range(CANVAS, len(content) + 1):
        if content[index - CANVAS : index] == [PAD] * CANVAS:  # nothing left to say
            content, reason = content[:index], "stop"
            break
    text = TOKENIZER.decode(content)
    for size in range(1, len(text) + 1):
        ends = [len(stop) for stop in stops if text[:size].endswith(stop)]
        if ends:
            return text[: size - max(ends)], "stop"
    return text, reason


BYTES = [TOKENIZER.encode("é🙂")[i] for i in range(6)]
pieces = st.one_of(
    st.integers(0, 1023).map(lambda token: [token]),
    st.sampled_from(["e", "the ", "é", "🙂", "a b", "\n", "\ufffd"]).map(words),
    st.sampled_from(BYTES).map(lambda token: [token]),
    st.just([PAD]),
)
scripts = st.lists(pieces, max_size=20).map(lambda parts: [t for part in parts for t in part])


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(
    tokens=scripts,
    limit=st.integers(1, 3 * CANVAS),
    stops=st.lists(st.sampled_from(["e", "a b", "é", "the", "\ufffd", "zz"]), max_size=2),
)
def test_b70_one_text_by_every_road(
    mode: Any, tokens: list[int], limit: int, stops: list[str]
) -> None:
    tokens = [*tokens, *[PAD] * limit]
    model = Scripted().say("?", tokens)
    events = list(model.stream("?", max_new_tokens=limit, stop=stops, mode=mode, seed=3))
    streamed = events[-1]
    assert isinstance(streamed, Reply)
    whole = model.generate("?", max_new_tokens=limit, stop=stops, mode=mode, seed=3)
    (batched,) = model.generate_batch(["?"], max_new_tokens=limit, stop=stops, mode=mode, seed=3)
    text, reason = expected(tokens, limit, stops)
    for reply in (streamed, whole, batched):
        assert (reply.text, reply.finish_reason) == (text, reason)
        assert reply.tokens == streamed.tokens
    assert texts(events) == text
    content = [token for token in tokens if token != PAD]
    assert streamed.tokens == content[: len(streamed.tokens)]
    assert len(streamed.tokens) <= limit
    assert not {PAD, EOS, TURN_END} & set(streamed.tokens)
    if text == TOKENIZER.decode(streamed.tokens):
        return
    # A stop string that begins within a token, or within bytes that only together are text: the
    # tokens are then the longest beginning that shows no more than the text.
    assert stops
    assert text.startswith(TOKENIZER.decode(streamed.tokens))
    longer = [content[:n] for n in range(len(streamed.tokens) + 1, len(content) + 1)]
    assert not any(text.startswith(TOKENIZER.decode(more)) for more in longer)


def test_the_tokens_before_a_stop_string_end_with_a_whole_character() -> None:
    """Three bytes of the four may be wider on the screen than all of them."""
    smile = words("🙂")
    model = Scripted().say("?", [*words("a"), *smile, *smile, *words("."), EOS])
    reply = model.generate("?", stop=".")
    assert (reply.text, reply.tokens) == ("a🙂🙂", [*words("a"), *smile, *smile])


@pytest.mark.parametrize("end", [EOS, TURN_END])
def test_b37_any_declared_end_token_ends_the_text(end: int) -> None:
    model = Scripted().say("?", [*words("ab"), end, *words("junk")])
    reply = model.generate("?")
    assert (reply.text, reply.finish_reason, reply.tokens) == ("ab", "stop", words("ab"))


def test_b37_an_end_token_in_the_prompt_ends_nothing() -> None:
    prompt = [2, 5, *words("hi"), TURN_END, EOS, 5]
    reply = Scripted().say(prompt, [*words("ab"), EOS]).generate(prompt)
    assert (reply.text, reply.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("mode", MODES)
def test_an_end_token_at_position_0_is_an_empty_reply(mode: Any) -> None:
    reply = Scripted().say("?", [TURN_END, *words("noise")]).generate("?", mode=mode)
    assert (reply.text, reply.raw_text, reply.tokens) == ("", "", [])
    assert reply.finish_reason == "stop"
    assert reply.stats.first_text_s is None
    assert reply.stats.tokens_per_forward == 1 / (STEPS if mode == "diffusion" else 1)


@pytest.mark.parametrize("limit", [1, 5, 8, 9, 17])
@pytest.mark.parametrize("mode", MODES)
def test_max_new_tokens_is_exact(limit: int, mode: Any) -> None:
    answer = words("1 2 3 4 5 6 7 8 9 0 1 2")
    reply = Scripted().say("?", answer).generate("?", max_new_tokens=limit, mode=mode)
    assert reply.tokens == answer[:limit]
    assert reply.finish_reason == "length"


def test_b38_five_tokens_then_an_end_are_five_tokens() -> None:
    answer = words("12345")
    assert len(answer) == 5
    reply = Scripted().say("?", [*answer, EOS, *words("9")]).generate("?")
    assert reply.tokens == answer
    assert reply.stats.tokens_per_forward == (5 + 1) / STEPS


def test_b38_pads_are_neither_text_nor_counted_nor_an_end() -> None:
    a, b = words("1")[0], words("2")[0]
    model = Scripted().say("?", [PAD, a, PAD, PAD, b, PAD, PAD, PAD, a, EOS])
    reply = model.generate("?")
    assert (reply.text, reply.raw_text, reply.tokens) == ("121", "121", [a, b, a])
    assert reply.stats.tokens_per_forward == (3 + 1) / (2 * STEPS)
    assert PAD not in model.end_tokens


def test_a_canvas_of_nothing_but_pads_ends_the_reply() -> None:
    """A model with nothing left to say does not burn the whole token budget."""
    reply = Scripted().say("?", []).generate("?", max_new_tokens=5 * CANVAS)
    assert (reply.text, reply.tokens, reply.finish_reason) == ("", [], "stop")
    assert reply.stats.canvases == 1
    short = Scripted().say("?", []).generate("?", max_new_tokens=CANVAS - 1)
    assert short.finish_reason == "length"


def test_b70_control_tokens_are_in_the_raw_text_alone() -> None:
    thought = [7, *words("hm"), 8]
    model = Scripted().say("?", [*thought, *words(" yes"), TURN_END])
    for reply in (model.generate("?"), *model.generate_batch(["?"])):
        assert reply.text == "hm yes"
        assert reply.raw_text == "<|channel>hm<channel|> yes"
    assert texts(list(model.stream("?"))) == "hm yes"


def test_a_stop_string_ends_the_work_and_is_not_shown() -> None:
    answer = words("one two STOP three four five six seven eight")
    model = Scripted().say("?", answer)
    events = list(model.stream("?", stop=["STOP"], max_new_tokens=64))
    reply = events[-1]
    assert isinstance(reply, Reply)
    assert texts(events) == reply.text == "one two "
    assert reply.finish_reason == "stop"
    assert TOKENIZER.decode(reply.tokens) in ("one two ", "one two")
    assert reply.stats.canvases < 64 // CANVAS
    assert model.fake.denoises == reply.stats.steps


def test_a_stop_string_ends_the_work_for_one_of_a_batch_alone() -> None:
    model = Scripted().say("a", [*words("12."), *words("9" * 60)]).say("b", words("34" * 30))
    a, b = model.generate_batch(["a", "b"], stop=".", max_new_tokens=48)
    assert (a.text, len(b.tokens)) == ("12", 48)
    assert model.fake.denoises == a.stats.steps + b.stats.steps


def test_an_end_token_behind_a_stop_string_was_not_emitted() -> None:
    (one,) = words("1")
    reply = Scripted().say("?", [one, *words("."), one, EOS]).generate("?", stop=".")
    assert reply.stats.tokens_per_forward == 1 / STEPS


def test_b67_a_control_token_as_stop_is_its_id() -> None:
    model = Scripted().say("?", [*words("ab"), 7, *words("cd"), EOS])
    reply = model.generate("?", stop="<|channel>")
    assert (reply.text, reply.finish_reason) == ("ab", "stop")
    spelled = Scripted().say("?", [*words("ab<|channel>cd"), EOS])
    assert spelled.generate("?", stop="<|channel>").text == "ab<|channel>cd"


def test_b69_a_word_that_was_an_end_elsewhere_is_text() -> None:
    text = "write <end_of_turn> and </s> here"
    assert Scripted().say("?", [*words(text), EOS]).generate("?").text == text


def test_b102_empty_stops_cut_nothing() -> None:
    model = Scripted().say("?", [*words("ab"), EOS])
    for stop in ("", [""], [], None):
        assert model.generate("?", stop=stop).text == "ab"


def test_chat_is_generate_for_a_conversation() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}],
        },
    ]
    model = Scripted().say(messages, [*words("four"), TURN_END])
    reply = model.chat(messages)
    assert reply.text == model.generate(messages).text == "four"
    assert texts(list(model.stream_chat(messages))) == "four"
    assert reply.stats.prompt_tokens == len(model.encode(messages))
    assert TOKENIZER.raw_decode(model.encode(messages)) == (
        "<bos><|turn>user\none<turn|>\n<|turn>model\ntwo<turn|>\n"
        "<|turn>user\nthree<turn|>\n<|turn>model\n"
    )


def test_a_question_is_a_conversation_of_one_message() -> None:
    model = Scripted()
    assert model.encode("hi") == model.encode([{"role": "user", "content": "hi"}])
    assert model.encode("hi", raw=True) == [2, *words("hi")]
    assert model.encode([5, 6]) == model.encode(np.array([5, 6])) == [5, 6]


def test_b65_thinking_is_off_unless_asked_for() -> None:
    template = ChatTemplate("{{ enable_thinking }}|{{ messages[0].content }}")
    model = Scripted(template=template)
    assert TOKENIZER.decode(model.encode("x")) == "False|x"
    model.say("x", [EOS]).say("x", [*words("hm"), EOS], thinking=True)
    assert model.generate("x").text == ""
    assert model.generate("x", thinking=False).text == ""
    assert model.generate("x", thinking=None).text == ""
    assert model.generate("x", thinking=True).text == "hm"


def test_a_raw_prompt_needs_no_template() -> None:
    model = Scripted(template=None).say("hi", [*words("yes"), EOS], raw=True)
    assert model.generate("hi", raw=True).text == "yes"
    with pytest.raises(PromptError, match="scripted has no chat template; pass raw=True"):
        model.generate("hi")


def test_to_dict_is_json_of_the_documented_keys() -> None:
    model = Scripted().say("?", [*words('"é🙂\n'), EOS]).say("!", [EOS])
    for prompt in "?!":
        found = json.loads(json.dumps(model.generate(prompt).to_dict(), allow_nan=False))
        assert list(found) == "text tokens finish_reason seed model mode stats".split()
        assert set(found["stats"]) == set(
            "canvases steps tokens_per_forward first_draft_s first_text_s total_s "
            "tokens_per_second peak_memory_bytes".split()
        )
        assert found["text"] == ('"é🙂\n' if prompt == "?" else "")


def test_b39_a_seed_repeats_and_is_reported() -> None:
    model = restless()
    options: Any = {"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 3}
    first = model.generate("?", seed=5, **options)
    model.generate("something else", **options)
    assert model.generate("?", seed=5, **options).tokens == first.tokens
    assert model.generate("?", seed=6, **options).tokens != first.tokens
    assert model.generate("?", seed=5, row=1, **options).tokens != first.tokens
    drawn, other = model.generate("?", **options), model.generate("?", **options)
    assert drawn.seed != other.seed
    assert model.generate("?", seed=drawn.seed, **options).tokens == drawn.tokens
    assert json.loads(json.dumps(drawn.seed)) == int(float(drawn.seed)) == drawn.seed


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_every_integer_is_a_seed(seed: int) -> None:
    model = restless()
    reply = model.generate("?", seed=seed, max_new_tokens=CANVAS, max_denoising_steps=2)
    assert reply.seed == seed
    same = model.generate("?", seed=seed % 2**64, max_new_tokens=CANVAS, max_denoising_steps=2)
    assert reply.tokens == same.tokens


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.0, "mode": "hybrid"},
        {"temperature_start": 0},
        {"temperature_start": 0, "temperature_end": 0},
    ],
)
def test_b58_temperature_0_repeats_without_a_seed(options: Any) -> None:
    model = restless()
    options = {"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 3} | options
    assert model.generate("?", **options).tokens == model.generate("?", **options).tokens


def test_b58_equal_temperatures_and_integers_are_fine() -> None:
    model = Scripted().say("?", [*words("ab"), EOS])
    for start, end in ((1, 1), (0.4, 0.4), (0.8, 0)):
        assert model.generate("?", temperature_start=start, temperature_end=end).text == "ab"
    assert model.generate("?", entropy_bound=1, confidence_threshold=1).text == "ab"


def test_none_means_not_given() -> None:
    names = [
        "max_new_tokens seed row mode stop raw thinking max_denoising_steps temperature",
        "temperature_start temperature_end entropy_bound stability_threshold",
        "confidence_threshold acceptance stop_rule verification",
    ]
    nothing: Any = dict.fromkeys(" ".join(names).split())
    reply = Scripted().say("?", [*words("ab"), EOS]).generate("?", **nothing)
    assert (reply.text, reply.mode) == ("ab", "diffusion")


def test_numpys_numbers_are_numbers() -> None:
    """A seed out of a NumPy generator is the usual way to draw several."""
    model = restless()
    for plain, numpys in (
        ({"seed": 2**63 + 1}, {"seed": np.uint64(2**63 + 1)}),
        ({"seed": -2, "row": 3}, {"seed": np.int32(-2), "row": np.int16(3)}),
        ({"seed": 1, "max_new_tokens": 3}, {"seed": 1, "max_new_tokens": np.int64(3)}),
        (
            {"seed": 1, "temperature": 0.5, "entropy_bound": 0.25, "max_denoising_steps": 2},
            {
                "seed": 1,
                "temperature": np.float32(0.5),
                "entropy_bound": np.float16(0.25),
                "max_denoising_steps": np.uint8(2),
                "raw": np.False_,
            },
        ),
    ):
        wanted, found = (model.generate("?", **cast(Any, given)) for given in (plain, numpys))
        assert wanted.tokens == found.tokens
        assert json.dumps(wanted.to_dict()["seed"]) == json.dumps(found.to_dict()["seed"])


def test_strategies_may_be_given() -> None:
    model = Scripted().say("?", [*words("ab"), EOS])
    assert model.generate("?", stop_rule=Plateau()).text == "ab"
    assert model.generate("?", mode="hybrid", verification=Exact()).text == "ab"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_new_token": 3}, "max_new_token"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
    ({"max_new_tokens": "10"}, "max_new_tokens is '10'"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_denoising_steps": 0}, "max_denoising_steps"),
    ({"max_denoising_steps": 0, "mode": "hybrid"}, "max_denoising_steps"),
    ({"max_denoising_steps": "3"}, "max_denoising_steps"),
    ({"seed": "7"}, "seed is '7'"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"row": "7"}, "row is '7'"),
    ({"mode": "fast"}, "mode is 'fast'"),
    ({"mode": ["diffusion"]}, "mode is"),
    ({"mode": np.array(["diffusion", "hybrid"])}, "mode is"),
    ({"seed": np.zeros((9, 9))}, "seed is array"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "0.5"}, "temperature is '0.5'"),
    ({"temperature_start": 0.3, "temperature_end": 0.5}, "temperature_end is 0.5"),
    ({"temperature_start": 10**400}, "temperature_start"),
    ({"entropy_bound": -1}, "entropy_bound"),
    ({"entropy_bound": math.nan}, "entropy_bound"),
    ({"confidence_threshold": "x"}, "confidence_threshold"),
    ({"stability_threshold": 0.5}, "stability_threshold"),
    ({"stop": 5}, "stop is 5"),
    ({"stop": [5]}, "stop holds 5"),
    ({"raw": "false"}, "raw is 'false'"),
    ({"thinking": "no"}, "thinking is 'no'"),
    ({"thinking": 1}, "thinking is 1"),
    ({"acceptance": 0.5}, "acceptance is 0.5"),
    ({"stop_rule": "plateau"}, "stop_rule is 'plateau'"),
    ({"verification": "exact"}, "verification is 'exact'"),
    ({"verification": Exact}, "verification is <class"),
    ({"stop_rule": Plateau}, "stop_rule is <class"),
    ({"acceptance": ConfidenceThreshold}, "acceptance is <class"),
    ({"acceptance": TOKENIZER}, "acceptance is"),
]


@pytest.mark.parametrize(("options", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_option_is_an_error_at_the_call_and_costs_nothing(options: Any, named: str) -> None:
    model = Scripted().say("?", [EOS])
    for call in (model.generate, model.stream):
        with pytest.raises(DgemmaError) as caught:
            call("?", **options)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DgemmaError):
        model.generate_batch(["?"], **options)
    assert model.fake.batches == []


@pytest.mark.parametrize(
    "prompt",
    ["", " \n", [], np.array([], dtype=np.int32), None, 5, b"hi", {"role": "user", "content": "x"},
     {}, iter([1]), [{"role": "user"}], ["hi"], [None], [1.5], [[1, 2]], "\ud83d",
     [{"role": "robot", "content": "x"}], "x" * 10 + "\udc00", bytearray(b"hi"), [True],
     np.array(3), np.array([[3, 4]]), np.array([3.0]), {3, 4}],
    ids=lambda prompt: repr(prompt).partition(" object at")[0],
)  # fmt: skip
def test_a_wrong_prompt_is_one_line_at_the_call(prompt: Any) -> None:
    model = Scripted()
    for call in (model.generate, model.stream, model.encode):
        with pytest.raises(PromptError) as caught:
            call(prompt)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
    assert model.fake.batches == []


@pytest.mark.parametrize("prompt", [[-1], [1024], [2, 10**30]])
def test_ids_outside_the_vocabulary_are_named(prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"token id {prompt[-1]}"):
        Scripted().stream(prompt)


def test_a_tokenizer_larger_than_the_model_is_an_error_not_a_wild_lookup() -> None:
    model = Scripted(vocab_size=256)
    assert model.encode("\x01", raw=True)
    with pytest.raises(ConfigError, match="outside the vocabulary of 256"):
        model.stream("words")


def test_b59_a_prompt_that_leaves_no_room_is_an_error_at_the_call() -> None:
    model = Scripted(context=4 * CANVAS)
    fits = [5] * (3 * CANVAS)
    assert model.say(fits, [EOS]).generate(fits).finish_reason == "stop"
    with pytest.raises(ContextLengthError, match="25 tokens"):
        model.stream([*fits, 5])


def test_a_reply_that_fills_the_context_ends_with_length() -> None:
    prompt = [5] * (2 * CANVAS)
    model = Scripted(context=4 * CANVAS + 3).say(prompt, words("12" * 30))
    reply = model.generate(prompt, max_new_tokens=10**6)
    assert (len(reply.tokens), reply.finish_reason) == (2 * CANVAS, "length")


def test_nan_is_an_error_after_the_text_that_was_sound() -> None:
    sound = words("1234567890"[:CANVAS])
    model = Scripted().say("?", [*sound, BROKEN])
    shown: list[object] = []
    with pytest.raises(NonFiniteError, match="step 0 of canvas 1"):
        shown.extend(model.stream("?"))
    assert not any(isinstance(event, Reply) for event in shown)
    with pytest.raises(NonFiniteError):
        model.generate("?")
    assert model.say("!", [*words("ok"), EOS]).generate("!").text == "ok"


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_the_replies_alone_in_order(mode: Any) -> None:
    prompts: list[Any] = ["a", "longer than the first", [2, 5, 17], "d"]
    model = Scripted()
    answers = ["one", "two words and more of them to fill canvases", "", "four"]
    for prompt, answer in zip(prompts, answers, strict=True):
        model.say(prompt, [*words(answer), EOS])
    batch = model.generate_batch(prompts, seed=9, mode=mode)
    assert [reply.text for reply in batch] == answers
    assert max(rows for _, rows in model.fake.batches) == len(prompts)
    for prompt, reply in zip(prompts, batch, strict=True):
        alone = model.generate(prompt, seed=9, mode=mode)
        assert (reply.tokens, reply.seed) == (alone.tokens, 9)
        assert (reply.stats.steps, reply.stats.passes) == (alone.stats.steps, alone.stats.passes)


def test_a_batch_without_a_seed_shares_one_that_repeats() -> None:
    model = restless()
    options: Any = {"max_new_tokens": CANVAS, "max_denoising_steps": 3}
    batch = model.generate_batch(["a", "b c"], **options)
    assert batch[0].seed == batch[1].seed
    for prompt, reply in zip(["a", "b c"], batch, strict=True):
        assert model.generate(prompt, seed=reply.seed, **options).tokens == reply.tokens


def test_one_that_fails_in_a_batch_fails_alone() -> None:
    model = Scripted().say("good", [*words("1234567890ab"), EOS]).say("also", [*words("yes"), EOS])
    model.say("bad", [*words("12345678"), BROKEN])
    good, bad, also = model.generate_batch(["good", "bad", "also"])
    assert (good.text, also.text) == ("1234567890ab", "yes")
    assert (good.error, also.error) == (None, None)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, NonFiniteError)
    assert "12345678".startswith(bad.text)
    assert json.loads(json.dumps(bad.to_dict()))["finish_reason"] == "error"


@pytest.mark.parametrize(
    "prompts",
    ["a question", b"ab", None, 5, {"a": 1}, iter(["a"])],
    ids=lambda prompts: repr(prompts).partition(" object at")[0],
)
def test_what_is_no_list_of_prompts_is_not_taken_apart(prompts: Any) -> None:
    model = Scripted()
    with pytest.raises(PromptError, match=r"prompts is .*a list of prompts"):
        model.generate_batch(prompts)
    assert model.fake.batches == []


def test_a_wrong_prompt_of_a_batch_is_named_by_its_number() -> None:
    model = Scripted(context=4 * CANVAS)
    for wrong, error in (("", PromptError), ([9999], ConfigError), ([5] * 99, ContextLengthError)):
        with pytest.raises(error, match=r"^prompts\[1\]: "):
            model.generate_batch(["fine", wrong, "fine"])
    assert model.fake.batches == []


def test_an_empty_batch_is_no_replies() -> None:
    assert Scripted().generate_batch([]) == []


def test_a_closed_stream_works_no_further() -> None:
    model = Scripted().say("?", words("12" * 40))
    stream = model.stream("?", max_new_tokens=80)
    while not isinstance(next(stream), Text):
        pass
    done = list(model.fake.batches)
    stream.close()
    assert model.fake.batches == done
    assert list(stream) == []
    assert len(done) < len(model.generate("?", max_new_tokens=80).text)
    assert model.say("!", [*words("ok"), EOS]).generate("!").text == "ok"


def test_a_stream_that_is_never_read_does_nothing() -> None:
    model = Scripted().say("?", [EOS])
    model.stream("?").close()
    assert model.fake.batches == []


def test_two_streams_taken_in_turns_do_not_mix() -> None:
    model = Scripted().say("a", [*words("12" * 12), EOS]).say("b", [*words("xy" * 9), EOS])
    streams = [model.stream("a"), model.stream("b")]
    shown: list[list[object]] = [[], []]
    while any(streams):
        for index, stream in enumerate(streams):
            event = next(stream, None) if stream else None
            if event is None:
                streams[index] = None  # type: ignore[call-overload]
            else:
                shown[index].append(event)
    assert [texts(events) for events in shown] == ["12" * 12, "xy" * 9]


def test_threads_may_share_a_model() -> None:
    model = Scripted()
    answers = {f"prompt {n}": f"answer {n} " * n for n in range(1, 9)}
    for prompt, answer in answers.items():
        model.say(prompt, [*words(answer), EOS])
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(model.generate, answers))
    assert [reply.text for reply in replies] == list(answers.values())
