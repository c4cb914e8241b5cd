"""The auxiliary's scores against transformers' own eager attention weights, chunk by chunk."""

from pathlib import Path

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from cacheclip_rag.selection.auxiliary_pass import score_chunks
from tests.conftest import LLAMA, Logs, Models, build_model, rag_prompt
from tests.fusion.cases import reference_model

PREFIX = "You answer questions about lighthouses."


@torch.inference_mode()
def slow_score(folder: str, prefix: list[int], chunk: list[int], question: list[int], layer: int = -1) -> torch.Tensor:
    """A layer's attention, mean over heads and question rows, the chunk's columns."""
    output = reference_model(folder)(input_ids=torch.tensor([[*prefix, *chunk, *question]]), output_attentions=True)
    attention = output.attentions[layer][0]  # (num_heads, num_tokens, num_tokens)
    columns = slice(len(prefix), len(prefix) + len(chunk))
    return attention[:, -len(question) :, columns].mean(dim=(0, 1))


class Scored:
    """A runtime with the KV of a prefix and of some chunks behind it."""

    def __init__(self, runtime: ModelRuntime, texts: list[str], question: str, prefix: str = PREFIX) -> None:
        self.runtime = runtime
        self.prefix_ids = list(runtime.tokenize(prefix).ids)
        self.chunk_ids = [list(runtime.tokenize(t).ids) for t in texts]
        self.question_ids = list(runtime.tokenize(question).ids)
        shape = (runtime.num_layers, 2, runtime.num_kv_heads, 0, runtime.head_dim)
        self.prefix = runtime.encode(self.prefix_ids) if self.prefix_ids else torch.empty(shape)
        self.kv = [runtime.encode(ids, self.prefix if self.prefix_ids else None) for ids in self.chunk_ids]

    def scores(self, *numbers: int) -> list[torch.Tensor]:
        return score_chunks(self.runtime, self.prefix, [self.kv[n] for n in numbers], self.question_ids)


@pytest.fixture(params=["auxiliary", "qwen2", "llama-rope-linear"])
def folder(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    return tiny_models[request.param]


@pytest.fixture
def scored(folder: str, chunks: list[str], question: str) -> Scored:
    return Scored(load_model(folder), [*chunks, "x", "Its lamp"], question)


def test_every_chunk_equals_eager_attention(scored: Scored, folder: str) -> None:
    """And not that of another layer; stored KV is not written to."""
    before = [kv.clone() for kv in (scored.prefix, *scored.kv)]
    scores = scored.scores(*range(len(scored.kv)))
    assert all(torch.equal(a, b) for a, b in zip(before, (scored.prefix, *scored.kv), strict=True))
    for score, ids in zip(scores, scored.chunk_ids, strict=True):
        expected = slow_score(folder, scored.prefix_ids, ids, scored.question_ids)
        assert score.shape == (len(ids),) and score.dtype == torch.float32
        assert float((score - expected).abs().max()) < 1e-5
    first_layer = slow_score(folder, scored.prefix_ids, scored.chunk_ids[0], scored.question_ids, layer=0)
    assert float((scores[0] - first_layer).abs().max()) > 1e-3


def test_another_question_gives_other_scores(folder: str, chunks: list[str], question: str) -> None:
    runtime = load_model(folder)
    ours, other = (Scored(runtime, chunks, q).scores(0)[0] for q in (question, "When do seabirds nest?"))
    assert float((ours - other).abs().max()) > 1e-4


def test_without_a_prefix(folder: str, chunks: list[str], question: str) -> None:
    scored = Scored(load_model(folder), chunks, question, prefix="")
    for score, ids in zip(scored.scores(0, 1), scored.chunk_ids[:2], strict=True):
        assert float((score - slow_score(folder, [], ids, scored.question_ids)).abs().max()) < 1e-5


def test_chunk_that_fills_the_auxiliary(tiny_models: Models, tmp_path: Path, chunks: list[str], caplog: Logs) -> None:
    """It cannot be scored; the others are, and the log says so."""
    small = build_model(tmp_path / "small", {**LLAMA, "num_hidden_layers": 2}, seed=1, context=256)
    models = {"primary": tiny_models["llama"], "auxiliary": str(small)}
    engine = CacheClipEngine(**models, method="cacheclip", chunk_context="prefix")
    caches, words = engine.parts.models.auxiliary_caches, " ".join(chunks * 2).split()
    while len(caches.tokenize(long := " ".join(words))) > 256 - len(caches.prefix_ids) - 4:
        words.pop()
    engine.precompute([chunks[0], chunks[1], long])
    stats = engine.generate(rag_prompt([chunks[0], long, chunks[1]]), max_tokens=1, recompute_ratio=0.1).stats
    assert stats.fallback is None and stats.recomputed_tokens == round(0.1 * stats.chunk_tokens)
    assert "1 of 2 chunks leave the auxiliary model" in caplog.text


def test_no_layer_runs_after_the_last_one_that_is_needed(scored: Scored) -> None:
    """And the model computes as before afterwards."""
    layers = scored.runtime.model.base_model.layers
    last = len(layers) - 2
    before = Scored(scored.runtime, ["Its lamp"], "Who?").kv[0]
    expected = score_chunks(scored.runtime, scored.prefix, scored.kv[:2], scored.question_ids, layers=[last])
    ran: list[int] = []
    hooks = [layer.mlp.register_forward_hook(lambda *_, number=n: ran.append(number)) for n, layer in enumerate(layers)]
    try:
        found = score_chunks(scored.runtime, scored.prefix, scored.kv[:2], scored.question_ids, layers=[last])
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == list(range(last)), "the last layer's scores need no output of its MLP"
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(before, Scored(scored.runtime, ["Its lamp"], "Who?").kv[0])
