"""Exact KV of prompts in the store: a conversation goes on from there after a restart, or in another process.

An entry holds :data:`SIZE` neighbouring tokens, keys after RoPE: the same tokens after the same prefix always have the
same positions. Its key says which tokens stand before them, so that no list of prompts is kept, and no text. It also
says how often something of the tenant was erased: after an erasure nothing that was stored before is found, and it is
deleted (:meth:`~cacheclip_rag.store.TenantStore.delete`). Approximate KV is not stored.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..base.database import ANSWER_WAIT_S, waiting_at_most
from ..base.errors import ConfigurationError, StoreError
from ..base.keys import prompt_keys
from ..runtime.prompt_cache import PromptCache
from .caches import ChunkCaches

SIZE = 256
"""Tokens of an entry: a multiple of the prompt cache's blocks."""
_MOST_PROMPTS = 16
"""Most prompts that wait to be stored; above it, the oldest is not."""


@dataclass(slots=True)
class _Waiting:
    """A prompt and its answer, whose exact KV is to be stored."""

    ids: Sequence[int]
    next: int = 0
    """Entries that were there, or were written. If one of them is gone later, there is no room for the prompt."""


class StoredPrompts:
    """Of one engine and its primary model. Safe to share between threads. No error of the store gets out of it."""

    def __init__(self, caches: ChunkCaches, prompt_cache: PromptCache) -> None:
        """Raises ConfigurationError: the runtime's KV cannot be stored."""
        runtime = caches.runtime
        if runtime.prompt_tensors is None:
            raise ConfigurationError(f"store_prompts is not there for model {runtime.name!r}. Leave it out.")
        self._caches, self._prompt_cache, self._tensors = caches, prompt_cache, runtime.prompt_tensors
        self._codec = str(runtime.dtype).removeprefix("torch.")
        self._shapes = self._tensors.shapes(SIZE)
        num_bytes = sum(map(math.prod, self._shapes)) * runtime.dtype.itemsize
        self._most = prompt_cache.stats.max_bytes // num_bytes
        """Entries that fit the prompt cache."""
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_PROMPTS)
        self._lock = threading.Lock()

    def restore(self, ids: Sequence[int]) -> None:
        """Read into the prompt cache what is stored of a prompt beyond what that has, as much as it can hold."""
        with self._prompt_cache.match(ids) as held:  # so that its beginning stays
            first, count = held.num_exact // SIZE, min(len(ids) // SIZE, self._most)
            if first >= count:
                return
            generation, pieces = self._prompt_cache.generation, deque[Sequence[torch.Tensor]]()
            try:
                keys = self._keys(ids)[first:count]
                for of_one in reversed(keys[: self._num_stored(keys)]):  # a prompt's end is used the least recently
                    read = zip(of_one, self._shapes, strict=True)
                    stored = [self._caches.store.get(key, shape=shape) for key, shape in read]
                    kv = [each.tensor() for each in stored if each is not None]
                    if len(kv) == len(of_one):
                        pieces.appendleft(kv)
                    else:  # damaged: what is behind it is of no use
                        pieces.clear()
                if pieces:
                    state = self._tensors.state(first * SIZE, pieces)
                    self._prompt_cache.insert(ids[: (first + len(pieces)) * SIZE], state, generation=generation)
            except (StoreError, RuntimeError, MemoryError) as error:
                self._warn(error)

    def add(self, ids: Sequence[int]) -> None:
        """Store the exact KV of a prompt and its answer, as far as the prompt cache has it when :meth:`step` comes."""
        with self._lock:
            self._waiting.append(_Waiting(ids))

    def step(self) -> bool:
        """Store one entry. True if nothing is left to be stored."""
        with self._lock:
            latest = self._waiting[-1] if self._waiting else None
        if latest is None:
            return True
        try:
            with waiting_at_most(ANSWER_WAIT_S):
                goes_on = self._store_one(latest)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:
            self._warn(error)
            goes_on = False
        if not goes_on:
            with self._lock:
                self._waiting = deque((each for each in self._waiting if each is not latest), _MOST_PROMPTS)
        return not self._waiting

    def _store_one(self, prompt: _Waiting) -> bool:
        """Store the first entry of a prompt that is not stored yet; False if there is none, or no room."""
        store = self._caches.store
        keys = self._keys(prompt.ids)  # before the look: what is erased after it has another key
        store.chunk_store.erasures.look()
        with self._prompt_cache.match(prompt.ids) as match:
            count = match.num_exact // SIZE
            number = self._num_stored(keys[:count])
            if number < prompt.next or not count or match.parts is None:
                return False
            if number == len(keys[:count]):
                store.catalog.use([key for of_one in reversed(keys[:count]) for key in of_one])
                return False
            size = self._prompt_cache.block_tokens
            blocks = match.parts[0].blocks[number * SIZE // size : (number + 1) * SIZE // size]
            tensors = self._tensors.join(blocks)
        prompt.next = number + 1
        put = [store.put(key, kv, self._codec, of_prompt=True) for key, kv in zip(keys[number], tensors, strict=True)]
        if self._keys(prompt.ids[:SIZE]) != keys[:1]:  # something was erased meanwhile
            store.delete(keys[number], erases=False)
        return all(put)

    def _num_stored(self, keys: Sequence[Sequence[str]]) -> int:
        """Number of first entries that are stored."""
        codecs = self._caches.store.codecs_of([key for of_one in keys for key in of_one])
        are_stored = (all(codecs.get(key) == self._codec for key in of_one) for of_one in keys)
        return next((number for number, is_stored in enumerate(are_stored) if not is_stored), len(keys))

    def _keys(self, ids: Sequence[int]) -> list[list[str]]:
        """Of each entry one key a group of layers with equal shapes."""
        store, runtime = self._caches.store, self._caches.runtime
        erasures = store.catalog.erasures(store.namespace) or 0  # a catalog is made by the first write
        about = (runtime.fingerprint, runtime.rope_pin, store.namespace, str(erasures), str([*self._shapes]))
        pieces = np.asarray(ids[: len(ids) // SIZE * SIZE], "<i8").reshape(-1, SIZE)
        return prompt_keys(about, [piece.tobytes() for piece in pieces], len(self._shapes))

    def _warn(self, error: Exception) -> None:
        store = self._caches.store.chunk_store
        store.warn_once("prompts", "KV of prompts is not stored, or not read, for now: %s", error)
