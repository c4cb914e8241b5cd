"""Ingestion across processes: workers of a pipeline, and a run that is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from adapter_cases import exit_code_of
from cacheclip_testing import SENTENCES, FakeRuntime
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

from cacheclip_rag.models import register_runtime


class Killed(FakeRuntime):
    def encode(self, ids: Sequence[int], context: Any = None) -> Any:
        if len(self.encoded) == 3:  # what chunks are computed behind, and two of them
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(ids, context)


def pipeline_of(llm: CacheClipLLM) -> tuple[IngestionPipeline, list[Document]]:
    """A stock pipeline, and six documents of one chunk each."""
    parts = [SentenceSplitter(), CacheClipTransform.from_llm(llm)]
    documents = [Document(text=text, id_=f"doc-{n}") for n, text in enumerate(SENTENCES[:6])]
    return IngestionPipeline(transformations=parts), documents


def hits(llm: CacheClipLLM) -> int:
    prompt = "\n\n".join([*SENTENCES[:6], "Who kept the lamp?"])
    return int(llm.complete(prompt, max_tokens=1).additional_kwargs["cacheclip"]["hits"])


def test_two_workers_fill_one_store(llm: CacheClipLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, because importing everything again takes seconds; what workers get is pickled all the same."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: forking)
    # a splitter's tokenizer looks here for its vocabulary when a worker unpickles it; without it, in the network
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(llama_index.core.__file__).parent / "_static/tiktoken_cache"))
    pipeline, documents = pipeline_of(llm)
    nodes = pipeline.run(documents=documents, num_workers=2)
    assert [node.get_content(MetadataMode.LLM) for node in nodes] == SENTENCES[:6]
    assert hits(llm) == 6
    llm.engine.release(sources=["doc-0", nodes[1].node_id])
    assert hits(llm) == 4, "the sources are known here, too"


def test_a_killed_run_goes_on(llm: CacheClipLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        pipeline, documents = pipeline_of(llm)
        pipeline.run(documents=documents)

    with monkeypatch.context() as patch:
        patch.setattr("cacheclip_rag.chunks.batches._TEXTS", 1)
        register_runtime("fake", Killed)
        assert exit_code_of(killed) == -signal.SIGKILL
    register_runtime("fake", FakeRuntime)
    assert hits(llm) == 2
    before = dict(files(Path(str(llm.store))))
    assert before
    pipeline, documents = pipeline_of(llm)
    pipeline.run(documents=documents)
    assert hits(llm) == 6
    after = dict(files(Path(str(llm.store))))
    assert {name: after[name] for name in before} == before, "what was there is not written again"
    llm.engine.release(sources=[f"doc-{n}" for n in range(3)])
    assert hits(llm) == 3, "the sources of both runs are known"


def files(store: Path) -> list[tuple[str, int]]:
    """Payloads, and when they were written."""
    return [(str(file), file.stat().st_mtime_ns) for file in sorted(store.rglob("*.kv"))]
