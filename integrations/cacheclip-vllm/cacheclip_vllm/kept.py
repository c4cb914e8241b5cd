"""KV of prompts that vLLM computed plainly, kept in its workers' memory in blocks, for later prompts to move.

The scheduler's connector knows which blocks there are, and says which go; every worker keeps those of its heads. Names
say what a block holds and what stands before it (:func:`cacheclip_rag.planning.kept_keys`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cacheclip_rag import ConfigurationError
from cacheclip_rag.planning import BLOCK_TOKENS, FusionPlan, PlanningRuntime, kept_keys

from .captures import CapturedRows

GONE = "KV of an earlier prompt is gone from vLLM's workers"
"""The connector's reason for plain prefill of requests whose plan moves it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Under what a request's KV may be kept."""

    namespace: str
    about: str
    """All else on which the KV depends."""

    @classmethod
    def of(cls, values: object) -> Keep:
        """Read what a request carries. Raises ConfigurationError: it is something else."""
        if not isinstance(values, Mapping) or not all(
            isinstance(values.get(name), str) for name in ("namespace", "about")
        ):
            raise ConfigurationError("keep must have a namespace and about, which are texts")
        return cls(values["namespace"], values["about"])


class KeptBlocks:
    """What the scheduler's connector knows of the blocks."""

    def __init__(self, max_bytes: int, runtime: PlanningRuntime) -> None:
        """``max_bytes``: of all workers together."""
        self._most = max_bytes // (runtime.kv_token_bytes * BLOCK_TOKENS)
        self._blocks: OrderedDict[str, str] = OrderedDict()
        """Tenants by key, the least recently used first."""
        self._abouts: dict[str, str] = {}
        """By tenant, what its latest request says."""
        self._under_way: dict[str, tuple[Keep, Sequence[int]]] = {}
        self._dropped: dict[str, None] = {}

    def follow(self, keep: Keep) -> None:
        """Drop what a tenant's requests no longer name, for instance after an erasure."""
        if self._abouts.get(keep.namespace, keep.about) != keep.about:
            self._drop([key for key, namespace in self._blocks.items() if namespace == keep.namespace])
        self._abouts[keep.namespace] = keep.about

    def begin(self, request_id: str, keep: Keep, token_ids: Sequence[int]) -> bool:
        """Whether a prompt that is about to be computed is to be captured: not if there is no room."""
        waiting = sum(len(ids) for _, ids in self._under_way.values())
        if waiting + len(token_ids) > self._most * BLOCK_TOKENS:
            return False
        self._under_way[request_id] = keep, token_ids
        return True

    def named(self, rows: Sequence[CapturedRows]) -> list[CapturedRows]:
        """The rows, and with a prompt's last ones the names of its blocks, which are there once the step is over."""
        return [self._named(each) if each.is_last and each.request_id in self._under_way else each for each in rows]

    def _named(self, rows: CapturedRows) -> CapturedRows:
        keep, ids = self._under_way.pop(rows.request_id)
        keys = kept_keys(keep.about, ids)[-(-rows.start // BLOCK_TOKENS) :]
        if self._abouts.get(keep.namespace) == keep.about:
            for key in reversed(keys):  # the end of a prompt goes first
                self._dropped.pop(key, None)  # it is there again
                self._blocks[key] = keep.namespace
                self._blocks.move_to_end(key)
            self._drop([*self._blocks][: max(0, len(self._blocks) - self._most)])
        else:
            keys = []
        return replace(rows, keys=tuple(keys))

    def forget(self, request_id: str) -> None:
        self._under_way.pop(request_id, None)

    def holds(self, plan: FusionPlan) -> bool:
        """Whether all that a plan moves is there, and the tenant's."""
        keys = plan.moved_keys
        if any(self._blocks.get(key) != plan.namespace for key in keys):
            return False
        for key in keys:
            self._blocks.move_to_end(key)
        return True

    def clear(self) -> None:
        self._drop([*self._blocks])

    def take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, {}
        return [*dropped]

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._blocks[key]
            self._dropped[key] = None


def cut(kv: torch.Tensor, rows: CapturedRows, runtime: PlanningRuntime) -> dict[str, torch.Tensor]:
    """A worker's blocks of a captured prompt, with keys before RoPE, by their names. ``kv``: as captured, and
    overwritten."""
    free, blocks = runtime.position_free(kv, rows.start), dict[str, torch.Tensor]()
    for number, key in enumerate(rows.keys or (), -(-rows.start // BLOCK_TOKENS)):
        at = number * BLOCK_TOKENS - rows.start
        blocks[key] = free[:, :, :, at : at + BLOCK_TOKENS].clone()
    return blocks
