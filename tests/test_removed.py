"""Names of earlier versions are refused with what to use instead."""

import importlib
import subprocess
import sys
from dataclasses import fields

import pytest

from cacheclip_rag import EngineConfig
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.base.names import METHODS, MODULES, NAMES, OPTIONS, SETTINGS, refuse_removed_modules
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


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    for module in (name, f"{name}.inner"):
        with pytest.raises(ImportError) as error:
            importlib.import_module(module)
        assert str(error.value) == MODULES[name]


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError) as error:
        getattr(importlib.import_module(module), attribute)
    assert str(error.value) == NAMES[name]


def test_a_module_is_refused_in_whatever_way_it_is_imported() -> None:
    for statement in ("import cacheclip_rag.ingest.job", "from cacheclip_rag import ingest"):
        done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
        assert done.returncode == 1 and f"ImportError: {MODULES['cacheclip_rag.ingest']}" in done.stderr, statement


def test_other_modules_are_none_of_its_business() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'cacheclip_rag.ingests'"):
        importlib.import_module("cacheclip_rag.ingests")
    before = [*sys.meta_path]
    refuse_removed_modules()
    assert sys.meta_path == before, "one is enough"


def test_each_says_what_to_use() -> None:
    assert all("explain_miss" in MODULES[f"cacheclip_rag.{room}.explain"] for room in ("adapters", "cli"))
    for name, sentence in {**METHODS, **SETTINGS, **OPTIONS, **MODULES, **NAMES}.items():
        setting, _, value = name.partition("=")
        shown = f"{setting}={value!r}" if value else name
        assert sentence.startswith((f"{shown} is gone", f"{shown} is no option")) and sentence.endswith("."), name
