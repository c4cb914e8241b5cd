"""Keys and KV for the tests of the store."""

from __future__ import annotations

import torch

from cacheclip_rag.store import ChunkStore, chunk_key, encode

TOKENS = 4


def key(number: int) -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace="t")


def kv(number: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)


def put(store: ChunkStore, *numbers: int, tokens: int = TOKENS) -> None:
    """Entries ``kv(number)`` under ``key(number)``, of the texts ``text <number>`` in namespace t."""
    for number in numbers:
        store.put(key(number), kv(number, tokens), "float32", namespace="t", text=f"text {number}")


def is_intact(store: ChunkStore, number: int, tokens: int = TOKENS) -> bool:
    got = store.get(key(number))
    return got is not None and torch.equal(got.kv, kv(number, tokens))


def size(tokens: int = TOKENS) -> int:
    """Bytes of such a payload."""
    return len(encode(kv(0, tokens), "float32", key(0), namespace="t", text="text 0"))
