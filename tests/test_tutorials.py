"""The program of each tutorial, run as it stands: on tiny models, with real embeddings."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import build_model, of

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs/pages/tutorials").glob("*.md"))


def program(page: Path) -> str:
    """The first block of code, which the text calls a whole program."""
    text = page.read_text(encoding="utf-8")
    assert "A whole program" in text.partition("```python")[0]
    return text.partition("```python\n")[2].partition("\n```")[0]


@pytest.mark.long
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_it_runs(page: Path, tiny_models: Any, minilm: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    code, roomy = program(page), build_model(tmp_path / "qwen2", of("qwen2"), context=8192)
    models = f'model="{roomy}", auxiliary="{tiny_models["auxiliary"]}", max_tokens=16'
    for named, instead in (
        ('model="Qwen/Qwen2.5-0.5B-Instruct"', models),
        ("sentence-transformers/all-MiniLM-L6-v2", "packaged:all-MiniLM-L6-v2"),
    ):
        assert code.count(named) == 1
        code = code.replace(named, instead)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    from llama_index.core import Settings

    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    names: dict[str, Any] = {"__name__": "tutorial"}
    monkeypatch.setitem(sys.modules, "tutorial", type(sys)("tutorial"))
    for _ in range(2):  # the second time, everything is stored
        exec(code, names)
        said = capsys.readouterr().out
        assert re.search(r" [1-9]\d*\n$", said), said
    assert (tmp_path / "my-store").is_dir()
