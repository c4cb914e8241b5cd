"""Chat templates that would run for hours are stopped, and others are rendered as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.errors import ConfigurationError, ModelError
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from tests.conftest import CACHECLIP, LLAMA, TINY_MODELS, TOOLS_TEMPLATE, build_model

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
    "training": (
        "{% generation %}{% for a in range(9999) %}{% for b in range(999) %}{% endfor %}{% endfor %}{% endgeneration %}"
    ),
}
USER: list[dict[str, Any]] = [{"role": "user", "content": " What <b>is</b> it? \n"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": USER,
    "a conversation": [{"role": "system", "content": "Be short."}, *USER, {"role": "assistant", "content": "A"}, *USER],
    "many messages": [*USER, {"role": "assistant", "content": "No."}] * 1000,
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
    "every message for every message": (
        "{% set n = namespace(n=0) %}{% for m in messages[:300] %}{% for o in messages[:300] %}"
        "{% if o.role == m.role %}{% set n.n = n.n + 1 %}{% endif %}{% endfor %}{% endfor %}{{ n.n }}"
    ),
}


@pytest.fixture(scope="module")
def runtime(tiny_models: dict[str, str]) -> ModelRuntime:
    return load_model(tiny_models["llama"])


def as_transformers(runtime: ModelRuntime, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return str(runtime.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools))


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_is_stopped(self, runtime: ModelRuntime, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(runtime.tokenizer, "chat_template", HOSTILE[name])
        with pytest.raises(ModelError, match=r"chat template of .*llama.* was stopped.*publisher"):
            runtime.render_chat(USER)
        monkeypatch.undo()
        assert runtime.render_chat(USER) == as_transformers(runtime, USER), "the next one has its own steps"

    def test_a_function_that_writes_without_end(self, runtime: ModelRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runtime.tokenizer, "chat_template", "{{ lipsum(n=99999999) }}")
        with pytest.raises(ConfigurationError, match="refuses"):
            runtime.render_chat(USER)

    def test_when_a_model_is_loaded(self, tmp_path: Path, tiny_models: dict[str, str]) -> None:
        folder = build_model(tmp_path / "endless", LLAMA)
        (folder / "chat_template.jinja").write_text(HOSTILE["loops"] + "{{ messages[0].content }}")
        engine = CacheClipEngine(primary=str(folder), auxiliary=tiny_models["auxiliary"], **CACHECLIP)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="endless.* was stopped"):
            engine.warm_up()
        engine.close()


class TestOthers:
    @pytest.mark.parametrize("chat", CHATS)
    @pytest.mark.parametrize("name", PLAIN)
    def test_are_rendered_as_transformers_does(
        self, runtime: ModelRuntime, monkeypatch: pytest.MonkeyPatch, name: str, chat: str
    ) -> None:
        monkeypatch.setattr(runtime.tokenizer, "chat_template", PLAIN[name])
        for tools in (None, [TOOL]):
            assert runtime.render_chat(CHATS[chat], tools=tools or ()) == as_transformers(runtime, CHATS[chat], tools)

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_of_tiny_models(self, tiny_models: dict[str, str], name: str) -> None:
        runtime = load_model(tiny_models[name])
        for messages in CHATS.values():
            assert runtime.render_chat(messages) == as_transformers(runtime, messages)
