"""Who computes when several questions are asked at once: prompts one by one, the one with the least work first.

Prompts that are computed beside one another finish together, and late: four at once have their first tokens when the
last of four in a row would have it, and on shared cores their threads hinder one another. So a prompt waits until those
before it have their first tokens. Its rank is the work that was done when it came, and its own, in tokens to compute:
short prompts pass long ones, and no more work passes a prompt than it is itself. Long ones are computed in slices, and
between two slices whoever has a lower rank goes first.

Tokens of running answers are not computed beside a prompt either, but between two prompts or slices every answer that
waits gets one: no stream of questions can stop an answer, and no answer delays a first token by more than the time of
one token. Tokens of several answers are computed in one pass, which reads the weights once for all: whoever asks first
computes for all who wait (flat combining).

A turn ends before anything is given to the caller, so that an answer that nobody reads on holds up no other one. A
question whose caller leaves while it waits leaves the queue (:class:`Waiter`), and between two slices, too. Work that
nobody waits for goes on in short turns while no answer is under way.

Turns belong to a loaded model: engines that share its weights (of several tenants, for instance) share one queue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

    from ..runtime.base import Runtime

logger = logging.getLogger(__name__)


class CallerLeft(Exception):
    """Raised in a thread that waits for its turn for a caller who has left. Nobody reads the answer."""


class Waiter:
    """Who waits for an answer that another thread computes, and may leave before it is there."""

    def __init__(self, *, in_background: bool = False) -> None:
        """``in_background``: prompts of others go first, whatever their work."""
        self.has_left, self.in_background = False, in_background
        self._waits_at: threading.Condition | None = None

    def leave(self) -> None:
        """Give up: the question leaves the queue, if it is still in it. Called by the caller's thread."""
        self.has_left = True
        place = self._waits_at
        if place is not None:
            with place:
                place.notify_all()

    def check(self) -> None:
        """Raise CallerLeft if nobody waits for the answer any more."""
        if self.has_left:
            raise CallerLeft("the caller left before it was this question's turn")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What this thread asks within the block, it asks for this caller."""
        token = CALLER.set(self)
        try:
            yield
        finally:
            CALLER.reset(token)

    @contextmanager
    def waiting(self, place: threading.Condition) -> Iterator[None]:
        """Within the block, :meth:`leave` wakes those who wait at ``place``."""
        self._waits_at = place
        try:
            yield
        finally:
            self._waits_at = None


CALLER: ContextVar[Waiter | None] = ContextVar("cacheclip_caller", default=None)
"""For whom this thread asks, if it is somebody who may leave."""


def turns_of(runtime: Runtime) -> Turns:
    """The turns of a loaded model, the same for all engines that use it."""
    with _turns_lock:
        if runtime not in _turns:
            _turns[runtime] = Turns()
        return _turns[runtime]


_turns: WeakKeyDictionary[Runtime, Turns] = WeakKeyDictionary()
"""Of every loaded model; they go with it."""
_turns_lock = threading.Lock()


class _OfThread(threading.local):
    has_turn = False
    """Whether this thread has a turn, so that it needs no other."""


@dataclass(eq=False, slots=True)
class _WaitingPrompt:
    """A prompt that waits for its turn, or has it."""

    came: int
    """Work that was done when it came, or far more: others go first. This and all work: tokens to compute."""
    work: int
    """Its own work, as far as it is known; 0 until somebody waits."""
    done: int = 0
    """Work of its slices so far."""


Pause = Callable[[int, int], None]
"""Called in a prompt's turn after a slice, with the tokens computed so far and those of the whole prompt: others go
first, if it is their turn. Raises CallerLeft."""


@dataclass(eq=False, slots=True)
class _DecodeStep:
    """A token of an answer, and the logits after it."""

    state: Any
    token_id: int
    logits: torch.Tensor | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.logits is not None or self.error is not None


_BEHIND = 2**60
"""Tokens by which prompts in the background rank behind all others."""
_PATIENCE = 0.1
"""Share of a pass's time for which the next one waits for answers of the last one that have not asked yet. Without it,
answers would fall into groups that take turns."""


class Turns:
    """The order of computations of one model. Safe to share between threads; a thread that has a turn may take
    another one inside it, which does not wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers = 0
        """Answers under way, from the question to the last token."""
        self._ended_at = -math.inf
        """When the latest answer ended."""
        self._prompts: list[_WaitingPrompt] = []
        """Prompts that wait, in the order of their arrival, and the running one."""
        self._work = 0
        """Work that was done while others waited."""
        self._is_running = False
        """Whether a prompt has its turn."""
        self._tokens = 0
        """Tokens that are being computed."""
        self._waiting = 0
        """Tokens that wait for the running prompt, or for the next one."""
        self._ended = 0
        """Turns of prompts that ended."""
        self._invited = 0
        """Tokens that waited for a prompt, and go before the next one."""
        self._asked: list[_DecodeStep] = []
        """Steps that wait for a pass."""
        self._is_stepping = False
        """Whether a thread computes, or gathers, steps."""
        self._last: set[int] = set()
        """States of the last pass."""
        self._pass_s = 0.0
        """Seconds of the last pass."""
        self._own = _OfThread()

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way, and nothing is computed in a turn."""
        return not (self._answers or self._prompts or self._tokens)

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Within the block an answer is under way, so that :meth:`idle` waits."""
        with self._changed:
            self._answers += 1
        try:
            yield
        finally:
            with self._changed:
                self._answers -= 1
                self._ended_at = time.monotonic()
                self._changed.notify_all()

    @contextmanager
    def idle(self, quiet_s: float = 0.0) -> Iterator[None]:
        """The turn of a short computation that nobody waits for: waits until the model is idle, and no answer has ended
        for ``quiet_s`` seconds. A prompt that comes waits for its end, as for that of a token."""
        with ExitStack() as stack:
            with self._changed:
                self._wait_until(lambda: self.is_idle)
                while (rest_s := self._ended_at + quiet_s - time.monotonic()) > 0:
                    self._wait_until(lambda: not self.is_idle, rest_s)
                    self._wait_until(lambda: self.is_idle)
                stack.enter_context(self.token())  # does not wait: there is no prompt
            yield

    @contextmanager
    def prompt(self, work: Callable[[], int] = lambda: 0) -> Iterator[Pause | None]:
        """The turn of a prompt: waits for prompts that go first, and for tokens that are being computed. ``work`` is
        asked for the tokens to compute if others wait. Gives what lets others go first between two slices; None: nobody
        is there who could, nor could the caller leave."""
        if self._own.has_turn:
            yield None
            return
        caller = CALLER.get()
        came = self._work + (_BEHIND if caller is not None and caller.in_background else 0)
        mine = _WaitingPrompt(came, work() if self._prompts else 0)
        with self._changed:
            self._prompts.append(mine)
            self._begin(mine)
        self._own.has_turn = True
        try:
            yield partial(self._pause, mine) if caller is not None or self._answers > 1 else None
        finally:
            self._own.has_turn = False
            with self._changed:
                if mine in self._prompts:  # else its caller left between two slices
                    self._prompts.remove(mine)
                    self._end(mine, mine.work)

    def _pause(self, mine: _WaitingPrompt, done: int, work: int) -> None:
        with self._changed:
            mine.work = work
            self._end(mine, done)
            self._begin(mine)

    def _begin(self, mine: _WaitingPrompt) -> None:
        """Wait for a prompt's turn, and take it."""
        try:
            self._wait_until(
                lambda: (
                    not (self._is_running or self._tokens or self._invited)
                    and mine is min(self._prompts, key=lambda each: each.came + each.work)
                )
            )
        except BaseException:
            self._prompts.remove(mine)
            self._changed.notify_all()
            raise
        self._is_running = True

    def _end(self, mine: _WaitingPrompt, done: int) -> None:
        """Give a prompt's turn back, with so much of its work done."""
        self._work, mine.done = self._work + done - mine.done, done
        self._is_running = False
        self._ended += 1
        self._invited += self._waiting
        self._waiting = 0
        self._changed.notify_all()

    @contextmanager
    def token(self) -> Iterator[None]:
        """The turn of one token of an answer: waits for a prompt, or a slice of it, that is being computed or comes
        next."""
        if self._own.has_turn:
            yield
            return
        with self._changed:
            if self._prompts:
                self._wait_for_one_prompt()
            self._tokens += 1
        self._own.has_turn = True
        try:
            yield
        finally:
            self._own.has_turn = False
            with self._changed:
                self._tokens -= 1
                self._changed.notify_all()

    def step(self, runtime: Runtime, state: Any, token_id: int) -> torch.Tensor:
        """Append one token to a state and return the next logits, in the turn of a token. Answers that ask at about the
        same time share a pass, which may round otherwise than a pass each."""
        if self._own.has_turn or self._answers < 2:
            with self.token():
                return runtime.decode_step(state, token_id)
        mine = _DecodeStep(state, token_id)
        with self._changed:
            self._asked.append(mine)
            self._changed.notify_all()
            self._changed.wait_for(lambda: mine.is_done or not self._is_stepping)
            leads = not mine.is_done
            self._is_stepping = self._is_stepping or leads
        if leads:
            self._step_together(runtime)
        if mine.error is not None:
            raise mine.error
        assert mine.logits is not None
        return mine.logits

    def _step_together(self, runtime: Runtime) -> None:
        steps: list[_DecodeStep] = []
        try:
            with self.token():
                with self._changed:
                    self._changed.wait_for(self._have_all_asked, _PATIENCE * self._pass_s)
                    steps, self._asked = self._asked, []
                began = time.perf_counter()
                _compute(runtime, steps)
                self._last, self._pass_s = {id(step.state) for step in steps}, time.perf_counter() - began
        finally:
            with self._changed:
                self._asked += [step for step in steps if not step.is_done]  # this thread was interrupted
                self._is_stepping = False
                self._changed.notify_all()

    def _have_all_asked(self) -> bool:
        return self._last <= {id(step.state) for step in self._asked}

    def _wait_until(self, has_come: Callable[[], bool], timeout_s: float | None = None) -> None:
        caller = CALLER.get()
        if caller is None:
            self._changed.wait_for(has_come, timeout_s)
            return
        with caller.waiting(self._changed):
            self._changed.wait_for(lambda: caller.has_left or has_come(), timeout_s)
        caller.check()

    def _wait_for_one_prompt(self) -> None:
        came = self._ended
        self._waiting += 1
        try:
            self._changed.wait_for(lambda: self._ended > came or not self._prompts)
        finally:
            if self._ended > came:
                self._invited -= 1
            else:
                self._waiting -= 1
            self._changed.notify_all()


def _compute(runtime: Runtime, steps: Sequence[_DecodeStep]) -> None:
    """Fill in logits or errors. An error of a pass for several is not for all of them: each is computed alone then."""
    try:
        rows = runtime.decode_steps([step.state for step in steps], [step.token_id for step in steps])
    except Exception as error:
        if len(steps) == 1:
            steps[0].error = error
            return
        logger.warning("a pass for %d answers failed: each is computed alone", len(steps), exc_info=True)
        for step in steps:
            _compute(runtime, [step])
        return
    for step, logits in zip(steps, rows, strict=True):
        step.logits = logits
