"""Entries for tests of stores, by number."""

from __future__ import annotations

import torch

from cacheclip_rag.store import TenantStore, chunk_key

TOKENS = 4


def key(number: int, namespace: str = "t") -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace=namespace)


def kv(number: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)


def put(store: TenantStore, *numbers: int, tokens: int = TOKENS) -> None:
    """Entries ``kv(number)`` under ``key(number)``, of the texts ``text <number>``."""
    for number in numbers:
        store.put(key(number, store.namespace), kv(number, tokens), "float32", text=f"text {number}")


def is_intact(store: TenantStore, number: int, tokens: int = TOKENS) -> bool:
    got = store.get(key(number, store.namespace))
    return got is not None and torch.equal(got.tensor(), kv(number, tokens))
