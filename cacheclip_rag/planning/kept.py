"""KV of earlier prompts that another process keeps: which of it a prompt can take, known by token ids alone.

The other process names blocks of :data:`BLOCK_TOKENS` tokens by what they hold and what stands before them
(:func:`kept_keys`), so that a name never leads to other KV, whatever is thought to be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..base.keys import json_digest, prompt_keys
from ..plan.plan import KVSources, Plan, least_computed
from ..prompt.known_kv import LEAST_END, known_kv
from ..runtime.base import KVMatch, KVPart, KVSource
from ..runtime.kv_blocks import LEAST_RUN

if TYPE_CHECKING:
    from ..answering.parts import Parts
    from ..runtime.transformers.planning import PlanningRuntime
    from .prompts import PlannedPrompt

BLOCK_TOKENS = 16
"""Tokens of a block."""


def kept_keys(about: str, token_ids: Sequence[int]) -> list[str]:
    """Names of the whole blocks of a prompt, 64 hexadecimal digits each. ``about``: all else on which its KV
    depends."""
    pieces = np.asarray(token_ids[: len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS], "<i8").reshape(-1, BLOCK_TOKENS)
    return [key for (key,) in prompt_keys((about,), [piece.tobytes() for piece in pieces], 1)]


@dataclass(eq=False, slots=True)
class _BlockName:
    """In place of a block's KV, its name; None: nobody keeps it."""

    key: str | None


@dataclass(slots=True)
class _Names:
    """In place of a state (:class:`~cacheclip_rag.runtime.base.KeptKV`)."""

    keys: Sequence[str | None]
    token_bytes: int

    def get_seq_length(self) -> int:
        return len(self.keys) * BLOCK_TOKENS

    def blocks(self, start: int, stop: int, size: int) -> Iterator[_BlockName]:
        return (_BlockName(key) for key in self.keys[start // size : -(-stop // size)])

    def write_blocks(self, part: KVPart) -> None:
        raise AssertionError("names are no KV")


class KeptPrompts:
    """Prompts of one tenant whose exact KV another process keeps. Safe to share between threads."""

    def __init__(self, parts: Parts) -> None:
        """``parts``: of the planning engine. Its prompt cache holds names, and counts the bytes of what they name."""
        self._parts, self._prompt_cache = parts, parts.prompt_cache
        assert self._prompt_cache.block_tokens == BLOCK_TOKENS, "blocks are of one size"
        self._about = ""

    def follow(self) -> str:
        """What the names of blocks say now. All are forgotten once KV depends on something else, as after an
        erasure."""
        runtime, store = self._parts.models.runtime, self._parts.store
        erasures = store.catalog.erasures(store.namespace) or 0
        about = json_digest([runtime.fingerprint, runtime.rope_pin, store.namespace, erasures])
        if about != self._about:
            self.forget()
            self._about = about
        return about

    def forget(self) -> None:
        """Some KV is gone: none is known any more."""
        self._prompt_cache.clear()

    def moving(self, plan: Plan, sources: KVSources) -> tuple[Plan, list[KVPart]]:
        """The plan with what is moved, and the KV, in blocks that are ``(key, num_tokens)``; the plan as it is, and
        none, where that computes no less."""
        layout, method = plan.layout, plan.method
        computes_all = not method.reuses_chunks or (method.exact_at_one and method.nominal_ratio >= 1.0)
        if not plan.moves or plan.obstructed or computes_all:
            return plan, []
        moves = range(layout.num_prefix, max(layout.num_tokens - LEAST_END, 0))
        with self._prompt_cache.match(layout.token_ids[:-1], moves=moves) as match:
            parts = [part for each in _moved(match) for part in _kept(each)]
        runs = [part.run for part in parts]
        moving = least_computed(plan, runs)
        if not moving.continues:
            return plan, []
        return replace(moving, known=known_kv(layout, plan.reused, runs)), parts

    def add(self, planned: PlannedPrompt, start: int) -> None:
        """Note that the other process computed a prompt's tokens from ``start`` on plainly, and keeps their KV: later
        prompts may move it, unless it depends on something else by now."""
        ids, about = planned.token_ids, planned.kept_about
        if about is None or about != self._about:
            return
        names, first = kept_keys(about, ids), -(-start // BLOCK_TOKENS)
        keys = [None if number < first else key for number, key in enumerate(names)]
        primary = cast("PlanningRuntime", self._parts.models.runtime)
        ids = ids[: len(keys) * BLOCK_TOKENS]
        self._prompt_cache.insert(ids, _Names(keys, primary.kv_token_bytes))
        with self._prompt_cache.match(ids) as match:
            blocks: Sequence[Any] = match.parts[0].blocks if match.parts else ()
            for block, key in zip(blocks, keys, strict=False):
                block.key = block.key or key


def _moved(match: KVMatch) -> list[KVPart]:
    assert match.parts is not None, "it is held"
    return [part for part in match.parts if part.run.source == KVSource.MOVED]


def _kept(part: KVPart) -> Iterator[KVPart]:
    """The parts of a run whose KV is kept."""
    run, at = part.run, part.run.start - part.skip
    for is_kept, group in groupby(part.blocks, key=lambda block: block.key is not None):
        blocks = [(block.key, BLOCK_TOKENS) for block in group]
        start, stop = max(at, run.start), min(at + len(blocks) * BLOCK_TOKENS, run.stop)
        if is_kept and stop - start >= LEAST_RUN:
            inside = slice(start - run.start, stop - run.start)
            past = None if run.past is None else run.past[inside]
            own = run._replace(start=start, stop=stop, source_start=run.source_start + inside.start, past=past)
            yield KVPart(own, blocks, start - at)
        at += len(blocks) * BLOCK_TOKENS
