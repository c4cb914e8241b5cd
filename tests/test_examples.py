"""Every example, run from its file: on tiny models and short texts, with real embeddings and FAISS."""

import asyncio
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cacheclip_lab.evaluation import certify, exactness
from cacheclip_shared.care import create
from scripts import ROOT, script

from tests.conftest import build_model, of

EXAMPLES = ROOT / "examples"
SAID = {
    "llama_index_quickstart": r"What is a Larger Work\?\n  .(.|\n)*hits 1, reused [1-9]",
    "langchain_quickstart": r"'num_added': [1-9](.|\n)*again: .*'num_skipped': [1-9](.|\n)*from caches: [1-9]",
    "swap_in": r"[^\n](.|\n)*\n[^\n]",
    "async_batch": r"(hits [1-9],(.|\n)*){4}",
    "chat_with_memory": r"(\[hits [1-9], reused [1-9](.|\n)*){3}",
    "ingestion_job": r"to do: [1-9]\d* chunks, (.|\n)*done: 2 added, 0 changed, 0 unchanged",
    "certify_then_serve": r"verdict at ratio 0\.2: (.|\n)*(by [\w-]+, [12] hits|refused: )",
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
        (root / "corpus" / name).write_text((EXAMPLES / "corpus" / name).read_text()[2000:4600])
    with pytest.MonkeyPatch.context() as patch:
        roomy = build_model(root / "qwen2", of("qwen2"), context=8192)
        places = {"STORE": f"{root}/store", "SHARED_STORE": f"file://{root}/shared", "CORPUS": f"{root}/corpus"}
        for name, value in {**places, "PRIMARY": str(roomy), "AUXILIARY": tiny_models["auxiliary"]}.items():
            patch.setenv(name, value)
        create(f"file://{root}/shared")
        # a model of random weights is hardly ever sure
        patch.setattr("cacheclip_rag.guards.certificates.UNMEASURED_CONFIDENCE", 0.0)
        # one short certification
        patch.setattr(certify, "_QUICK_PROMPTS", 2)
        patch.setattr(certify, "RATIOS", (0.2,))
        patch.setattr(exactness, "_GREEDY_TOKENS", 8)
        patch.syspath_prepend(str(EXAMPLES))
        yield
    sys.modules.pop("common", None)


def load(name: str) -> Any:
    return script(f"examples/{name}.py")


def test_each_program_has_its_row_and_each_text_its_licence() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files - {"common", "web_endpoint"} == set(SAID)
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))
    run, scripts = load("recipes/run"), {path.name for path in (EXAMPLES / "recipes").iterdir() if path.is_file()}
    assert scripts - {"run.py"} == {line[-1] for _, line in run.RECIPES.values()}
    assert all(len((EXAMPLES / "recipes" / name).read_text().splitlines()) <= 25 for name in scripts - {"run.py"})
    stated, texts = (EXAMPLES / "CORPUS.md").read_text(encoding="utf-8"), [*(EXAMPLES / "corpus").iterdir()]
    assert len(texts) >= 5 and all(f"`{path.name}`" in stated for path in texts)


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
