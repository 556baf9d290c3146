"""What a user holds: a loaded checkpoint that writes text.

    prompt -> tokens -> Request -> decoder (coroutine) -> Scheduler -> backend
                                       |
               Reply <- text <- events-+

Not here: loading weights (a backend's `load`), files (`checkpoint.py`), the screen (`view.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from numbers import Integral
from typing import Any, Unpack, cast

import numpy as np

from dgemma.backend import Backend
from dgemma.chat import ChatTemplate, encode_chat
from dgemma.checkpoint import Checkpoint
from dgemma.config import GenerationConfig
from dgemma.decoders import decoder
from dgemma.errors import DgemmaError, PromptError
from dgemma.json_reader import shown
from dgemma.options import Options, Plan, check_options, plan, resolve_seed
from dgemma.reply import Reply, ReplyBuilder, StreamEvent
from dgemma.scheduler import Failed, Scheduler
from dgemma.text import StopStrings
from dgemma.tokenizer import Tokenizer, end_tokens

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A question, token ids taken as they are, or a conversation."""


class Model:
    """A checkpoint on a backend. Get one from `mlx_dgemma.load()` or `cuda_dgemma.load()`.

    Calls may come from several threads at once; each is a batch of its own.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        generation: GenerationConfig | None = None,
        name: str = "",
    ) -> None:
        self.backend = backend
        self.config = backend.config
        self.tokenizer = tokenizer
        self.template = template
        self.generation = generation or GenerationConfig()
        self.name = name
        self.end_tokens = frozenset(
            end_tokens(self.config.eos_token_ids, self.generation.eos_token_ids, tokenizer)
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, backend: Backend, *, name: str = "") -> Model:
        """Puts a backend that holds the weights together with the folder's text files."""
        return cls(
            backend,
            Tokenizer.from_folder(checkpoint.folder),
            template=ChatTemplate.from_folder(checkpoint.folder),
            generation=checkpoint.generation,
            name=name or checkpoint.folder.name,
        )

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        """Writes one reply and returns it whole.

        Raises `PromptError`, `ConfigError` or `ContextLengthError` before any computation, and
        `NonFiniteError` when the network's numbers break.
        """
        reply = None
        for event in self.stream(prompt, **options):
            reply = event
        assert isinstance(reply, Reply)
        return reply

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[StreamEvent]:
        """Yields drafts and pieces of final text as they come, and the `Reply` last.

        The options are checked at the call, not at the first `next`. Closing the iterator stops the
        work at the next step.
        """
        ready = self._plan(prompt, options)
        return self._stream(ready, options)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Reply:
        """Answers a conversation: `[{"role": "user", "content": "..."}, ...]`."""
        return self.generate(messages, **options)

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[Options]
    ) -> Generator[StreamEvent]:
        """Like `stream`, for a conversation."""
        return self.stream(messages, **options)

    def generate_batch(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Reply]:
        """Writes one reply to each prompt, all sharing their forward passes, in the prompts' order.

        Every reply gets the seed, and is what `generate` would have given it alone. One that fails
        has `finish_reason` "error" and its `error` set; the others go on. A prompt that cannot be
        used is refused, with its number, before anything runs.
        """
        check_options(options)
        options["seed"] = resolve_seed(options)
        plans = [
            self._numbered_plan(number, prompt, options)
            for number, prompt in enumerate(_checked_list(prompts, "prompts", "a list of prompts"))
        ]
        replies: list[Reply | None] = [None] * len(plans)
        for index, event in self._run(plans, options):
            if isinstance(event, Reply):
                replies[index] = event
        return cast("list[Reply]", replies)

    def encode(self, prompt: Prompt, *, raw: bool = False, thinking: bool = False) -> list[int]:
        """The token ids a prompt becomes, the beginning-of-sequence token included.

        Raises `PromptError` for what is no prompt, for an empty one, and for a checkpoint without a
        chat template unless `raw`; `ConfigError` for an id outside the vocabulary.
        """
        tokens = self._encode(prompt, raw, thinking)
        self.config.check_tokens(tokens, "the prompt")
        return tokens

    def _encode(self, prompt: Prompt, raw: bool, thinking: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty")
            if raw:
                return self.tokenizer.encode_prompt(prompt)
            prompt = [{"role": "user", "content": prompt}]
        items = _checked_list(
            prompt, "the prompt", "text, a list of messages, or a list of token ids"
        )
        if not items:
            raise PromptError("the prompt is empty")
        if all(not isinstance(item, bool) and isinstance(item, Integral) for item in items):
            return [int(token) for token in cast(Sequence[int], items)]
        if self.template is None:
            raise PromptError(
                f"{self.name or 'this model'} has no chat template; "
                "pass raw=True (--raw) to use the prompt as it is"
            )
        messages = cast(Sequence[Message], items)
        return encode_chat(self.template, self.tokenizer, messages, thinking=thinking)

    def close(self) -> None:
        """Frees the backend; the model must not be used afterwards."""
        self.backend.close()

    def _numbered_plan(self, number: int, prompt: Prompt, options: Options) -> Plan:
        try:
            return self._plan(prompt, options)
        except DgemmaError as error:
            raise type(error)(f"prompts[{number}]: {error}") from error

    def _plan(self, prompt: Prompt, options: Options) -> Plan:
        check_options(options)
        tokens = self.encode(
            prompt, raw=options.get("raw") or False, thinking=options.get("thinking") or False
        )
        stop_ids = StopStrings.from_option(options.get("stop"), self.tokenizer).token_ids
        return plan(
            np.array(tokens, dtype=np.int32),
            options,
            config=self.config,
            generation=self.generation,
            end_tokens=self.end_tokens | stop_ids,
        )

    def _stream(self, ready: Plan, options: Options) -> Generator[StreamEvent]:
        with closing(self._run([ready], options)) as events:
            for _, event in events:
                if isinstance(event, Reply) and event.error is not None:
                    raise event.error
                yield event

    def _run(self, plans: Sequence[Plan], options: Options) -> Generator[tuple[int, StreamEvent]]:
        """Runs plans as one batch; yields (index of the plan, event)."""
        self.backend.reset_peak_memory()
        scheduler = Scheduler(self.backend)
        builders = [
            ReplyBuilder(
                ready,
                self.tokenizer,
                StopStrings.from_option(options.get("stop"), self.tokenizer),
                self.name,
                self.backend.peak_memory_bytes,
            )
            for ready in plans
        ]
        tickets = [
            scheduler.add(decoder(ready.mode)(ready.request, self.backend.new_prefix()))
            for ready in plans
        ]
        index_of = {ticket: index for index, ticket in enumerate(tickets)}
        while not scheduler.idle:
            for ticket, event in scheduler.step():
                index = index_of[ticket]
                builder = builders[index]
                if builder.finished:
                    continue
                if isinstance(event, Failed):
                    yield index, builder.fail(event.error)
                    continue
                for made in builder.feed(event):
                    yield index, made
                if builder.finished:
                    scheduler.cancel(ticket)


def _checked_list(value: Any, what: str, kinds: str) -> Sequence[Any]:
    """The items of a list; bytes and mappings have items too, but of another kind."""
    items = cast("object", value.tolist() if isinstance(value, np.ndarray) else value)
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes, bytearray, memoryview)):
        raise PromptError(f"{what} is {shown(cast('object', items))}, but must be {kinds}")
    return cast("Sequence[Any]", items)
