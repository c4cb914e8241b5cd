"""What goes on beside an answer while it is decoded: nothing, verified finishing, or a confidence gate.

Verified finishing: the exact KV of a prompt is completed while an approximate answer is decoded, and verifies it.
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
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.errors import ModelError
from ..guards.base import Verified
from ..runtime.base import KVMatch, Runtime, State, wait_for
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
CALL_CONFIDENCE = 0.2
"""Least confidence of the first :data:`_CALL_TOKENS` tokens of an approximate answer that may call a tool or keeps to a
schema, unless ``min_confidence`` is set: they decide between a call and text, and which tool."""
_CALL_TOKENS = 16
_ANSWER_BLOCK_ROWS = 64
"""Answer tokens in one pass. Each row has logits over the whole vocabulary, in a large one 600 kB."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Exact KV from which an answer goes on."""

    state: State
    """The exact KV of the prompt and of all ``ids`` but the last."""
    ids: list[int]
    """The answer so far: as it was given, or up to the first token that differs, with full prefill's token there."""
    keeping: Keep | None
    """What takes the exact KV into the prefix cache; None: nothing is kept."""


class Beside:
    """Nothing goes on beside the answer while it is decoded. Base class of what does: verified finishing, a confidence
    gate. :func:`~.decoding.decode` knows none of them by name."""

    asks_before = False
    """Whether :meth:`before` is still to be called."""
    asks_after = False
    """Whether :meth:`after` is still to be called."""
    may_withdraw = False
    """Whether text given so far may still be withdrawn."""

    def before(self, answer: Sequence[int], allowed: torch.Tensor) -> bool:
        """Called before a token is chosen, but for the first one, and in no turn: a pass is shared with other answers.
        ``allowed``: ``(vocab_size,)`` logits of the tokens that may come next. Returns whether :meth:`complete` is to
        be called."""
        return False

    def complete(self, answer: Sequence[int]) -> tuple[Continuation, torch.Tensor] | None:
        """Called in the turn of a token. Returns how to go on, and the logits to choose from instead; None: go on as
        before."""
        return None

    def after(self, answer: Sequence[int], *, completely: bool) -> Continuation | None:
        """Called after every token, the last one included. ``completely``: finish now, because no token waits for it.
        Returns how to go on; None: as before."""
        return None

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        """Called once, with all tokens of the answer. Returns fields of
        :class:`~cacheclip_rag.fusion.answer.FusionStats`."""
        return {}


