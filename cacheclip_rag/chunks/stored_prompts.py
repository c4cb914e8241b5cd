"""Exact KV of prompts in the store: a conversation goes on from there after a restart, or in another process.

An entry holds :data:`SIZE` neighbouring tokens, keys after RoPE: the same tokens after the same prefix always have the
same positions. Its key says which tokens stand before them, so that no list of prompts is kept, and no text. It also
says how often something of the tenant was erased: after an erasure nothing that was stored before is found, and it is
deleted (:meth:`~cacheclip_rag.store.TenantStore.delete`). Approximate KV is not stored.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ..base.errors import ConfigurationError, StoreError
from ..base.keys import prompt_keys
from ..runtime.prompt_cache import PromptCache
from .caches import ChunkCaches

logger = logging.getLogger(__name__)

SIZE = 256
"""Tokens of an entry: a multiple of the prompt cache's blocks."""
_MOST_PROMPTS = 16
"""Most prompts that wait to be stored; above it, the oldest is not."""


class StoredPrompts:
    """Of one engine and its primary model. Safe to share between threads."""

    def __init__(self, caches: ChunkCaches, prompt_cache: PromptCache) -> None:
        """Raises ConfigurationError: the runtime's KV cannot be stored, or nothing limits it."""
        runtime, store = caches.runtime, caches.store
        if runtime.prompt_tensors is None:
            raise ConfigurationError(f"store_prompts is not there for model {runtime.name!r}. Leave it out.")
        if store.chunk_store.limit is None and store.chunk_store.quota(store.namespace) is None:
            raise ConfigurationError(
                "store_prompts stores the KV of every prompt, and this store has no limit. Set max_bytes, or give the "
                "tenant a quota."
            )
        self._caches, self._prompt_cache, self._tensors = caches, prompt_cache, runtime.prompt_tensors
        self._codec = str(runtime.dtype).removeprefix("torch.")
        num_bytes = sum(math.prod(shape) for shape in self._tensors.shapes(SIZE)) * runtime.dtype.itemsize
        self._most = prompt_cache.stats.max_bytes // num_bytes
        """Entries that fit the prompt cache."""
        self._waiting: deque[Sequence[int]] = deque(maxlen=_MOST_PROMPTS)
        self._lock = threading.Lock()

    def restore(self, ids: Sequence[int]) -> None:
        """Read into the prompt cache what is stored of a prompt beyond what that has, as much as it can hold. Errors of
        the store are only logged."""
        first, count = self._prompt_cache.known(ids) // SIZE, min(len(ids) // SIZE, self._most)
        if first >= count:
            return
        generation = self._prompt_cache.generation
        pieces, shapes = deque[Sequence[torch.Tensor]](), self._tensors.shapes(SIZE)
        keys = self._keys(ids)[first:count]
        for of_one in reversed(keys[: self._num_stored(keys)]):  # a prompt's end is its least recently used part
            stored = [self._caches.store.get(key, shape=shape) for key, shape in zip(of_one, shapes, strict=True)]
            kv = [each.tensor() for each in stored if each is not None]
            if len(kv) == len(of_one):
                pieces.appendleft(kv)
            else:  # damaged: what is behind it is of no use
                pieces.clear()
        if pieces:
            state = self._tensors.state(first * SIZE, pieces)
            self._prompt_cache.insert(ids[: (first + len(pieces)) * SIZE], state, generation=generation)

    def add(self, ids: Sequence[int]) -> None:
        """Store the exact KV of a prompt and its answer, as far as the prompt cache has it when :meth:`step` comes."""
        with self._lock:
            self._waiting.append(ids)

    def step(self) -> bool:
        """Store one entry. True if nothing is left to be stored."""
        with self._lock:
            ids = self._waiting[-1] if self._waiting else None
        if ids is None:
            return True
        if not self._store_one(ids):
            with self._lock:
                self._waiting = deque((each for each in self._waiting if each is not ids), _MOST_PROMPTS)
        return not self._waiting

    def finish(self) -> None:
        """Store what waits. An error is only logged: whoever closes an engine cannot do anything about it."""
        try:
            while not self.step():
                pass
        except (StoreError, OSError) as error:
            logger.warning("KV of prompts was not stored: %s", error)

    def _store_one(self, ids: Sequence[int]) -> bool:
        """Store the first entry of a prompt that is not stored yet; False if there is none."""
        store = self._caches.store
        keys = self._keys(ids)  # before the look: what is erased after it has another key
        store.chunk_store.erasures.look()
        with self._prompt_cache.match(ids) as match:
            count = match.num_exact // SIZE
            number = self._num_stored(keys[:count])
            if number == len(keys[:count]) or match.parts is None:
                store.catalog.use([key for of_one in reversed(keys[:count]) for key in of_one])
                return False
            size = self._prompt_cache.block_tokens
            blocks = match.parts[0].blocks[number * SIZE // size : (number + 1) * SIZE // size]
            tensors = self._tensors.join(blocks)
        put = [store.put(key, kv, self._codec, of_prompt=True) for key, kv in zip(keys[number], tensors, strict=True)]
        return all(put)

    def _num_stored(self, keys: Sequence[Sequence[str]]) -> int:
        """Number of first entries that are stored."""
        codecs = self._caches.store.codecs_of([key for of_one in keys for key in of_one])
        are_stored = (all(codecs.get(key) == self._codec for key in of_one) for of_one in keys)
        return next((number for number, is_stored in enumerate(are_stored) if not is_stored), len(keys))

    def _keys(self, ids: Sequence[int]) -> list[list[str]]:
        """Of each entry one key a group of layers with equal shapes; none if the catalog cannot be asked."""
        store, runtime = self._caches.store, self._caches.runtime
        try:
            erasures = store.catalog.erasures(store.namespace)
        except StoreError as error:
            store.chunk_store.warn_once("prompts", "KV of prompts is neither read nor stored: %s", error)
            return []
        about = (runtime.fingerprint, runtime.rope_pin, store.namespace, str(erasures))
        pieces = np.asarray(ids[: len(ids) // SIZE * SIZE], "<i8").reshape(-1, SIZE)
        return prompt_keys(about, [piece.tobytes() for piece in pieces], len(self._tensors.shapes(SIZE)))
