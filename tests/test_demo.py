"""The demo's corpus and questions; the demo itself is a command (``make demo``), too long for a test."""

from __future__ import annotations

import ast
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_every_text_of_the_corpus_has_its_licence_stated() -> None:
    stated = (EXAMPLES / "CORPUS.md").read_text(encoding="utf-8")
    texts = sorted(path.name for path in (EXAMPLES / "corpus").iterdir())
    assert len(texts) >= 5
    assert all(f"`{name}`" in stated for name in texts)


def test_the_demo_imports_what_exists() -> None:
    """Each name that the demo imports from this project is there."""
    import importlib

    tree = ast.parse((EXAMPLES / "demo.py").read_text(encoding="utf-8"))
    ours = ("cacheclip_rag", "langchain_cacheclip", "llama_index.llms.cacheclip")
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith(ours)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
