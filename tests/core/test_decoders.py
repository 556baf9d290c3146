"""Decoders on a scripted backend: how many passes, over what, and which tokens come out."""

from itertools import pairwise

import numpy as np
import pytest

from dgemma.config import GenerationConfig
from dgemma.decoders import Commit, Draft, Finish, Request, decoder
from dgemma.decoders.hybrid import Exact, Typical
from dgemma.errors import NonFiniteError
from dgemma.options import Options, plan
from dgemma.sampler import ConfidenceThreshold
from dgemma.scheduler import Failed, Scheduler
from dgemma.testing import FakeBackend, certain, tiny_config

VOCABULARY = 64
END = 1


def request(backend: FakeBackend, prompt=(2, 5, 7), **options) -> tuple[str, Request]:
    given = Options(**{"seed": 5, "max_new_tokens": 40, "max_denoising_steps": 6} | options)
    ready = plan(
        np.array(prompt, dtype=np.int32),
        given,
        config=backend.config,
        generation=GenerationConfig(),
        end_tokens=frozenset(backend.config.eos_token_ids),
    )
    return ready.mode, ready.request


def run(backend: FakeBackend, prompt=(2, 5, 7), **options) -> list:
    mode, ready = request(backend, prompt, **options)
    return list(Scheduler(backend).run(decoder(mode)(ready, backend.new_prefix())))


def content(events) -> list[int]:
    return [t for e in events if isinstance(e, Commit) for t in e.tokens.tolist()]


def scripted(*canvases: list[int]) -> FakeBackend:
    """Certain of one canvas after the other (canvas length 8, prompt length 3)."""

    def logits(prefix, canvas):
        return certain(canvases[(len(prefix) - 3) // 8], VOCABULARY)

    return FakeBackend(canvas=logits)


def test_a_certain_canvas_takes_two_steps_and_the_last_canvas_is_not_encoded():
    """B106: 3 + 8 + 8 tokens are encoded for a prompt of 3 and three canvases."""
    backend = scripted([9] * 8, [10] * 8, [11, 12, END, 0, 0, 0, 0, 0])
    events = run(backend)
    assert content(events) == [9] * 8 + [10] * 8 + [11, 12]
    assert events[-1] == Finish(reason="stop")
    assert [e.steps for e in events if isinstance(e, Commit)] == [2, 2, 2]
    assert backend.extends == [3, 8, 8]


def test_the_output_is_the_argmax_canvas_not_the_noised_one():
    """Never converges, so the last step's argmax is what is committed (B44)."""

    def logits(prefix, canvas):
        table = np.zeros((8, VOCABULARY), dtype=np.float32)
        table[np.arange(8), 20 + np.arange(8)] = 0.5
        return table

    events = run(FakeBackend(canvas=logits), max_new_tokens=8)
    assert content(events) == list(range(20, 28))
    drafts = [e for e in events if isinstance(e, Draft)]
    assert [d.step for d in drafts] == list(range(6))


def test_an_accepted_candidate_and_fresh_noise_make_the_next_canvas():
    backend = FakeBackend()
    seen: list[np.ndarray] = []
    candidates: list[np.ndarray] = []
    plain = backend.denoise

    def denoise(rows):
        seen.extend(row.canvas for row in rows)
        results = plain(rows)
        candidates.extend(statistics.candidate for statistics in results)
        return results

    backend.denoise = denoise
    mode, ready = request(backend, max_new_tokens=8)
    events = list(Scheduler(backend).run(decoder(mode)(ready, backend.new_prefix())))
    drafts = [event for event in events if isinstance(event, Draft)]
    assert len(seen) == len(drafts) > 3
    np.testing.assert_array_equal(seen[0], ready.noise.canvas(0, 8))
    for step, draft in enumerate(drafts[:-1]):
        noise = ready.noise.renoise(0, step, 8)
        expected = np.where(draft.accepted, candidates[step], noise)
        np.testing.assert_array_equal(seen[step + 1], expected)


def test_conditioning_passes_from_step_to_step_and_never_to_the_next_canvas():
    """B47, and the last step asks for none."""
    backend = scripted([9] * 8, [10] * 8)
    asked = []
    plain = backend.denoise

    def denoise(rows):
        results = []
        for row, statistics in zip(rows, plain(rows), strict=True):
            asked.append((row.label, row.conditioning, row.want_conditioning))
            object.__setattr__(statistics, "conditioning", f"after {row.label}")
            results.append(statistics)
        return results

    backend.denoise = denoise
    run(backend, max_new_tokens=16, max_denoising_steps=2)
    assert asked == [
        ("step 0 of canvas 0", None, True),
        ("step 1 of canvas 0", "after step 0 of canvas 0", False),
        ("step 0 of canvas 1", None, True),
        ("step 1 of canvas 1", "after step 0 of canvas 1", False),
    ]


def test_confidence_threshold_stops_the_loop_when_all_are_above():
    """B45: exactly two decoder calls when everything is above the threshold at step 2."""
    calls = 0

    def logits(prefix, canvas):
        nonlocal calls
        calls += 1
        return certain([9] * 7 + [END], VOCABULARY, margin=2.0 if calls == 1 else 60.0)

    events = run(FakeBackend(canvas=logits), acceptance=ConfidenceThreshold(threshold=0.9))
    assert calls == 2
    assert [e.steps for e in events if isinstance(e, Commit)] == [2]


def test_an_end_token_at_position_zero_is_an_empty_reply():
    events = run(scripted([END] * 8))
    assert content(events) == []
    assert events[-1] == Finish(reason="stop")


def test_an_end_token_in_the_prompt_stops_nothing():
    """B37."""
    events = run(scripted([9] * 8, [END] * 8), prompt=(2, END, 7))
    assert content(events) == [9] * 8


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 17])
@pytest.mark.parametrize("mode", ["diffusion", "autoregressive", "hybrid"])
def test_max_new_tokens_is_exact_in_every_mode(mode, limit):
    backend = FakeBackend(tiny_config(eos_token_ids=()))
    events = run(backend, mode=mode, max_new_tokens=limit)
    assert len(content(events)) == limit
    assert events[-1] == Finish(reason="length")


