"""Chat templates that would run for hours are stopped, and others are rendered as transformers does."""

from pathlib import Path
from typing import Any

import pytest
from tool_templates import TOOLS_TEMPLATE

from cacheclip_rag import CacheClipEngine, ConfigurationError, ModelError
from cacheclip_rag.measuring import ModelRuntime
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers import text
from tests.conftest import CACHECLIP, LLAMA, TINY_MODELS, Models, Patch, build_model

ENDLESS = r"""
'xy' | center(9999999999)
'xy' | indent(9999999999)
'xy' | indent('x' * 999999999)
'xy' | batch(9999999999, 'x') | list
'xy' | slice(9999999999) | list
'xy' | tojson(indent=9999999999)
'x'.center(9999999999)
'x'.ljust(9999999999)
'x'.rjust(9999999999)
'x'.zfill(9999999999)
'\t'.expandtabs(2147483647)
('x' * 9999).replace('x', 'y' * 9999999)
('x' * 9999).join(['y'] * 99999)
('x' * 9999).join(range(99999) | map('string'))
'{:>9999999999}'.format('x')
'{:>{}}'.format('x', 9999999999)
('{0}' * 9999).format('x' * 999999)
'{x:>9999999999}'.format_map({'x': 'y'})
('x' * 9999).translate({120: 'y' * 9999999})
(1).to_bytes(9999999999, 'big')
'%9999999999d' % 1
'%*d' % (9999999999, 1)
'%s' * 9999 % (('x' * 9999999,) * 9999)
'%9999999999d' | format(1)
"""
HOSTILE = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "side by side": "{% for a in range(99) %}" + "{% for b in range(9999) %}x{% endfor %}" * 9 + "{% endfor %}",
    "filtered loop": "{% for a in range(9999) %}{% for b in range(9999) if b < 0 %}x{% endfor %}{% endfor %}",
    "recursive loop": (
        "{% for a in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}{% endif %}{% endfor %}"
    ),
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "caller": (
        "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro f(n) %}{% if n %}{% call g() %}{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(50) }}"
    ),
    "block": (
        "{% set n = namespace(d=0) %}{% block b %}{% if n.d < 60 %}{% set n.d = n.d + 1 %}{{ self.b() }}{{ self.b() }}"
        "{% set n.d = n.d - 1 %}{% endif %}{% endblock %}"
    ),
    "long text": "{% for a in range(9999) %}{% for b in range(9999) %}" + "x" * 100_000 + "{% endfor %}{% endfor %}",
    "long steps": "{% for a in range(9999) %}{% set x = range(99999) | list | sort %}{% endfor %}",
    "doubled": "{% set x = 'x' * 999 %}" + "{% set x = x ~ x %}" * 40,
    "doubled in a loop": "{% set n = namespace(x='x') %}{% for a in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list doubled": "{% set x = ['x' * 999] %}" + "{% set x = x + x %}" * 40,
    "list of lists": "{% set x = ['x'] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "object of objects": "{% set x = 'x' %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "pairs": "{% set x = 'x' %}" + "{% set x = (x, x) %}" * 60 + "{{ x | string }}",
    "repeated": "{{ 'x' * 9999999999 }}",
    "repeated list": "{% set x = ['x'] * 999999999 %}",
    "repeated, number first": "{{ 99999999999 * 'x' }}",
    "power": "{{ 9 ** 999999999 }}",
    "squares": "{% set n = namespace(x=9) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "long output": "{% set x = 'x' * 9999999 %}{% for a in range(99) %}{{ x }}{% endfor %}",
    "kept output": "{% set x = 'x' * 9999999 %}{% set y %}{% for a in range(99) %}{{ x }}{% endfor %}{% endset %}",
    "computed number": "{{ 'x' | center(99999 * 99999) }}",
    "several": "{% set x = 'x' * 999999 %}{{ x | replace('x', x) }}",
    "joined": "{% set x = 'x' * 99999 %}{{ x | join(x) }}",
    "joined items": "{% set x = 'x' * 99999 %}{{ range(99999) | map('string') | join(x) }}",
    "mapped": "{{ range(99999) | map('string') | map('center', 99999) | join }}",
    "mapped at once": "{{ range(99999) | map('center', 99999) | join }}",
    "filtered block": "{% filter center(9999999999) %}x{% endfilter %}",
    "filtered block of two": "{% filter upper | center(9999999999) %}x{% endfilter %}",
    "filtered text": "{% set x | center(9999999999) %}x{% endset %}",
    "by a name that is made": "{{ 'x'[('cen' ~ 'ter')](9999999999) }}",
    "by attr": "{{ ('x' | attr('center'))(9999999999) }}",
    **{f"method {each}": "{{ " + each + " }}" for each in ENDLESS.strip().splitlines()},
    "training": (
        "{% generation %}{% for a in range(9999) %}{% for b in range(999) %}{% endfor %}{% endfor %}{% endgeneration %}"
    ),
}
USER: list[dict[str, Any]] = [{"role": "user", "content": " What <b>is</b> it? \n"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": USER,
    "a conversation": [{"role": "system", "content": "Be short."}, *USER, {"role": "assistant", "content": "A"}, *USER],
    "many messages": [*USER, {"role": "assistant", "content": "No."}] * 200,
}
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "<Looks> up.", "parameters": {"type": "object"}},
}
PLAIN = {
    "loops": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if not loop.last %},{{ loop.nextitem.role }}"
        "{% endif %}{% for c in m.content if c != 'W' %}{{ c }}{% else %}-{% endfor %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "macros": (
        "{%- macro one(m, end='.') -%}{{ m.role }}: {{ m.content | trim }}{{ end }}{{ caller() if caller }}"
        "{%- endmacro -%}\n"
        "    {% for m in messages[:2] -%} {% call one(m, end='!') %}{{ loop.index0 }}{% endcall %} {%- endfor %}\n"
    ),
    "training": (
        "{% for m in messages[:3] %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "tools": TOOLS_TEMPLATE,
    "all that is counted": (
        "{% for m in messages[:3] %}{{ m.role ~ m['content'] ~ 3 }}{{ '%s: %5d' % (m.role, 3) }}{{ [1, 'a', none, m] }}"
        "{{ {'a': m.role} | tojson(indent=2) }}{{ 'a' * 3 + m.content.replace('<', '>>') }}{{ 2 ** 3 * 2.5 % 4 + 1 }}"
        "{{ m | items | list }}{{ m.content.split('<')[-1].strip('\n') | center(30) }}{{ nothing | default('d') }}"
        "{{ nothing }}{{ messages | map(attribute='role') | join(', ') }}{{ ('a', 'b') | map('upper') | list }}"
        "{{ '{:>4}{x}'.format(m.role, x=2) }}{{ ', '.join(['a', 'b']) }}{{ 1 if messages | map('upper') else 2 }}"
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}{% set x, y = 1, 'z' %}{{ x }}{{ y * 2 }}"
        "{% filter upper | replace('A', 'bb') %}a{{ m.role }}{% endfilter %}{% set t | upper | trim %} s{{ m.role }} "
        "{% endset %}{{ t }}{% set n = namespace(a=[]) %}{% set n.a = n.a + [m.role] %}{{ n.a }}{% set n.t | upper %}q"
        "{% endset %}{{ n.t }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ m.content is string and m.role in ('user', 'system') }}{{ (m.content | string)[1:-1] | e }}{% endfor %}"
    ),
    "every message for every message": (
        "{% set n = namespace(n=0) %}{% for m in messages[:100] %}{% for o in messages[:100] %}"
        "{% if o.role == m.role %}{% set n.n = n.n + 1 %}{% endif %}{% endfor %}{% endfor %}{{ n.n }}"
    ),
}


