"""A loaded model in a forked process: torch's threads are not there, and a pass would wait for them forever."""

import os
import signal

import pytest
import torch
from cacheclip_ingest.embedding import Embedder

from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.store.samples import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.mark.long
def test_is_refused_with_several_threads_and_works_with_one(tiny_models: dict[str, str], minilm: str) -> None:
    text = "The lamp burned whale oil until 1871, when it was changed to paraffin. " * 6
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="epic", chunk_context="prefix")
    embedder = Embedder(minilm)
    works = {
        "engine": lambda: engine.generate(text + "When?", SamplingParams(max_tokens=2), documents=[text]),
        "embedding": lambda: embedder.embed([text] * 8),
    }
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # starts torch's threads
        for name, threads in (("engine", 2), ("embedding", 2), ("engine", 1)):
            works[name]()

            def child(name: str = name, threads: int = threads) -> None:
                signal.alarm(30)  # a child that hangs would outlive the test
                torch.set_num_threads(threads)
                works[name]()

            found.append(run(child))
            works[name]()
    finally:
        torch.set_num_threads(before)
    refused, embedding, alone = (done.stderr for done in found)
    assert "ModelError" in refused and "gunicorn without --preload" in refused
    assert "'spawn'" in refused and "OMP_NUM_THREADS=1" in refused
    assert "ModelError" in embedding and [done.returncode for done in found] == [1, 1, 0], alone
