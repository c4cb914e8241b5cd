"""What vLLM's own prefix cache holds of a fused request, and under which hashes.

vLLM finds a block by a hash of all tokens up to its end. Blocks before the first stored chunk have vLLM's own hashes,
and everyone shares them. From there on KV is approximate, and the hashes are a request's own: made with a key that this
process draws, so that no client can name them. Prompts whose plans compute the same tokens of the same chunks have the
same hashes where their first tokens are equal. So the next question on the same documents, or the next turn of a chat,
continues from that KV if the method chooses tokens without the question.

A method that chooses by the question starts anew. Requests share blocks, and nobody writes into a block that others may
read: tokens for another question would need copies of the blocks, whose layout each attention backend chooses. Without
tokens of their own, later questions had worse answers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cacheclip_rag.planning import FusionPlan, is_plain_better

from .passes import computed_rows


@dataclass(frozen=True, slots=True)
class Continued:
    """Approximate KV of earlier prompts that a request goes on from. Fields as in
    :class:`~cacheclip_rag.fusion.answer.FusionStats`."""

    num_tokens: int = 0
    turns: int = 0
    stale_from: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the request's outcome; none if it continues nothing."""
        if not self.num_tokens:
            return {}
        return {
            "continued_tokens": self.num_tokens,
            "continued_turns": self.turns,
            "stale_from": self.stale_from,
        }


@dataclass(slots=True)
class _Salted:
    """A request with hashes of its own."""

    plan: FusionPlan
    first: int
    """Its first block with such a hash."""
    exact: tuple[Any, ...]
    """vLLM's own hashes of its blocks."""
    cache_salt: str | None
    """The client's."""
    continued: Continued = Continued()
    is_placed: bool = False
    """Whether vLLM has found blocks for it. After a preemption, its own KV may be in the cache."""