@pytest.fixture(scope="module")
def runtime(tiny_models: Models) -> ModelRuntime:
    return load_model(tiny_models["llama"])


def as_transformers(runtime: ModelRuntime, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return str(runtime.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools))


class TestHostile:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("name", HOSTILE)
    def test_is_stopped(self, runtime: ModelRuntime, monkeypatch: Patch, name: str) -> None:
        monkeypatch.setattr(runtime.tokenizer, "chat_template", HOSTILE[name])
        monkeypatch.setattr(text, "_MOST_STEPS", 10_000)  # for the time of the tests
        monkeypatch.setattr(text, "_MOST_TEMPLATE_S", 0.05)
        with pytest.raises(ModelError, match=r"chat template of .*llama.* was stopped.*publisher"):
            runtime.render_chat([{"role": "user", "content": "a"}])
        monkeypatch.undo()
        assert runtime.render_chat(USER) == as_transformers(runtime, USER), "the next one has its own steps"

    def test_by_messages(self, runtime: ModelRuntime, monkeypatch: Patch) -> None:
        """It is no fault of the model."""
        monkeypatch.setattr(text, "_MOST_STEPS", 100_000)  # for the time of the tests
        over = "{% for c in m.content %}{% for d in m.content %}{% endfor %}{% endfor %}"
        template = "{% for m in messages %}" + over + "ok{% endfor %}"
        monkeypatch.setattr(runtime.tokenizer, "chat_template", template)
        assert runtime.render_chat(USER) == "ok"
        only_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
        for role, each in (("user", template), ("system", only_system + template)):
            monkeypatch.setattr(runtime.tokenizer, "chat_template", each)
            with pytest.raises(ConfigurationError, match="was stopped.*1 messages needs. Shorten"):
                runtime.render_chat([{"role": role, "content": "x" * 9999}])
        monkeypatch.setattr(runtime.tokenizer, "chat_template", "{{ lipsum(n=99999999) }}")
        with pytest.raises(ConfigurationError, match="refuses"):  # a function that writes without end
            runtime.render_chat(USER)

    def test_when_a_model_is_loaded(self, tmp_path: Path, tiny_models: Models, monkeypatch: Patch) -> None:
        monkeypatch.setattr(text, "_MOST_STEPS", 100_000)
        folder = build_model(tmp_path / "endless", LLAMA)
        (folder / "chat_template.jinja").write_text(HOSTILE["loops"] + "{{ messages[0].content }}")
        engine = CacheClipEngine(primary=str(folder), auxiliary=tiny_models["auxiliary"], **CACHECLIP)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="endless.* was stopped"):
            engine.warm_up()
        engine.close()


class TestOthers:
    @pytest.mark.some(4)
    @pytest.mark.parametrize("chat", CHATS)
    @pytest.mark.parametrize("name", PLAIN)
    def test_are_rendered_as_transformers_does(
        self, runtime: ModelRuntime, monkeypatch: Patch, name: str, chat: str
    ) -> None:
        monkeypatch.setattr(runtime.tokenizer, "chat_template", PLAIN[name])
        for tools in (None, [TOOL]):
            assert runtime.render_chat(CHATS[chat], tools=tools or ()) == as_transformers(runtime, CHATS[chat], tools)

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_of_tiny_models(self, tiny_models: Models, name: str) -> None:
        runtime = load_model(tiny_models[name])
        for messages in CHATS.values():
            assert runtime.render_chat(messages) == as_transformers(runtime, messages)
