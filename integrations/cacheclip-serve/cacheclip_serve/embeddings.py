"""``/v1/embeddings``, by the embedding model of cacheclip-ingest, which is imported when the first text comes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cacheclip_rag import MissingExtraError
from cacheclip_rag.adapters import changes_nothing

from .bounds import MOST_MESSAGES
from .errors import RequestError, unsupported
from .messages import BodyPart
from .queue import Queue
from .reading import read_json
from .schema import list_of_prompts, validated

EMBEDDINGS = "/v1/embeddings"
_AT_ONCE = 64
"""Texts after which others have their turn."""


class EmbeddingBody(BodyPart):
    """Body of a request to ``/v1/embeddings``."""

    input: Annotated[list[str], BeforeValidator(list_of_prompts)] = Field(max_length=MOST_MESSAGES)
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None

    def check(self) -> None:
        """Raise RequestError for fields that would change the answer and are not followed."""
        for name, value in (self.model_extra or {}).items():
            if not changes_nothing(name, value):
                raise unsupported(name, f"{name} is not supported: vectors are those of the model. Leave it out.")


class EmbeddingService:
    """An embedding model and its queue. Used by one event loop."""

    def __init__(self, name: str | None = None, *, device: str = "auto", most_waiting: int = 64) -> None:
        """``name``: of a sentence-transformers model; None: there is none. Raises MissingExtraError: cacheclip-ingest,
        which reads it, is not installed."""
        if name is not None and find_spec("cacheclip_ingest") is None:
            raise MissingExtraError("cacheclip-ingest", "ingest")
        self._name, self._device = name, device
        self._queue = Queue(1, most_waiting)
        self._embedder: Any = None

    def read(self, came: bytes) -> EmbeddingBody:
        """A body, checked. Raises RequestError."""
        if self._name is None:
            raise RequestError(
                'this server has no embedding model. Set embedding = "NAME" under [serve] of its settings file.',
                status=404,
                code="model_not_found",
            )
        body = validated(EmbeddingBody, read_json(came))
        body.check()
        if body.model not in (None, self._name):
            raise RequestError(
                f"there is no embedding model {body.model[:200]!r}. This server has {self._name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return body

    async def answer(self, body: EmbeddingBody, client: str) -> Mapping[str, Any]:
        """The body of the response. Texts of several clients take turns. Raises RequestError: too many wait (429)."""
        vectors: list[Any] = []
        tokens = 0
        for start in range(0, len(body.input), _AT_ONCE):
            async with self._queue.place(client, goes_on=start > 0):
                some, count = await asyncio.to_thread(self._embed, body.input[start : start + _AT_ONCE])
            vectors += some
            tokens += count
        as_text = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": number, "embedding": _base64(each) if as_text else each.tolist()}
            for number, each in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._name, "usage": usage}

    def _embed(self, texts: Sequence[str]) -> tuple[list[Any], int]:
        if self._embedder is None:
            from cacheclip_ingest import Embedder

            assert self._name is not None, "without a model every request is refused"
            self._embedder = Embedder(self._name, self._device)
        return list(self._embedder.embed(texts)), self._embedder.count_tokens(texts)


def _base64(vector: Any) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
