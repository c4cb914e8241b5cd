"""Chunk caches of one model: from text to store key to KV. Missing KV is computed by the runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import torch

from ..base.errors import ConfigurationError, EncodingError, PromptTooLongError, StoreError
from ..runtime.base import DTYPES, Runtime
from ..store import (
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


class ChunkCaches:
    """Reads and writes the KV of chunks for one model, one shared prefix and one chunk context."""

    def __init__(
        self, runtime: Runtime, store: TenantStore, *, prefix_ids: Sequence[int], codec: str, context: ChunkContext
    ) -> None:
        self.runtime = runtime
        context_ids = runtime.tokenize(context.text).ids if context.text else ()
        self.prefix_ids = () if context.isolated else (*prefix_ids, *context_ids)
        self.store = store
        self.codec = codec
        exact = runtime.kv_codec or str(runtime.dtype).removeprefix("torch.")
        self.is_lossy = not keeps(codec, exact)
        """Whether the codec is coarser than the model's compute dtype."""
        self._prefix_codec = codec if codec in DTYPES else exact
        """Every prompt reads the prefix, and it is short: it is not quantised."""
        self.context = context
        self._prefix: torch.Tensor | None = None
        self.tokenize = lru_cache(maxsize=_TOKENIZED_CHUNKS)(self.runtime.tokenize)
        self.key = lru_cache(maxsize=_TOKENIZED_CHUNKS)(
            lambda text: self._key(self.prefix_ids, self.tokenize(text).ids)
        )

    def stored_bytes(self, num_tokens: int) -> int:
        size = frame_bytes(self.runtime.kv_shape(num_tokens), self.codec, namespace=self.store.namespace)
        return self.store.chunk_store.tiers.round_up(size)

    @property
    def prefix_kv(self) -> torch.Tensor:
        """KV before every chunk, computed or read once: of the shared prefix and of the chunk context,
        :attr:`num_prefix` tokens."""
        if self._prefix is None:
            self._prefix = self._read_or_encode_prefix()
        return self._prefix

    @property
    def has_prefix(self) -> bool:
        return self._prefix is not None

    @property
    def num_prefix(self) -> int:
        """Positions before every chunk."""
        return len(self.prefix_ids)

    @property
    def prefix_key(self) -> str:
        return self._key((), self.prefix_ids)

    def encode_prefix(self) -> torch.Tensor:
        """:attr:`prefix_kv`, computed without the store."""
        return self.runtime.encode(self.prefix_ids) if self.prefix_ids else self._no_kv()

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
        return self._read(self.key(text), self.codec, len(self.tokenize(text)), buffer)

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
        lengths = [len(self.tokenize(text).ids) for text in texts]
        shapes = {key: self.runtime.kv_shape(length) for key, length in zip(keys, lengths, strict=True)}
        return ReadAhead(
            self.store, keys, codec=self.codec, num_layers=num_layers, once=once, when_read=when_read, shapes=shapes
        )

    def _read(self, key: str, codec: str, num_tokens: int, buffer: ReadBuffer | None = None) -> StoredKV | None:
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
            prefix = self.prefix_kv if self.prefix_kv.shape[3] else None
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
                    behind.add(partial(self.store.put, key, kv, self.codec, text=text), key)
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

    def _key(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        return chunk_key(
            model_fingerprint=self.runtime.fingerprint,
            prefix_ids=prefix_ids,
            chunk_ids=ids,
            rope_pin=self.runtime.rope_pin,
            namespace=self.store.namespace,
        )

    def _no_kv(self) -> torch.Tensor:
        return torch.empty(self.runtime.kv_shape(0), dtype=self.runtime.dtype)

    def _read_or_encode_prefix(self) -> torch.Tensor:
        runtime = self.runtime
        if not self.prefix_ids:
            return self._no_kv()
        key = self.prefix_key
        codec = self._prefix_codec
        if (stored := self._read(key, codec, self.num_prefix)) is not None:
            return stored.tensor()
        kv = runtime.encode(self.prefix_ids)
        try:
            self.store.put(key, kv, codec)
        except StoreError as error:  # a full disk must not prevent the answer
            logger.warning("the shared prefix could not be stored: %s", error)
        return decode_frame(encode_frame(kv, codec, key, namespace=self.store.namespace), key).tensor()
