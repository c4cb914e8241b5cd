"""The README's code runs as it stands there, and its facts are those of the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def block(marker: str) -> str:
    (found,) = [b for b in BLOCKS if marker in b]
    return found


@pytest.mark.slow
def test_engine_block_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """On the small packaged model in both roles: the default primary is a download of half a gigabyte."""
    code = block("CacheClipEngine").replace("qwen2.5-coder-0.5b", "smollm2-135m")
    names: dict[str, Any] = {}
    exec(code, names)
    assert "1847" in names["answer"].text
    assert names["answer"].stats.hits == 2
    assert names["answer"].text in capsys.readouterr().out


def test_llama_index_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over no documents: the default primary is a download of half a gigabyte."""
    from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.query_engine import RetrieverQueryEngine

    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(8))
    names: dict[str, Any] = {"documents": [], "splitter": SentenceSplitter(), "VectorStoreIndex": VectorStoreIndex}
    exec(block("CacheClipLLM"), names)
    assert isinstance(names["query_engine"], RetrieverQueryEngine)
    assert names["CacheClipTransform"].from_llm(names["llm"]).store == names["llm"].store == "my-store"


def test_langchain_block() -> None:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.chains.retrieval import create_retrieval_chain
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import Runnable, RunnableLambda
    from langchain_core.vectorstores import InMemoryVectorStore

    names: dict[str, Any] = {
        "create_retrieval_chain": create_retrieval_chain,
        "create_stuff_documents_chain": create_stuff_documents_chain,
        "retriever": RunnableLambda(lambda question: []),
        "vector_store": InMemoryVectorStore(DeterministicFakeEmbedding(size=8)),
        "prompt": ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")]),
    }
    exec(block("create_retrieval_chain"), names)
    assert isinstance(names["chain"], Runnable)


def test_guarded_block() -> None:
    names: dict[str, Any] = {}
    exec(block("guarded"), names)
    config = names["guarded"].engine.config
    assert config.require_certificate and config.shadow_rate == 0.01


def test_architectures_table_names_them_all() -> None:
    """By the words of the table, without punctuation: Qwen2/2.5 for qwen2, OLMo 2 for olmo2."""
    from cacheclip_rag.runtime.transformers.architectures import SUPPORTED

    table = re.sub(r"[^a-z0-9|]", "", README.partition("| architecture |")[2].partition("\n\n")[0].lower())
    for model_type in SUPPORTED:
        assert model_type.removesuffix("_text").replace("_", "") in table, model_type


def test_every_block_is_run_here() -> None:
    assert len(BLOCKS) == 4


def test_methods_table_lists_the_registry() -> None:
    from cacheclip_rag.methods import METHODS

    table = README.partition("## Methods")[2].partition("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(METHODS)


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"\b[A-Z]{3,}_[A-Z]{3,}\b", README.replace("CACHECLIP_HOME", "").replace("TORCH_INDEX", ""))
    assert "TODO" not in README


def test_thresholds_are_those_of_the_package() -> None:
    from cacheclip_rag.guards.certificate import THRESHOLDS

    said = "mean KL {first_token_kl:g} at the first token and {answer_kl:g} along the answer, {agreement:.0%} equal"
    assert said.format(**THRESHOLDS).replace("95%", "95 %") in " ".join(README.split())


def test_no_weights_needed_to_read_the_public_names() -> None:
    import cacheclip_rag

    assert all(getattr(cacheclip_rag, name) is not None for name in cacheclip_rag.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cacheclip_rag.nothing
