"""Names of earlier versions are refused with what to use instead."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cacheclip_rag import EngineConfig
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.base.removed import METHODS, OPTIONS, SETTINGS
from cacheclip_rag.methods import PRESET_NAMES, check_method


def test_settings() -> None:
    assert not set(SETTINGS) & {each.name for each in fields(EngineConfig)}
    for name, sentence in SETTINGS.items():
        setting, _, value = name.partition("=")
        with pytest.raises(ConfigurationError) as error:
            EngineConfig.from_options(None, {setting: value or "any"})
        assert str(error.value) == sentence


def test_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(METHODS) & set(PRESET_NAMES)
    monkeypatch.setitem(METHODS, "planted", "planted is gone: use epic.")
    for name, sentence in METHODS.items():
        with pytest.raises(ConfigurationError) as error:
            check_method(name)
        assert str(error.value) == sentence


def test_each_says_what_to_use() -> None:
    for name, sentence in {**METHODS, **SETTINGS, **OPTIONS}.items():
        setting, _, value = name.partition("=")
        shown = f"{setting}={value!r}" if value else name
        assert sentence.startswith((f"{shown} is gone", f"{shown} is no option")) and sentence.endswith("."), name
