"""``/v1/embeddings``, through OpenAI's client: the vectors of the embedder that ingests."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from cacheclip_ingest import Embedder
from cacheclip_serve import Access, EmbeddingService
from cacheclip_testing import fake_models
from openai import OpenAI
from serve_cases import Served, running
from tokenizers import Tokenizer, models, pre_tokenizers

from cacheclip_rag import EngineConfig, MissingExtraError

TEXTS = [f"The lighthouse number {number}" for number in range(70)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny embedding model."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["?", "The", "lighthouse", "number", *map(str, range(70))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    root = tmp_path_factory.mktemp("embedding")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?").save_pretrained(root / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(root / "bert")
    SentenceTransformer(str(root / "bert"), device="cpu").save(str(root / "small"))
    return str(root / "small")


@pytest.fixture(scope="module")
def embedding(small: str) -> Iterator[Served]:
    access = Access("default", None, {"north-key-1": ("north",), "south-key-1": ("south",)})
    settings: Any = {"embeddings": EmbeddingService(small, device="cpu", most_waiting=1), "access": access}
    with running(EngineConfig(**fake_models(), method="full"), **settings) as found:
        yield found


@pytest.fixture(scope="module")
def client(embedding: Served) -> OpenAI:
    return OpenAI(base_url=embedding.url, api_key="north-key-1", max_retries=0)


def test_vectors_are_those_that_ingestion_stores(client: OpenAI, small: str) -> None:
    expected = Embedder(small, "cpu").embed(TEXTS)
    for fields in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        said: Any = client.embeddings.create(model=small, input=TEXTS, **fields)  # type: ignore[arg-type]
        vectors = [each.embedding for each in said.data]
        if fields.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors]
        assert np.allclose(np.array(vectors, np.float32), expected, atol=1e-6)
        assert [each.index for each in said.data] == list(range(70)) and said.model == small
        assert said.usage.prompt_tokens == said.usage.total_tokens == 70 * 4
    alone = client.embeddings.create(model=small, input=TEXTS[3])
    assert np.allclose(alone.data[0].embedding, expected[3], atol=1e-6)
    assert not np.allclose(expected[2], expected[3], atol=1e-3)
    assert np.allclose(np.linalg.norm(expected, axis=1), 1)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "token ids": ({"input": [1, 2]}, 400, "input"),
    "nothing": ({"input": []}, 400, "input"),
    "no input": ({}, 400, "input"),
    "too many": ({"input": ["a"] * 2049}, 400, "input"),
    "dimensions": ({"input": "a", "dimensions": 3}, 400, "dimensions"),
    "format": ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
    "model": ({"input": "a", "model": "ada"}, 404, "model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(embedding: Served, case: str) -> None:
    body, status, param = REFUSED[case]
    headers = {"authorization": "Bearer north-key-1"}
    refused = embedding.client.post("/v1/embeddings", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.json()
    assert embedding.client.post("/v1/embeddings", json={"input": "a"}).status_code == 401


def test_texts_of_several_clients_take_turns(embedding: Served, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with many texts does not hold up another one until its last text."""
    sizes: list[int] = []
    first, go_on, embed = threading.Event(), threading.Event(), Embedder.embed

    def slow(self: Embedder, texts: Any) -> Any:
        sizes.append(len(texts))
        first.set()
        assert go_on.wait(30)
        return embed(self, texts)

    monkeypatch.setattr(Embedder, "embed", slow)
    keys = {name: OpenAI(base_url=embedding.url, api_key=f"{name}-key-1", max_retries=0) for name in ("north", "south")}
    many = threading.Thread(target=lambda: keys["north"].embeddings.create(model=small, input=TEXTS * 3))
    few = threading.Thread(target=lambda: keys["south"].embeddings.create(model=small, input=TEXTS[:2]))
    many.start()
    assert first.wait(30)
    few.start()
    queue = embedding.server.app.embeddings._queue
    while not queue.waiting:
        pass
    go_on.set()
    many.join()
    few.join()
    assert sizes == [64, 2, 64, 64, 18]


def test_without_a_model(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        OpenAI(base_url=served.url, api_key="a", max_retries=0).embeddings.create(model="a", input="a")
    assert "embedding" in caught.value.message and "[serve]" in caught.value.message


def test_the_distribution_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_serve.embeddings.find_spec", lambda name: None)
    assert EmbeddingService() is not None
    with pytest.raises(MissingExtraError, match="cacheclip-ingest"):
        EmbeddingService("small")


def test_it_is_not_imported_at_start() -> None:
    program = (
        "import sys; from cacheclip_serve import EmbeddingService, Server; EmbeddingService('small');"
        "assert not {'cacheclip_ingest', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