@pytest.mark.parametrize("mode", ["diffusion", "autoregressive", "hybrid"])
def test_positions_never_pass_the_context_limit(mode):
    """B59."""
    backend = FakeBackend(tiny_config(eos_token_ids=(), max_position_embeddings=30))
    longest = 0
    plain_extend, plain_denoise = backend.extend, backend.denoise

    def extend(rows):
        nonlocal longest
        longest = max(longest, *(r.prefix.length + len(r.tokens) for r in rows))
        return plain_extend(rows)

    def denoise(rows):
        nonlocal longest
        longest = max(longest, *(r.prefix.length + len(r.canvas) for r in rows))
        return plain_denoise(rows)

    backend.extend, backend.denoise = extend, denoise
    events = run(backend, mode=mode, max_new_tokens=1000)
    assert longest <= 30
    assert len(content(events)) == (24 if mode == "diffusion" else 27)
    assert events[-1] == Finish(reason="length")


@pytest.mark.parametrize("temperature", [None, 0, 0.7, 1.5])
def test_exact_hybrid_equals_autoregressive_token_for_token(temperature):
    """Whatever the draft is worth, and whatever the temperature: draws go by output position."""
    accepted = 0
    for seed in range(20):
        backend = FakeBackend()
        prompt = (2, 5 + seed, 7)
        options = {"seed": seed, "temperature": temperature}
        causal = run(backend, prompt, mode="autoregressive", **options)
        both = run(backend, prompt, mode="hybrid", verification=Exact(), **options)
        assert content(both) == content(causal), f"seed {seed}"
        assert both[-1] == causal[-1]
        accepted += sum(len(e.tokens) > 1 for e in both if isinstance(e, Commit))
    assert accepted > 0  # drafts were of some use, or the test shows nothing


def test_a_perfect_draft_commits_whole_canvases():
    """A canvas of 8 has 7 free positions; with the causal pass's own token a block commits 8."""
    backend = FakeBackend(
        tiny_config(eos_token_ids=()),
        causal=lambda tokens: certain([len(tokens) % 50 + 10], VOCABULARY)[0],
        canvas=lambda prefix, canvas: certain(
            [(len(prefix) + i - 1) % 50 + 11 for i in range(len(canvas))], VOCABULARY
        ),
    )
    events = run(backend, mode="hybrid", max_new_tokens=33)
    commits = [e for e in events if isinstance(e, Commit)]
    assert [len(c.tokens) for c in commits] == [1, 8, 8, 8, 8]
    assert [c.passes for c in commits] == [1, 3, 3, 3, 3]
    assert content(events) == [(3 + i) % 50 + 10 for i in range(33)]


def test_the_rest_of_a_draft_warms_up_the_next_canvas():
    """Disagreement at one position: what was drafted behind it starts the next canvas."""
    canvases = []

    def canvas_logits(prefix, canvas):
        canvases.append((len(prefix), canvas.tolist()))
        return certain([20 + len(prefix) + i for i in range(len(canvas))], VOCABULARY)

    def causal(tokens):  # agrees with the draft everywhere but at position 6
        return certain([63 if len(tokens) == 6 else 20 + len(tokens)], VOCABULARY)[0]

    backend = FakeBackend(tiny_config(eos_token_ids=()), causal=causal, canvas=canvas_logits)
    run(backend, mode="hybrid", max_new_tokens=9)
    starts = [(length, canvas) for length, canvas in canvases]
    second = next(canvas for (a, _), (length, canvas) in pairwise(starts) if length > a)
    # Positions 0..2 prompt, 3 head; 4 and 5 agreed, 6 did not: the head is 63, then the old draft.
    assert second[0] == 63
    assert second[1:5] == [27, 28, 29, 30]