class PrefixBlocks:
    """Requests' hashes, and which answers the blocks under them come from."""

    def __init__(self, block_size: int, num_blocks: int, manager: Callable[[], Any]) -> None:
        """
        Args:
            num_blocks: those of vLLM's cache.
            manager: gives vLLM's manager of blocks, which the connector gets later.
        """
        self._block_size, self._num_blocks, self._manager = block_size, num_blocks, manager
        self._key = secrets.token_bytes(32)
        self._salted: dict[str, _Salted] = {}
        self._made: OrderedDict[bytes, tuple[int, int | None]] = OrderedDict()
        """By hash of a block with approximate KV: answers whose KV it and those before it are, and the first token that
        is as it was stored. The least recently made one is dropped."""

    def known(self, request: Any) -> int:
        """Tokens of a request that the cache holds now, without its last one."""
        found: int = self._manager().get_computed_blocks(request)[1]
        return found

    def choose(self, request: Any, plan: FusionPlan, **room: int) -> bool:
        """Give a request the hashes with which its plan computes the fewest rows, and return True; or leave it as it is
        if plain prefill computes less after the exact KV that the cache holds. Exact KV is worth a few rows.

        Args:
            room: of a pass (:func:`~cacheclip_vllm.passes.passes`).
        """
        exact = self.known(request)
        plain = len(plan.token_ids) - exact
        fresh = computed_rows(plan, min(exact, plan.num_exact), **room)
        hashes, given = [*request.block_hashes], request.cache_salt
        ways: list[tuple[int, int, list[Any], str | None]] = []
        for start in sorted({plan.num_exact, max(plan.num_exact, exact)}):
            first = salt(request, plan.lineage, start // self._block_size, self._key)
            rows = computed_rows(plan, self.known(request), **room)
            ways.append((rows, first, [*request.block_hashes], request.cache_salt))
            request.block_hashes[:], request.cache_salt = hashes, given
        rows, first, own, salted = min(ways, key=lambda way: way[0])
        if is_plain_better(plain, max(fresh, rows), rows):
            return False
        request.block_hashes[:], request.cache_salt = own, salted
        self._salted[request.request_id] = _Salted(plan, first, tuple(hashes), given)
        return True

    def is_exact(self, request: Any) -> bool:
        """Whether all that the cache holds now of a request is exact KV."""
        salted = self._salted.get(request.request_id)
        return salted is None or self.known(request) <= salted.first * self._block_size

    def is_plain(self, request: Any) -> bool:
        """Whether a request has vLLM's own hashes, so that all of its KV is exact."""
        return request.request_id not in self._salted

    def is_better_plain(self, request: Any, num_tokens: int, **room: int) -> bool:
        """Whether exact KV has come since the request arrived, with which plain prefill computes less. If so, the
        request has vLLM's hashes again.

        Args:
            num_tokens: those that the cache holds under the request's own hashes. Others are :meth:`choose`'s.
        """
        salted = self._salted.get(request.request_id)
        if salted is None or salted.is_placed:
            return False
        own, given = [*request.block_hashes], request.cache_salt
        request.block_hashes[:], request.cache_salt = salted.exact, salted.cache_salt
        if len(salted.plan.token_ids) - self.known(request) < computed_rows(salted.plan, num_tokens, **room):
            del self._salted[request.request_id]
            return True
        request.block_hashes[:], request.cache_salt = own, given
        return False

    def see(self, request: Any, num_tokens: int) -> None:
        """Note of how many tokens vLLM found the KV, before the request has blocks."""
        salted = self._salted.get(request.request_id)
        if salted is None:
            return
        first = max(salted.plan.num_exact, num_tokens) // self._block_size
        if first < salted.first:  # exact blocks that it had are gone: the plan makes approximate KV in their place
            salted.first = salt(request, salted.plan.lineage, first, self._key)
        if salted.is_placed:
            return
        salted.continued = Continued()
        last = num_tokens // self._block_size
        if last > salted.first:
            known = (self._made.get(each) for each in reversed(request.block_hashes[salted.first : last]))
            turns, stale = next(filter(None, known), (1, self._first_stale(salted)))
            salted.continued = Continued(num_tokens, turns, stale if stale is not None and stale < num_tokens else None)

    def place(self, request: Any) -> None:
        """Note that the request has blocks, which others may find from now on."""
        salted = self._salted.get(request.request_id)
        if salted is not None and not salted.is_placed:
            salted.is_placed = True
            self._note(request, salted)

    def fail(self, request: Any, num_tokens: int) -> None:
        """Note that vLLM computes the request's tokens from ``num_tokens`` on. If only exact KV comes before, all of it
        is exact, and the request has vLLM's hashes again."""
        salted = self._salted.get(request.request_id)
        if salted is not None and num_tokens <= salted.first * self._block_size:
            del self._salted[request.request_id]
            request.block_hashes[:], request.cache_salt = salted.exact, salted.cache_salt
            request.update_block_hashes()

    def finish(self, request: Any) -> Continued:
        """What the request continued. Its answer's blocks may be continued from now on."""
        salted = self._salted.pop(request.request_id, None)
        if salted is None:
            return Continued()
        if salted.is_placed:
            self._note(request, salted)
        return self._whole(salted)

    def _note(self, request: Any, salted: _Salted) -> None:
        """Remember what the blocks are that the request did not find in the cache."""
        found = self._whole(salted)
        about = found.turns + 1, found.stale_from
        for each in request.block_hashes[max(salted.first, found.num_tokens // self._block_size) :]:
            self._made[each] = about
            self._made.move_to_end(each)
        while len(self._made) > self._num_blocks:
            self._made.popitem(last=False)

    def _whole(self, salted: _Salted) -> Continued:
        """What a request continued, and the first stale token of all its tokens."""
        found = salted.continued
        if found.stale_from is not None:
            return found
        return replace(found, stale_from=self._first_stale(salted, found.num_tokens))

    def _first_stale(self, salted: _Salted, start: int = 0) -> int | None:
        return salted.plan.first_stale(max(start, salted.first * self._block_size))


def salt(request: Any, name: str, first: int, key: bytes) -> int:
    """Give a request's tokens from a block on hashes of their own in vLLM's prefix cache, whatever the client sent.

    Args:
        name: requests with the same one have the same hashes for the same tokens.
        first: number of the block.
        key: nobody who does not know it can make such hashes.

    Returns:
        The number of the first block with a hash of its own: less than ``first`` if no whole block of the request
        follows.
    """
    hashes = request.block_hashes
    first = min(first, len(hashes) - 1)  # later hashes depend on the last one
    if first <= 0:
        request.cache_salt = _digest(key, name, (request.cache_salt or "").encode()).hex()
        hashes.clear()
        request.update_block_hashes()
        return 0
    exact = hashes[first - 1]
    hashes[first - 1 :] = [_digest(key, name, exact)]
    request.update_block_hashes()
    hashes[first - 1] = exact
    return first


def _digest(key: bytes, name: str, before: bytes) -> bytes:
    return hmac.new(key, f"{name}|".encode() + before, hashlib.sha256).digest()
