"""KVLink: trained link tokens after every chunk are computed in context and connect chunks encoded separately.

Source: KVLink (arXiv:2502.16002) and its released masks and token ids (Llama 3.2: link token o of chunk j is
``128011 + n_link * j + o`` for at most 40 chunks, with one token before the chunks and one after). A chunk sees only
itself; link tokens and question see everything before them. The two published checkpoints are not packaged models. With
other models the link tokens have no meaning, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ...checks import check_flag, check_whole_number
from ...chunks.context import ChunkContext
from ...errors import ConfigurationError
from ...prompt.segments import Chunk, Fresh, Segment
from ...runtime.base import Runtime
from ..base import CacheView, Method, recompute_nothing
from . import check_no_context, warn_untuned

__all__ = ["KVLink"]


@dataclass(frozen=True, slots=True)
class KVLink(Method):
    """Equals one forward pass under KVLink's mask. Good answers need a checkpoint trained for it."""

    name: str = field(default="link", kw_only=True)

    reuses_prefixes: ClassVar[bool] = False
    exact_at_one: ClassVar[bool] = False

    n_link: int = 5
    """Link tokens after every chunk. With 0, and no tokens around the chunks, the method equals ``block``."""
    first_id: int = 128011
    """Token id of the first chunk's first link token."""
    start_id: int = 128254
    """Token id before the first chunk; -1 for none."""
    end_id: int = 128255
    """Token id after the last chunk; -1 for none."""
    max_chunks: int = 40
    """Most chunks in a prompt: each chunk number has its own link tokens, and so many were trained."""
    tuned: bool = False
    """True: the checkpoint was trained this way, and no warning is logged."""

    def __post_init__(self) -> None:
        super(KVLink, self).__post_init__()
        check_no_context(self.name, self.chunk_context)
        check_flag("tuned", self.tuned)
        check_whole_number("n_link", self.n_link, of="tokens")
        check_whole_number("max_chunks", self.max_chunks, least=1, of="chunks")
        for name in ("first_id", "start_id", "end_id"):
            check_whole_number(name, getattr(self, name), least=0 if name == "first_id" else -1)
        links = range(self.first_id, self.first_id + self.n_link * self.max_chunks)
        if self.start_id in links or self.end_id in links:
            raise ConfigurationError(
                f"the link tokens of {self.max_chunks} chunks, ids {links[0]} to {links[-1]}, must not hold start_id="
                f"{self.start_id} or end_id={self.end_id}. Lower n_link or max_chunks, or set other ids."
            )

    @property
    def context(self) -> ChunkContext:
        return ChunkContext(isolated=True)

    def arrange(self, segments: Sequence[Segment], runtime: Runtime) -> list[Segment]:
        chunks = [number for number, segment in enumerate(segments) if isinstance(segment, Chunk)]
        if not chunks:
            return list(segments)
        if self.n_link and len(chunks) > self.max_chunks:
            raise ConfigurationError(
                f"method 'link' has link tokens for {self.max_chunks} chunks, and the prompt has {len(chunks)}. "
                "Retrieve fewer, or set max_chunks for a checkpoint trained with more."
            )
        if not self.tuned:
            warn_untuned(self.name, "with link tokens")
        arranged: list[Segment] = []
        seen = 0
        for number, segment in enumerate(segments):
            if number == chunks[0] and self.start_id >= 0:
                arranged.append(self._special(runtime, [self.start_id]))
            arranged.append(segment)
            if isinstance(segment, Chunk) and self.n_link:
                first = self.first_id + self.n_link * seen
                arranged.append(self._special(runtime, range(first, first + self.n_link)))
                seen += 1
            if number == chunks[-1] and self.end_id >= 0:
                arranged.append(self._special(runtime, [self.end_id]))
        return arranged

    def _special(self, runtime: Runtime, ids: Sequence[int]) -> Fresh:
        """A control segment of these tokens.

        Raises:
            ConfigurationError: they are not special tokens of the model's tokenizer.
        """
        known = getattr(runtime.tokenizer, "added_tokens_decoder", {})
        if all(token in known for token in ids):
            text = "".join(runtime.tokenizer.convert_ids_to_tokens(list(ids)))
            if runtime.tokenize(text, control=True).ids == tuple(ids):
                return Fresh(text, control=True)
        raise ConfigurationError(
            f"token ids {min(ids)} to {max(ids)} are not special tokens of model {runtime.name!r}. Method 'link' is "
            "for KVLink's checkpoints; for other models set first_id, start_id and end_id to special tokens, or -1 for "
            "none."
        )

    @property
    def reads_cache(self) -> bool:
        return False

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return recompute_nothing(view)
