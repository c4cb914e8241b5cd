"""A loaded model in a forked process: torch's threads are not there, and a pass would wait for them forever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = """
import os, signal, sys
import torch
from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.ingest.embedding import Embedder

reusable, embedding = sys.argv[1:]
torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # starts torch's threads
text = "The lamp burned whale oil until 1871, when it was changed to paraffin. " * 6
engine = CacheClipEngine(primary=reusable, auxiliary=None, method="epic", chunk_context="prefix")
embedder = Embedder(embedding)
works = {
    "engine": lambda: engine.generate(text + "When?", SamplingParams(max_tokens=2), documents=[text]),
    "embedding": lambda: embedder.embed([text] * 8),
}
for name, threads in (("engine", 2), ("embedding", 2), ("engine", 1)):
    works[name]()
    if os.fork() == 0:
        signal.alarm(30)  # a child that hangs would outlive the test
        torch.set_num_threads(threads)
        try:
            works[name]()
            print(name, threads, "answered", flush=True)
        except Exception as error:
            print(name, threads, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
    works[name]()
print("parent answered")
"""


def test_is_refused_with_several_threads_and_works_with_one(tiny_models: dict[str, str], minilm: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, tiny_models["llama"], minilm]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    engine, embedding, alone, parent = done.stdout.splitlines()
    assert engine.startswith("engine 2 ModelError") and "gunicorn without --preload" in engine
    assert "'spawn'" in engine and "OMP_NUM_THREADS=1" in engine
    assert embedding.startswith("embedding 2 ModelError")
    assert alone == "engine 1 answered" and parent == "parent answered"
