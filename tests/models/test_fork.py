"""A loaded model in a forked process: torch's threads are not there, and a pass would wait for them forever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = """
import os, signal, sys
import torch
from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.models.load import load_any

primary, kind = sys.argv[1:]
torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # starts torch's threads
text = "The lamp burned whale oil until 1871, when it was changed to paraffin. " * 6
if kind == "plain":
    runtime = load_any(primary, fallback="full")
    assert not runtime.can_reuse
    work = lambda: runtime.prefill(torch.tensor(runtime.tokenize(text).ids), 1000)
elif kind == "embedding":
    from cacheclip_rag.ingest.embedding import Embedder
    embedder = Embedder(primary)
    work = lambda: embedder.embed([text] * 8)
else:
    engine = CacheClipEngine(primary=primary, auxiliary=None, method="epic", chunk_context="prefix")
    work = lambda: engine.generate(text + "When?", SamplingParams(max_tokens=2), documents=[text])
work()
if os.fork() == 0:
    signal.alarm(30)  # a child that hangs would outlive the test
    if kind == "one thread later":
        torch.set_num_threads(1)
    try:
        work()
        print("answered", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
work()
print("parent answered")
"""


def forked(folder: str, kind: str, threads: int) -> str:
    """What the child and then the parent printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, folder, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture
def unsupported(tmp_path: Path) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    from cacheclip_rag.testing.tiny import make_tokenizer

    config = GPT2Config(
        vocab_size=400, n_positions=512, n_embd=256, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer(400).save_pretrained(tmp_path)
    return str(tmp_path)


def test_is_refused_with_several_threads(tiny_models: dict[str, str]) -> None:
    child, parent = forked(tiny_models["llama"], "engine", 2).splitlines()
    assert child.startswith("ModelError") and "gunicorn without --preload" in child and "'spawn'" in child
    assert "OMP_NUM_THREADS=1" in child
    assert parent == "parent answered"


def test_is_refused_without_reuse_too(unsupported: str) -> None:
    assert forked(unsupported, "plain", 2).startswith("ModelError")


def test_embedding_is_refused_too(minilm: str) -> None:
    assert forked(minilm, "embedding", 2).startswith("ModelError")


def test_works_with_one_thread(tiny_models: dict[str, str]) -> None:
    assert forked(tiny_models["llama"], "engine", 1).splitlines() == ["answered", "parent answered"]


def test_works_if_the_fork_uses_one_thread(tiny_models: dict[str, str]) -> None:
    assert forked(tiny_models["llama"], "one thread later", 2).splitlines() == ["answered", "parent answered"]
