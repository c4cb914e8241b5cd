"""What this distribution takes from the core, and what it gives to others."""

from __future__ import annotations

from pathlib import Path

import llama_index.llms.cacheclip as llms
import llama_index.response_synthesizers.cacheclip as synthesizers
import llama_index.storage.docstore.cacheclip as docstores
import pytest
from adapter_cases import run_readme
from cacheclip_testing import names_outside_the_door
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.storage.docstore import BaseDocumentStore


def test_it_takes_names_of_public_modules_only() -> None:
    for package in (llms, synthesizers, docstores):
        assert names_outside_the_door(Path(str(package.__file__)).parent) == set()


def test_classes() -> None:
    """As every package of LlamaIndex's tests it."""
    assert BaseLLM in llms.CacheClipLLM.__mro__
    assert BaseSynthesizer in synthesizers.CacheClipSynthesizer.__mro__
    assert BaseDocumentStore in docstores.CacheClipDocumentStore.__mro__


def test_readme(tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program, on tiny models."""
    run_readme(Path(__file__).parents[1], tiny_models, tmp_path)
    assert capsys.readouterr().out.split()[-1] == "1", "the document is a hit"
