"""GGUF files as transformers folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from cacheclip_lab.packaged.convert import convert_gguf
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_it_is_what_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which opens the file three times, and is as it was behind us."""
    opened = []

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __init__(self, path: Any) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    names, source, target = gguf.get_tensor_name_map, write_gguf(tmp_path, "qwen2"), tmp_path / "converted"
    target.mkdir()
    convert_gguf(source, target, name="a model", source_sha256="0")
    assert len(opened) == 1 and (gguf.GGUFReader, gguf.get_tensor_name_map) == (Reader, names)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, dtype=torch.float32).state_dict()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)
    assert len(opened) > 2
    ours = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    assert weights and all(torch.equal(weights[name], each) for name, each in ours.items())
    tokenizer.save_pretrained(tmp_path / "theirs")
    written = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    assert "tokenizer.json" in written and written.items() <= {f.name: f.read_bytes() for f in target.iterdir()}.items()
