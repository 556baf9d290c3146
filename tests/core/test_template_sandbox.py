"""A hostile template reaches nothing, and what it asks for is refused soon and on one line."""

from __future__ import annotations

import resource
import sys
import threading
import time

import pytest

from dgemma.chat import ChatTemplate
from dgemma.errors import PromptError

MESSAGES = [{"role": "user", "content": "x"}]
SECONDS = 20
"""On a busy machine; a budget is spent in two or three on an idle one."""


def doubling(step: str, start: str = "'aaaa'") -> str:
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )


BOMBS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "loops without calls": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}"
    "{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "a constant": "{{ 'a' * 9999999999 }}",
    "a power": "{{ 2 ** 2 ** 2 ** 2 ** 2 ** 9 ** 9 }}",
    "a power of powers": doubling("ns.x ** 9", "2"),
    "adding": doubling("ns.x + ns.x"),
    "adding lists": doubling("ns.x + ns.x", "[1]"),
    "joining": doubling("ns.x ~ ns.x"),
    "the filter join": doubling("[ns.x, ns.x, ns.x] | join(ns.x)"),
    "the method join": doubling("ns.x.join([ns.x, ns.x, ns.x])"),
    "the filter replace": doubling("ns.x | replace('a', 'aaaaaaaa')"),
    "the method replace": doubling("ns.x.replace('', 'aaaaaaaa')"),
    "nested lists": doubling("[ns.x, ns.x]", "[1]"),
    "nested objects": doubling("{'a': ns.x, 'b': (ns.x,)}", "[1]"),
    "nested namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "captured output": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "long output": "{% set x = 'a' * 9999999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width as a filter": "{{ '%1000000000d' | format(1) }}",
    "a width in braces": "{{ '{:1000000000d}'.format(1) }}",
    "a width from a value": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a starred width": "{{ '%*d' % (10 ** 9, 1) }}",
    "many fields": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "many named fields": "{{ ('%(a)s' * 100000) % {'a': 'a' * 1000000} }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10 ** 6) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(10 ** 5) }}",
    "indent by text": "{{ ('a\\n' * 100000) | indent('b' * 10000) }}",
    "json": "{{ range(90000) | list | tojson(indent=100000) }}",
    "many widths": "{{ range(99999) | map('center', 16000000) | list | length }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_would_take_the_machine_is_refused(name: str) -> None:
    template = ChatTemplate(BOMBS[name], {}, "t.jinja")
    started = time.perf_counter()
    with pytest.raises(PromptError, match=r"t\.jinja refuses") as caught:
        template.render(MESSAGES)
    assert time.perf_counter() - started < SECONDS
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.skipif(sys.platform == "win32", reason="no such measure there")
def test_and_has_not_taken_it_on_the_way() -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for source in BOMBS.values():
        if "range(999" not in source and "f(60)" not in source:
            with pytest.raises(PromptError):
                ChatTemplate(source).render(MESSAGES)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    assert grown < 1 << 30


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__name__ }}",
        "{{ (messages | attr('append'))(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ range.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ count_turns.__self__ }}{{ missing.name }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ '{0.__class__}'.format('') }}{{ missing.name }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
    ],
)
def test_a_template_reaches_nothing(source: str) -> None:
    messages = [dict(MESSAGES[0])]
    with pytest.raises(PromptError, match=r"t\.jinja refuses") as caught:
        ChatTemplate(source, {}, "t.jinja").render(messages)
    assert "\n" not in str(caught.value)
    assert messages == MESSAGES


def test_a_refusal_is_said_in_the_templates_words_on_one_line() -> None:
    template = ChatTemplate(
        "{{ raise_exception('only\none turn ' ~ messages[0].content) }}", {}, "t"
    )
    with pytest.raises(PromptError, match="t refuses these messages: only one turn x"):
        template.render(MESSAGES)
    with pytest.raises(PromptError) as caught:
        template.render([{"role": "user", "content": "y" * 100_000}])
    assert len(str(caught.value)) < 500


def test_a_conversation_as_long_as_the_context_is_within_the_budget() -> None:
    template = ChatTemplate(
        "{% macro clean(text) %}{% set ns = namespace(r='') %}{% for p in text.split('<c>') %}"
        "{% set ns.r = ns.r + p.split('<d>')[0] %}{% endfor %}{{ ns.r | trim }}{% endmacro %}"
        "{% for m in messages %}{{ '<|turn>' + m.role + '\n' }}{{ clean(m.content) }}{% endfor %}"
    )
    many = [{"role": "user", "content": "word " * 100} for _ in range(5000)]
    assert template.render(many).count("<|turn>") == 5000
    long = [{"role": "user", "content": "word " * 800_000}]
    assert len(template.render(long)) > 3_900_000


def test_each_render_has_a_budget_of_its_own() -> None:
    template = ChatTemplate(
        "{% for i in range(60000) %}{% for j in 'abc' %}{% endfor %}{% endfor %}ok"
    )
    results: list[str] = []

    def work() -> None:
        for _ in range(3):
            results.append(template.render(MESSAGES))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["ok"] * 9
