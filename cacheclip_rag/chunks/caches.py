"""Chunk caches of one model: from text to store key to KV. Missing KV is computed by the runtime."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

import torch

from ..base.errors import ConfigurationError, EncodingError, PromptTooLongError, StoreError
from ..runtime.base import DTYPES, Runtime
from ..store import (
    KV,
    Arena,
    ReadAhead,
    ReadBuffer,
    StoredKV,
    TenantStore,
    chunk_key,
    decode_frame,
    encode_frame,
    frame_bytes,
    keeps,
)
from .context import ChunkContext
from .write_behind import WriteBehind

logger = logging.getLogger(__name__)

_TOKENIZED_CHUNKS = 256
"""Tokenised chunks kept per model, because one answer needs each several times. About 80 kB for 512 tokens."""


def arena_of(caches: ChunkCaches) -> Arena | None:
    """Chunk caches in the memory of the model's device; None for a runtime that gathers none."""
    runtime = caches.runtime
    return caches.store.chunk_store.tiers.arena(runtime.device) if runtime.gathers else None


class PrefixKV:
    """KV before every chunk of a model: of the shared prefix and of the chunk context."""

    def __init__(self, caches: ChunkCaches, codec: str) -> None:
        self._caches, self._codec = caches, codec

    @cached_property
    def kv(self) -> torch.Tensor:
        """Computed or read once, and kept on the model's device: :attr:`ChunkCaches.num_prefix` tokens."""
        stored = self._stored
        kv = stored.tensor() if stored is not None else self.encode()
        return kv.to(self._caches.runtime.device)

    @cached_property
    def piece(self) -> KV:
        """The same, to write it into prompts: as it stands in the arena, if there is one."""
        arena, stored = arena_of(self._caches), self._stored
        resident = None if arena is None or stored is None else arena.place(stored.frame)
        if arena is None or stored is None or resident is None:
            return self.kv
        weakref.finalize(self, arena.release, [resident])
        return replace(stored, resident=resident)

    @property
    def is_known(self) -> bool:
        return "kv" in vars(self)

    @property
    def key(self) -> str:
        return self._caches.key_of((), self._caches.prefix_ids)

    def encode(self) -> torch.Tensor:
        """:attr:`kv`, computed without the store."""
        runtime, ids = self._caches.runtime, self._caches.prefix_ids
        return runtime.encode(ids) if ids else torch.empty(runtime.kv_shape(0), dtype=runtime.dtype)

    @cached_property
    def _stored(self) -> StoredKV | None:
        return self._read_or_encode()

    def _read_or_encode(self) -> StoredKV | None:
        caches, codec = self._caches, self._codec
        if not caches.prefix_ids:
            return None
        key = self.key
        if (stored := caches.read_key(key, codec, caches.num_prefix)) is not None:
            return stored
        kv, shape = self.encode(), caches.runtime.kv_shape(caches.num_prefix)
        try:
            caches.store.put(key, kv, codec, shape=shape)
        except StoreError as error:  # a full disk must not prevent the answer
            logger.warning("the shared prefix could not be stored: %s", error)
        frame = encode_frame(kv, codec, key, namespace=caches.store.namespace, shape=shape)
        return decode_frame(frame, key)


