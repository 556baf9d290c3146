"""A jinja2 environment for templates that nobody vouches for.

jinja2's sandbox keeps a template from reaching Python. This one also keeps it from eating the
machine: every render has a budget of work, and no value may grow past a bound.

    work      one unit for each loop turn, call, filter and operation,
              and one more for every 256 characters it touches
    bounds    no text or nest of lists that weighs more than MAX_VALUE characters,
              no number above MAX_INTEGER_BITS, no width above MAX_WIDTH

Both are far above what a chat template does with a full context, and far below what would hurt
(seconds of time, some hundred megabytes). What is over them raises jinja2's SecurityError.

Not here: messages and what is done with the text (`chat.py`).
Source: the environment chat templates are written for is that of transformers 5.24,
`utils/chat_template_utils.py`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WORK = 1_000_000
MAX_VALUE = 1 << 24
"""Characters of a text; what all texts in a list weigh together, and ENTRY for each entry."""
ENTRY = 32
MAX_INTEGER_BITS = 1024
MAX_WIDTH = 1000
"""Of a field, an indent, a tab: arguments that make a text larger by themselves."""
_TOUCHED_PER_UNIT = 256

_LONG_WIDTH = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""A field width in a format string that is absurd, or is taken from an argument."""
_PADDING_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson"})
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_REFUSED_METHODS = frozenset({"encode", "translate", "maketrans", "format_map"})

_work_left: ContextVar[list[int] | None] = ContextVar("_work_left", default=None)


class RefusedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget. One environment may render in many threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_count_output,
        )
        self.filters["tojson"] = to_json
        self.filters = {name: _bounded_filter(name, f) for name, f in self.filters.items()}
        # They make much out of little, and no chat template has a use for them.
        del self.globals["lipsum"], self.filters["wordwrap"]
        helpers: dict[str, Any] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.globals.update(helpers)

    def compile_template(self, source: str) -> jinja2.Template:
        """Compiles a template whose loops and joins count their work.

        Raises `jinja2.TemplateSyntaxError`; `RecursionError` or `SyntaxError` for absurd nesting.
        """
        return self.from_string(cast(nodes.Template, _Counting().visit(self.parse(source))))

    @contextmanager
    def budget(self) -> Generator[None]:
        """A fresh budget for one render in this thread."""
        token = _work_left.set([MAX_WORK])
        try:
            yield
        finally:
            _work_left.reset(token)

    def count_turns(self, values: Iterable[Any]) -> Iterator[Any]:
        """What a loop of the compiled template goes over: the same values, each one counted."""
        for value in values:
            _spend()
            yield value

    def weighed(self, value: Any) -> Any:
        """A list, tuple or object written in the template: the same, once it is no bomb."""
        _weigh(value)
        return value

    def join_texts(self, *values: object) -> str:
        """The operator `~`."""
        _spend(sum(map(_size, values)))
        texts = [str(value) for value in values]
        _spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _size(left) + _size(right)
        if operator == "*":
            size = max(_size(left) * _count(right), _size(right) * _count(left), size)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * max(1, _count(right)))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, (right,))
        _spend(size)
        result = super().call_binop(context, operator, left, right)
        _weigh(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The sandbox hands out its own `str.format`, with the original inside.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            args = _check_text_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        else:
            _spend()
        result = super().call(__context, __obj, *args, **kwargs)
        _weigh(result)
        return result


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without HTML escapes, as chat templates expect it."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """`{% generation %}`, which tells a trainer what to learn: its body, as transformers does."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Makes every loop, every `~` and every list go through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2's naming)
        self.generic_visit(node)
        counted = nodes.EnvironmentAttribute("count_turns")
        node.iter = nodes.Call(counted, [node.iter], [], None, None).set_lineno(node.lineno)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._weighed(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._weighed(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        # As a target of an assignment or a loop it is a pattern, not a value.
        return self._weighed(node) if node.ctx == "load" else self.generic_visit(node)

    def _weighed(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        weighed = nodes.EnvironmentAttribute("weighed")
        return nodes.Call(weighed, [node], [], None, None).set_lineno(node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("join_texts")
        return nodes.Call(joined, list(node.nodes), [], None, None).set_lineno(node.lineno)


def _spend(size: int = 0) -> None:
    """Takes work off the budget; outside a render (constants at compile time) only checks sizes."""
    if size > MAX_VALUE:
        raise SecurityError(f"a value of over {MAX_VALUE:,} characters or entries")
    left = _work_left.get()
    if left is not None:
        left[0] -= 1 + size // _TOUCHED_PER_UNIT
        if left[0] < 0:
            raise SecurityError(f"more than {MAX_WORK:,} units of work; it may never end")


def _count_output(value: Any) -> Any:
    _spend(_size(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # The environment or context comes first where a filter asks for it.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # keeps the mark that asks for it
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[first:]
        if name == "join" and given:
            values = [*cast("Iterator[Any]", given[0] or ())]
            glue = kwargs.get("d", given[1] if len(given) > 1 else "")
            _spend(_size(glue) * len(values) + sum(map(_size, values)))
            args = (*args[:first], values, *given[1:])
        elif name == "replace" and len(given) >= 3:
            _check_replace(str(given[0]), str(given[1]), str(given[2]))
        elif name == "format" and given:
            _check_format(str(given[0]), (*given[1:], kwargs))
        elif name == "indent" and len(given) > 1:
            _spend(_size(given[0]) * max(1, _size(given[1])))
        _spend(_size(given[0]) if given else 0)
        if name in _PADDING_FILTERS:
            _check_widths(sum(map(_size, given)), given[1:], kwargs)
        result = function(*args, **kwargs)
        _weigh(result)
        return result

    return bounded


def _check_text_method(
    owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    if name in _REFUSED_METHODS:
        raise SecurityError(f"str.{name} is not available to templates")
    if name == "format":
        _check_format(owner, (*args, kwargs))
    elif name in _PADDING_METHODS:
        _check_widths(len(owner), args, kwargs)
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        values = [*args[0]]
        _spend(len(owner) * len(values) + sum(map(_size, values)))
        return (values,)
    return args


def _check_widths(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """No width, indent or count that makes much out of `size` characters or entries."""
    numbers = [_count(value) for value in (*args, *kwargs.values())]
    widest = max(numbers, default=0)
    if widest > MAX_WIDTH:
        raise SecurityError(f"a width or count of {widest}")
    _spend(size * max(1, widest))


def _check_replace(text: str, old: str, new: str) -> None:
    _spend(len(text) + text.count(old) * len(new))


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    fields = text.count("{") + text.count("%")
    _spend(fields * (MAX_WIDTH + _weigh(values)))
    if _LONG_WIDTH.search(text):
        raise SecurityError("a format with a width of four digits or one taken from a value")


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SecurityError("a number too large to compute")


def _size(value: Any) -> int:
    """Characters or entries of a value that an operation is about to touch."""
    if isinstance(value, Namespace):
        raise SecurityError("a namespace used as a value")  # its text may be without end
    return len(cast("list[Any]", value)) if isinstance(value, (str, list, tuple, dict)) else 0


def _weigh(value: Any) -> int:
    """The characters a value and all it holds would make; raises when they are too many.

    Each list is weighed when it is made, so that nests cannot double unseen.
    """
    if not isinstance(value, (list, tuple, dict)):
        _spend(size := _size(value) if isinstance(value, str) else 0)
        return size
    total = 0
    todo: list[Any] = [cast("object", value)]
    while todo and total <= MAX_VALUE:
        item = todo.pop()
        total += _size(item) if isinstance(item, (str, Namespace)) else ENTRY
        if isinstance(item, (list, tuple)):
            todo += cast("list[Any]", item)
        elif isinstance(item, dict):
            todo += [*cast("dict[Any, Any]", item).keys(), *cast("dict[Any, Any]", item).values()]
    _spend(total)
    return total


def _count(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