def test_typical_verification_keeps_probable_drafts():
    def causal(tokens):
        logits = np.full(VOCABULARY, -20.0, dtype=np.float32)
        logits[[30, 31]] = [1.0, 0.9]  # argmax 30 with 0.52, 31 with 0.48
        return logits

    backend = FakeBackend(
        tiny_config(eos_token_ids=()),
        causal=causal,
        canvas=lambda prefix, canvas: certain([31] * len(canvas), VOCABULARY),
    )
    kept = run(backend, mode="hybrid", max_new_tokens=9, verification=Typical(threshold=0.3))
    strict = run(backend, mode="hybrid", max_new_tokens=9, verification=Typical(threshold=0.5))
    assert content(kept) == [30] + [31] * 7 + [30]
    assert content(strict) == [30] * 9


def test_a_batch_gives_each_request_what_it_gets_alone():
    """B60, B97: ragged prompts, all modes, eight at once; and calls are shared."""
    modes = ["diffusion", "autoregressive", "hybrid", "diffusion"] * 2
    prompts = [(2, *range(5, 5 + n)) for n in (1, 3, 2, 9, 4, 1, 6, 8)]
    alone = [
        content(run(FakeBackend(), prompt, mode=mode, seed=index))
        for index, (prompt, mode) in enumerate(zip(prompts, modes, strict=True))
    ]
    backend = FakeBackend()
    scheduler = Scheduler(backend)
    tickets = []
    for index, (prompt, mode) in enumerate(zip(prompts, modes, strict=True)):
        name, ready = request(backend, prompt, mode=mode, seed=index)
        tickets.append(scheduler.add(decoder(name)(ready, backend.new_prefix())))
    together = {ticket: [] for ticket in tickets}
    while not scheduler.idle:
        for ticket, event in scheduler.step():
            together[ticket].append(event)
    assert [content(together[ticket]) for ticket in tickets] == alone
    assert max(rows for kind, rows in backend.batches if kind == "denoise") >= 6
    assert backend.batches[0] == ("extend", 8)


def test_requests_join_and_leave_between_steps():
    backend = FakeBackend(tiny_config(eos_token_ids=()))
    scheduler = Scheduler(backend)
    name, ready = request(backend)
    first = scheduler.add(decoder(name)(ready, backend.new_prefix()))
    scheduler.step()
    second = scheduler.add(decoder(name)(ready, backend.new_prefix()))
    scheduler.step()
    scheduler.cancel(first)
    tags = {ticket for _ in range(20) for ticket, _ in scheduler.step()}
    assert tags == {second}


def test_nan_stops_at_once_naming_step_and_place():
    """B29: the first non-finite statistics end the request."""

    def logits(prefix, canvas):
        table = certain([9] * 8, VOCABULARY)
        table[3, 5] = np.nan
        return table

    backend = FakeBackend(canvas=logits)
    backend.diagnose = lambda work: "layer 1 (full_attention)"
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(NonFiniteError, match=r"step 0 of canvas 0.*layer 1 \(full_attention\)"),
    ):
        run(backend)
    assert backend.denoises == 1


def test_a_failing_row_leaves_the_others_alone():
    def logits(prefix, canvas):
        table = certain([9] * 7 + [END], VOCABULARY)
        if prefix[1] == 6:
            table[0, 0] = np.inf
        return table

    backend = FakeBackend(canvas=logits)
    scheduler = Scheduler(backend)
    tickets = []
    for second in (5, 6, 7):
        name, ready = request(backend, (2, second, 7))
        tickets.append(scheduler.add(decoder(name)(ready, backend.new_prefix())))
    last = {}
    with np.errstate(invalid="ignore"):
        while not scheduler.idle:
            for ticket, event in scheduler.step():
                last[ticket] = event
    assert isinstance(last[tickets[1]], Failed)
    assert last[tickets[0]] == last[tickets[2]] == Finish(reason="stop")


@pytest.mark.parametrize("limit", [8, 2048])
def test_the_length_asked_for_changes_no_pass_and_the_prompt_has_no_logits(limit):
    """B56: work items depend on prompt and canvas alone, however long the reply may become."""
    backend = scripted([9] * 7 + [END])
    items = []
    plain = backend.extend
    backend.extend = lambda rows: items.extend(rows) or plain(rows)
    run(backend, max_new_tokens=limit)
    assert [(len(item.tokens), len(item.read)) for item in items] == [(3, 0)]
    assert backend.batches == [("extend", 1), ("denoise", 1), ("denoise", 1)]