@dataclass(eq=False, kw_only=True)
class Verification(Beside):
    """Completes the exact KV of one prompt, and verifies the answer to it.

    Needs a runtime with ``can_extend``, and the memory of a second KV of the prompt; computes nothing before the first
    token. A sampled answer is not verified, but goes on from the exact KV.
    """

    runtime: Runtime
    ids: torch.Tensor
    """The prompt, ``(num_tokens,)`` int64."""
    capacity: int
    """Tokens of prompt and answer."""
    find_match: Callable[[], KVMatch]
    """Looks the prompt up in the prefix cache, without its last token."""
    keeping: Keep | None
    """Takes the exact KV into the prefix cache."""
    is_greedy: bool
    revises: bool
    """Whether an answer that differs goes on from the first differing token."""
    asks_after: bool = True  # until the answer was compared
    seconds: float = 0.0
    """Seconds spent on the exact KV and on comparing."""
    result: Verified | None = None
    """Set once the answer was compared."""
    _state: Any = None
    _logits: torch.Tensor | None = None
    """Logits of the prompt's last token; None until the exact KV holds the prompt."""
    _choices: list[int] = field(default_factory=list)
    _resumed: bool = False
    _failed: bool = False

    @property
    def may_withdraw(self) -> bool:  # type: ignore[override]
        return self.revises and self.is_greedy and self.asks_after

    def after(self, answer: Sequence[int], *, completely: bool) -> Continuation | None:
        """Compute the next block of the prompt's KV, and compare the answer once the KV holds the whole prompt."""
        with self._timed(), self._survived():
            self._read_prompt(completely)
            if self._logits is not None:
                return self._settled(answer)
        return None

    def complete(self, answer: Sequence[int]) -> tuple[Continuation, torch.Tensor] | None:
        """Compute all the rest, because the answer goes on from the exact KV whatever full prefill would have
        chosen."""
        with self._timed(), self._survived():
            self._read_prompt(completely=True)
            self._compare(answer)
            last = torch.tensor(answer[-1:], dtype=torch.int64)
            logits = self.runtime.extend(self._state, last, self._state.get_seq_length())
            if logits is not None:
                self.asks_after, self._resumed = False, True
                return Continuation(self._state, list(answer), self.keeping), logits
        return None

    def _settled(self, answer: Sequence[int]) -> Continuation | None:
        self._compare(answer)
        assert self.result is not None
        self.asks_after = False
        differs_at = self.result.diverged_at if self.is_greedy else None
        self._resumed = differs_at is None or self.revises
        ids = list(answer)
        if differs_at is not None and self.revises:
            ids = [*answer[:differs_at], self._choices[differs_at]]
            self.runtime.cut(self._state, len(self.ids) + differs_at)
        self._keep(ids)
        return Continuation(self._state, ids, self.keeping) if self._resumed else None

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        """Compare the rest of an answer that went on from the approximate KV, and keep its exact KV."""
        if not self._resumed and not self._failed:
            with self._timed(), self._survived():
                self._compare(answer)
                self._keep(answer)
        if not self.is_greedy or self.result is None:
            return {"verify_s": self.seconds}
        at = self.result.diverged_at
        return {
            "verified_tokens": len(answer) if self._resumed else at,
            "diverged_at": at,
            "verify_s": self.seconds,
        }

    def _read_prompt(self, completely: bool) -> None:
        if self._state is None:
            with self.find_match() as match:
                self._state = self.runtime.begin(match, self.capacity)
        while self._logits is None:
            start, device = self._state.get_seq_length(), self.runtime.device.type
            rows = _LARGE_BLOCK_ROWS if completely else _BLOCK_ROWS.get(device, _BLOCK_ROWS_OF_ACCELERATORS)
            block = self.ids[start : start + rows]
            is_last = start + len(block) == len(self.ids)
            self._logits = self.runtime.extend(self._state, block, start, head=is_last)
            if not completely:
                return

    def _compare(self, answer: Sequence[int]) -> None:
        """Read the answer's tokens that were not read yet, and compare them with the likeliest ones."""
        assert self._logits is not None
        if self.runtime.pinned_rope:  # above this length, full prefill would use other rotary frequencies
            answer = answer[: max(1, self.runtime.reuse_tokens - len(self.ids) + 1)]
        if not self._choices:
            self._choices.append(int(self._logits.argmax()))
        unread = torch.tensor(answer[len(self._choices) - 1 : -1], dtype=torch.int64)
        for rows in unread.split(_ANSWER_BLOCK_ROWS) if len(unread) else ():
            start = self._state.get_seq_length()
            logits = self.runtime.extend(self._state, rows, start, logits_to_keep=len(rows))
            assert logits is not None
            self._choices += logits.reshape(len(rows), -1).argmax(-1).tolist()
        self.result = Verified(self._logits, tuple(answer), tuple(self._choices))

    def _keep(self, answer: Sequence[int]) -> None:
        if self.keeping is not None:
            ids = [*self.ids.tolist(), *answer]
            self.keeping(ids[: self._state.get_seq_length()], self._state)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """An answer must not fail because a second KV of its prompt has no room: it stays as it is, unverified."""
        try:
            yield
        except (RuntimeError, MemoryError, ModelError) as error:
            logger.warning("the answer could not be verified: %s", error)
            self.asks_after, self._failed = False, True
            self.result = self._state = None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        wait_for(self.runtime.device)  # the decoded token waits for the block in any case
        self.seconds += time.perf_counter() - begin


@dataclass(eq=False)
class Gate(Beside):
    """Has the exact KV completed before the first token of which the model is unsure."""

    exact: Verification
    """Completes the exact KV, and was not used before."""
    first_confidence: float
    """That of the first :data:`_CALL_TOKENS` tokens."""
    min_confidence: float
    """That of later ones."""
    asks_before: bool = True
    _completed_at: int | None = None

    def before(self, answer: Sequence[int], allowed: torch.Tensor) -> bool:
        least = self.first_confidence if len(answer) < _CALL_TOKENS else self.min_confidence
        is_sure = confidence(allowed) >= least
        self.asks_before = least > 0 and is_sure
        return not is_sure

    def complete(self, answer: Sequence[int]) -> tuple[Continuation, torch.Tensor] | None:
        exact = self.exact.complete(answer)
        if exact is not None:
            self._completed_at = len(answer)
        return exact

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        return {"completed_at": self._completed_at, "verify_s": self.exact.seconds}
