"""How a chunk's KV is written down. A codec turns one KV tensor into named tensors and back.

To add one (int8 with scales, say): an entry in ``CODECS`` and a row in the round-trip test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError

__all__ = ["CODECS", "ChunkEntry", "decode", "encode", "keeps"]

CODECS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Float codecs: lossless when the codec is at least as wide as the compute dtype."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One stored chunk cache."""

    tensors: Mapping[str, torch.Tensor]
    """For float codecs just ``kv``: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE."""
    codec: str
    """Name in :data:`CODECS`."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def num_tokens(self) -> int:
        return int(self.tensors["kv"].shape[3])


def encode(kv: torch.Tensor, codec: str) -> ChunkEntry:
    """Make an entry of a KV tensor."""
    if codec not in CODECS:
        raise ConfigurationError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}.")
    return ChunkEntry({"kv": kv.to("cpu", CODECS[codec]).contiguous()}, codec)


def decode(entry: ChunkEntry) -> torch.Tensor:
    """The KV tensor of an entry, in the codec's dtype (casting to the compute dtype happens where it is copied)."""
    return entry.tensors["kv"]


def keeps(codec: str, wanted: str) -> bool:
    """Whether an entry written with ``codec`` holds everything that ``wanted`` would have kept."""
    return codec in (wanted, "float32")
