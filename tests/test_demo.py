"""The demo's corpus and questions; the demo itself is a command (``make demo``), too long for a test."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]

pytestmark = pytest.mark.usefixtures("no_garbage")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_every_text_of_the_corpus_has_its_licence_stated() -> None:
    stated = (EXAMPLES / "CORPUS.md").read_text(encoding="utf-8")
    texts = sorted(path.name for path in (EXAMPLES / "corpus").iterdir())
    assert len(texts) >= 5
    assert all(f"`{name}`" in stated for name in texts)


@pytest.mark.parametrize(("primary", "without_auxiliary"), [("big", "anchored"), ("big.gguf", "epic")])
def test_each_prompt_is_compared_with_its_own_prefill(
    primary: str, without_auxiliary: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer prompts are no spread, and a run that was disturbed shows."""
    for name in ("library.Library", "embedding.Embedder"):
        monkeypatch.setattr(f"cacheclip_ingest.{name}", lambda *_: None)
    monkeypatch.setenv("PRIMARY", f"packaged:{primary}")
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    get_dispatcher().event_handlers.remove(demo.last_chat)  # it would see the chats of other tests
    assert Path(demo.STORE).name == f"packaged-{primary}", "a store of texts is for one primary"
    times = {"full": [10, 20, 40], "direct": [1, 2, 4], without_auxiliary: [5, 5, 10], "cacheclip": [2, 20, 8]}

    def generate(messages: Any, params: Any, *, method: str) -> Any:
        counts = {"effective_ratio": 0.2, "reused_tokens": 100, "recomputed_tokens": 20}
        stats = {"ttft_s": times[method][messages], **counts}
        return SimpleNamespace(stats=SimpleNamespace(to_dict=lambda: stats))

    engine = SimpleNamespace(
        config=SimpleNamespace(primary=primary, auxiliary="small"),
        prefixes=SimpleNamespace(clear=lambda: None),
        generate=generate,
    )
    demo.print_table(engine, [(number // 2, {}, []) for number in range(6)])
    said = capsys.readouterr().out
    assert re.search(r"full .*20\.00 s.* 1\.00x .*1\.00-1\.00x", said)
    assert re.search(r"direct .* 2\.00 s.* 10\.00x .*10\.00-10\.00x", said)
    assert re.search(r"cacheclip .* 8\.00 s.* 5\.00x .*1\.00-5\.00x", said)


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