class ChunkCaches:
    """Reads and writes the KV of chunks for one model, one shared prefix and one chunk context."""

    def __init__(
        self, runtime: Runtime, store: TenantStore, *, prefix_ids: Sequence[int], codec: str, context: ChunkContext
    ) -> None:
        self.runtime = runtime
        context_ids = runtime.tokenize(context.text).ids if context.text else ()
        self.prefix_ids = (*prefix_ids, *context_ids)
        self.store = store
        self.codec = codec
        exact = runtime.kv_codec or str(runtime.dtype).removeprefix("torch.")
        self.is_lossy = not keeps(codec, exact)
        """Whether the codec is coarser than the model's compute dtype."""
        self.context = context
        # every prompt reads the prefix, and it is short: it is not quantised
        self.prefix = PrefixKV(self, codec if codec in DTYPES else exact)
        self.tokenize = lru_cache(maxsize=_TOKENIZED_CHUNKS)(self.runtime.tokenize)
        self.key = lru_cache(maxsize=_TOKENIZED_CHUNKS)(
            lambda text: self.key_of(self.prefix_ids, self.tokenize(text).ids)
        )

    def stored_bytes(self, num_tokens: int) -> int:
        size = frame_bytes(self.runtime.kv_shape(num_tokens), self.codec, namespace=self.store.namespace)
        return self.store.chunk_store.tiers.round_up(size)

    @property
    def num_prefix(self) -> int:
        """Positions before every chunk."""
        return len(self.prefix_ids)

    def __contains__(self, text: str) -> bool:
        """Whether the chunk is stored with at least the precision of this engine's codec."""
        return bool(self.held([text]))

    def held(self, texts: Iterable[str]) -> set[str]:
        """The chunks among ``texts`` that are stored with at least the precision of this engine's codec. One query asks
        the store for all of them."""
        keys = {text: self.key(text) for text in texts}
        codecs = self.store.codecs_of([*keys.values()])
        return {text for text, key in keys.items() if key in codecs and keeps(codecs[key], self.codec)}

    def reads_of(self, texts: Iterable[str]) -> dict[str, tuple[str, int]]:
        """What reading these chunks would take: medium and bytes by text, without those in memory."""
        keys = {text: self.key(text) for text in texts}
        reads = self.store.reads_of([*keys.values()])
        return {text: reads[key] for text, key in keys.items() if key in reads}

    def read(self, text: str, buffer: ReadBuffer | None = None) -> StoredKV | None:
        """Stored KV of a chunk, or None. KV in ``buffer`` is valid until the next read into it."""
        return self.read_key(self.key(text), self.codec, len(self.tokenize(text)), buffer)

    def read_ahead(
        self,
        texts: Sequence[str],
        *,
        num_layers: int | None = None,
        once: bool = False,
        when_read: Callable[[], None] | None = None,
    ) -> ReadAhead:
        """Stored KV of many chunks, read on a thread while the caller does other work. See
        :class:`~cacheclip_rag.store.ReadAhead`."""
        keys = [self.key(text) for text in texts]
        lengths = [len(self.tokenize(text)) for text in texts]
        shapes = {key: self.runtime.kv_shape(length) for key, length in zip(keys, lengths, strict=True)}
        return ReadAhead(
            self.store,
            keys,
            codec=self.codec,
            num_layers=num_layers,
            once=once,
            when_read=when_read,
            shapes=shapes,
            arena=arena_of(self) if self.runtime.gathers else None,
        )

    def read_key(self, key: str, codec: str, num_tokens: int, buffer: ReadBuffer | None = None) -> StoredKV | None:
        stored = self.store.get(key, buffer, self.runtime.kv_shape(num_tokens))
        # an engine with this model as auxiliary may have stored it with a coarser codec than ours
        return stored if stored is not None and keeps(stored.codec, codec) else None

    def write(self, text: str, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Compute a chunk's KV unless it is stored already, and store it if it still ``is_wanted`` then; True if it was
        computed."""
        with WriteBehind() as behind:
            return self.write_many([text], behind, is_wanted)[0]

    def write_many(
        self, texts: Sequence[str], behind: WriteBehind, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[bool]:
        """Like :meth:`write`, for several texts; short ones are computed together. ``behind`` stores the KV, at the
        latest when it ends. False for a repeated text. Raises EncodingError if some texts failed; the others are
        stored."""
        missing = self._missing(texts, behind)
        if missing:
            for text in missing:
                self.check_length(text)
            prefix = self.prefix.kv if self.prefix.kv.shape[3] else None
            encoded: Sequence[torch.Tensor | None]
            failed: EncodingError | None = None
            try:
                with behind.beside():
                    computed = self.runtime.encode_many([self.tokenize(text).ids for text in missing], prefix)
                    encoded = [kv.cpu() for kv in computed]  # moved by another thread, it would wait for a busy GPU
            except EncodingError as error:
                failed, encoded = error, error.encoded
            for text, kv in zip(missing, encoded, strict=True):
                if kv is not None and is_wanted():
                    key = self.key(text)
                    shape = self.runtime.kv_shape(kv.shape[3])
                    behind.add(partial(self.store.put, key, kv, self.codec, shape=shape, text=text), key)
            if failed is not None:
                raise failed
        written = set(missing)
        firsts = {text: number for number, text in reversed(list(enumerate(texts)))}
        return [text in written and firsts[text] == number for number, text in enumerate(texts)]

    def _missing(self, texts: Sequence[str], behind: WriteBehind) -> list[str]:
        held = self.held(texts)
        # what waits may be one of these texts, or evict one
        if (held or behind.awaits({self.key(text) for text in texts})) and behind.catch_up():
            held = self.held(texts)
        return [text for text in dict.fromkeys(texts) if text not in held]

    def forget_texts(self) -> None:
        """Drop texts and token ids that are kept because one answer needs them several times."""
        self.tokenize.cache_clear()
        self.key.cache_clear()

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError unless the chunk fits after the prefix, ConfigurationError if it has no tokens."""
        tokens = self.tokenize(text)
        if not len(tokens):
            raise ConfigurationError(
                f"a chunk has no tokens for model {self.runtime.name!r}: the tokenizer drops all of {text[:40]!r}. "
                "Leave the chunk out."
            )
        room = max(0, self.runtime.reuse_tokens - self.num_prefix)
        if len(tokens) > room:
            raise PromptTooLongError(
                f"a chunk of {len(tokens)} tokens does not fit model {self.runtime.name!r}, which has room for {room} "
                "after the shared prefix and chunk context. Split the document into smaller chunks."
            )

    def key_of(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        return chunk_key(
            model_fingerprint=self.runtime.fingerprint,
            prefix_ids=prefix_ids,
            chunk_ids=ids,
            rope_pin=self.runtime.rope_pin,
            namespace=self.store.namespace,
        )
