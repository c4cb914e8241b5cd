"""Verified finishing: the exact KV of a prompt is completed while an approximate answer is decoded, and verifies it.
A confidence gate completes it at once, before a token of which the model is unsure.

A second state of the same prompt starts from the prefix cache and reads the prompt's tokens in order, one block after
each decoded token. Once it holds the whole prompt, one pass over the answer so far gives the tokens that full prefill
would have chosen. If all are equal, decoding goes on with the exact state, so that the rest of the answer is exact too.
The check is that of speculative decoding (arXiv:2211.17192) with the approximate KV as the draft; here the draft is a
whole answer, because the exact KV comes later than its first tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..guards.base import Verified
from ..runtime.base import KVMatch, Runtime, wait_for
from .beside import Beside, Continuation
from .prefill import Keep, confidence

logger = logging.getLogger(__name__)

_BLOCK_ROWS = {"cpu": 16}
"""Prompt tokens computed after each decoded token, by device type. A decoded token reads all weights once, and so does
a block, so that a small block's arithmetic hides behind the reading. On a CPU core, 16 tokens took 1.8 times as long as
a decoded token, and 4 tokens 1.3 times (smollm2-135m, float32): smaller blocks delay tokens little less."""
_BLOCK_ROWS_OF_ACCELERATORS = 256
"""The same for device types not listed: accelerators compute hundreds of rows while they read the weights."""
_LARGE_BLOCK_ROWS = 1024
"""Prompt tokens in one pass when nothing waits for the next token. Limits the memory for activations."""
_ANSWER_BLOCK_ROWS = 64
"""Answer tokens in one pass. Each row has logits over the whole vocabulary, in a large one 600 kB."""


class Verification(Beside):
    """Completes the exact KV of one prompt, and verifies the answer to it.

    Needs the memory of a second KV of the prompt. A sampled answer is not verified, but goes on from the exact KV.
    """

    def __init__(
        self,
        runtime: Runtime,
        ids: torch.Tensor,
        *,
        capacity: int,
        find_match: Callable[[], KVMatch],
        keeping: Keep | None,
        is_greedy: bool,
        revises: bool,
    ) -> None:
        """Computes nothing yet. ``ids``: the prompt, ``(num_tokens,)`` int64. ``capacity``: tokens of prompt and
        answer. ``find_match`` looks the prompt up in the prefix cache, without its last token; ``keeping`` takes the
        exact KV into it. ``revises``: an answer that differs goes on from the first differing token."""
        assert runtime.can_extend, "verified finishing needs a runtime with can_extend"
        self.keeping = keeping
        self.asks_after = True  # until the answer was compared
        self.seconds = 0.0
        """Seconds spent on the exact KV and on comparing."""
        self.result: Verified | None = None
        """Set once the answer was compared."""
        self._runtime = runtime
        self._ids = ids
        self._capacity = capacity
        self._find_match = find_match
        self._is_greedy = is_greedy
        self._revises = revises
        self._state: Any = None
        self._logits: torch.Tensor | None = None
        """Logits of the prompt's last token; None until the exact KV holds the prompt."""
        self._choices: list[int] = []
        self._resumed = False
        self._failed = False
        device = runtime.device.type
        self._block_rows = _BLOCK_ROWS.get(device, _BLOCK_ROWS_OF_ACCELERATORS)

    @property
    def may_withdraw(self) -> bool:  # type: ignore[override]
        return self._revises and self._is_greedy and self.asks_after

    def after(self, answer: Sequence[int], *, completely: bool) -> Continuation | None:
        """Compute the next block of the prompt's KV, and compare the answer once the KV holds the whole prompt."""
        with self._timed(), self._survived():
            self._read_prompt(completely)
            if self._logits is not None:
                return self._settled(answer)
        return None

    def complete(self, answer: Sequence[int]) -> tuple[Continuation, torch.Tensor] | None:
        """Compute all the rest, because the answer goes on from the exact KV whatever full prefill would have chosen.
        Returns what :meth:`before` does; None if it could not be computed."""
        with self._timed(), self._survived():
            self._read_prompt(completely=True)
            self._compare(answer)
            last = torch.tensor(answer[-1:], dtype=torch.int64)
            logits = self._runtime.extend(self._state, last, self._state.get_seq_length())
            if logits is not None:
                self.asks_after, self._resumed = False, True
                return Continuation(self._state, list(answer), self.keeping), logits
        return None

    def _settled(self, answer: Sequence[int]) -> Continuation | None:
        self._compare(answer)
        assert self.result is not None
        self.asks_after = False
        differs_at = self.result.diverged_at if self._is_greedy else None
        self._resumed = differs_at is None or self._revises
        ids = list(answer)
        if differs_at is not None and self._revises:
            ids = [*answer[:differs_at], self._choices[differs_at]]
            self._runtime.cut(self._state, len(self._ids) + differs_at)
        self._keep(ids)
        return Continuation(self._state, ids, self.keeping) if self._resumed else None

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        """Compare the rest of an answer that went on from the approximate KV, and keep its exact KV."""
        if not self._resumed and not self._failed:
            with self._timed(), self._survived():
                self._compare(answer)
                self._keep(answer)
        if not self._is_greedy or self.result is None:
            return {"verify_s": self.seconds}
        at = self.result.diverged_at
        return {
            "verified_tokens": len(answer) if self._resumed else at,
            "diverged_at": at,
            "verify_s": self.seconds,
        }

    def _read_prompt(self, completely: bool) -> None:
        if self._state is None:
            with self._find_match() as match:
                self._state = self._runtime.begin(match, self._capacity)
        while self._logits is None:
            start, rows = self._state.get_seq_length(), _LARGE_BLOCK_ROWS if completely else self._block_rows
            block = self._ids[start : start + rows]
            is_last = start + len(block) == len(self._ids)
            self._logits = self._runtime.extend(self._state, block, start, head=is_last)
            if not completely:
                return

    def _compare(self, answer: Sequence[int]) -> None:
        """Read the answer's tokens that were not read yet, and compare them with the likeliest ones."""
        assert self._logits is not None
        if self._runtime.pinned_rope:  # above this length, full prefill would use other rotary frequencies
            answer = answer[: max(1, self._runtime.reuse_tokens - len(self._ids) + 1)]
        if not self._choices:
            self._choices.append(int(self._logits.argmax()))
        unread = torch.tensor(answer[len(self._choices) - 1 : -1], dtype=torch.int64)
        for rows in unread.split(_ANSWER_BLOCK_ROWS) if len(unread) else ():
            start = self._state.get_seq_length()
            logits = self._runtime.extend(self._state, rows, start, logits_to_keep=len(rows))
            assert logits is not None
            self._choices += logits.reshape(len(rows), -1).argmax(-1).tolist()
        self.result = Verified(self._logits, tuple(answer), tuple(self._choices))

    def _keep(self, answer: Sequence[int]) -> None:
        if self.keeping is not None:
            ids = [*self._ids.tolist(), *answer]
            self.keeping(ids[: self._state.get_seq_length()], self._state)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """An answer must not fail because a second KV of its prompt has no room: it stays as it is, unverified."""
        try:
            yield
        except RuntimeError as error:
            logger.warning("the answer could not be verified: %s", error)
            self.asks_after, self._failed = False, True
            self.result = self._state = None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        wait_for(self._runtime.device)  # the decoded token waits for the block in any case
        self.seconds += time.perf_counter() - begin


class Gate(Beside):
    """Has the exact KV completed before the first token of which the model is unsure."""

    def __init__(self, exact: Verification, min_confidence: float) -> None:
        """``exact`` completes the exact KV, and must not have been used."""
        self.asks_before = True
        self._exact = exact
        self._min_confidence = min_confidence
        self._completed_at: int | None = None

    def before(self, answer: Sequence[int], allowed: torch.Tensor) -> tuple[Continuation, torch.Tensor] | None:
        if confidence(allowed) >= self._min_confidence:
            return None
        self.asks_before = False
        found = self._exact.complete(answer)
        if found is not None:
            self._completed_at = len(answer)
        return found

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        return {"completed_at": self._completed_at, "verify_s": self._exact.seconds}
