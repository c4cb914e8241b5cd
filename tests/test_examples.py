"""Every example, run from its file: on tiny models and short texts, with real embeddings and FAISS."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.evaluation import certify, exactness
from cacheclip_shared.care import create

from tests.conftest import build_model, of

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAID = {
    "llama_index_quickstart": r"What is a Larger Work\?\n  .(.|\n)*hits 1, reused [1-9]",
    "langchain_quickstart": r"'num_added': [1-9](.|\n)*again: .*'num_skipped': [1-9](.|\n)*from caches: [1-9]",
    "swap_in": r"[^\n](.|\n)*\n[^\n]",
    "async_batch": r"(hits [1-9],(.|\n)*){4}",
    "chat_with_memory": r"(\[hits [1-9], reused [1-9](.|\n)*){3}",
    "ingestion_job": r"to do: [1-9]\d* chunks, (.|\n)*done: 2 added, 0 changed, 0 unchanged",
    "certify_then_serve": r"verdict at ratio 0\.2: (.|\n)*(by \w+, [12] hits|refused: )",
    "tenants": r"north: hits 1(.|\n)*south: hits 0(.|\n)*released: 1",
    "ray_ingestion": r"[1-9]\d* texts: ([1-9]\d*) computed, [1-9]\d* new\nhits 1",
    "langgraph_rag": r"hits \d, misses [0-3](.|\n)*hits 3, misses 0",
}
"""What each prints, in part. A model of random weights also says control characters, which count as white space."""
LONG = ("ray_ingestion", "certify_then_serve")


@pytest.fixture(scope="module")
def surroundings(tiny_models: dict[str, str], minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.mktemp("examples")
    (root / "corpus").mkdir()
    for name in ("apache-2.0.txt", "mpl-2.0.txt"):
        text = (EXAMPLES / "corpus" / name).read_text()
        (root / "corpus" / name).write_text(text[2000:4600])
    with pytest.MonkeyPatch.context() as patch:
        roomy = build_model(root / "qwen2", of("qwen2"), context=8192)
        patch.setenv("PRIMARY", str(roomy))
        patch.setenv("AUXILIARY", tiny_models["auxiliary"])
        patch.setenv("STORE", str(root / "store"))
        patch.setenv("SHARED_STORE", f"file://{root}/shared")
        create(f"file://{root}/shared")
        # one short certification
        patch.setattr(certify, "_QUICK_PROMPTS", 2)
        patch.setattr(certify, "RATIOS", (0.2,))
        patch.setattr(exactness, "_GREEDY_TOKENS", 8)
        patch.setenv("CORPUS", str(root / "corpus"))
        patch.syspath_prepend(str(EXAMPLES))
        yield
    sys.modules.pop("common", None)


def load(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_has_its_row() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files - {"common", "web_endpoint"} == set(SAID)
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))


def test_the_program_beside_the_recipes_knows_each() -> None:
    run = load("recipes/run")
    scripts = {path.name for path in (EXAMPLES / "recipes").iterdir() if path.is_file()}
    assert scripts - {"run.py"} == {line[-1] for _, line in run.RECIPES.values()}
    assert all(len((EXAMPLES / "recipes" / name).read_text().splitlines()) <= 25 for name in scripts - {"run.py"})


def test_every_text_of_the_corpus_has_its_licence_stated() -> None:
    stated = (EXAMPLES / "CORPUS.md").read_text(encoding="utf-8")
    texts = [path.name for path in (EXAMPLES / "corpus").iterdir()]
    assert len(texts) >= 5 and all(f"`{name}`" in stated for name in texts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray")
@pytest.mark.filterwarnings("ignore::ResourceWarning:ray", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.some(8)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SAID]
)
def test_runs(name: str, surroundings: None, capsys: pytest.CaptureFixture[str]) -> None:
    main: Any = load(name).main
    if inspect.iscoroutinefunction(main):
        asyncio.run(main())
    else:
        main()
    said = capsys.readouterr().out
    assert re.search(SAID[name], said), said


def test_the_web_endpoint_streams(surroundings: None) -> None:
    from fastapi.testclient import TestClient

    client = TestClient(load("web_endpoint").app)
    with client.stream("GET", "/ask", params={"question": "What is a Larger Work?"}) as response:
        pieces = list(response.iter_text())
    assert response.status_code == 200 and len([piece for piece in pieces if piece]) > 3
    assert re.search(r"cacheclip_\w+ [1-9]", client.get("/metrics").text)
