"""What is done while no answer is under way: exact KV of prompts is completed (``finish="idle"``), then other steps.

The next question on the same documents, or the next turn of a chat, then begins with exact KV: as with ordinary prefix
caching, however soon the first answer came. The prompt is read in slices that are short enough for a question to wait
for one; each slice goes into the prefix cache at once, so that a question finds the exact KV as far as it got.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime.base import Runtime, wait_for
from ..runtime.kv_blocks import num_equal
from ..runtime.prompt_cache import PromptCache
from .turns import CallerLeft, Waiter, turns_of

logger = logging.getLogger(__name__)

_SLICE_S = 0.15
"""Seconds that a slice should take: the longest that a question waits for it. Shorter ones read the weights more
often for the same prompt."""
_MOST_ROWS = 1024
"""Most prompt tokens of a slice. Limits the memory for activations."""
_MOST_PROMPTS = 4
"""Most prompts that wait; above it, the oldest is left as it is. A busy engine could never catch up."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt and its answer, whose exact KV is to be completed."""

    runtime: Runtime
    prompt_cache: PromptCache
    ids: np.ndarray[Any, Any]
    generation: int
    state: Any = None
    """Exact KV of the first ``done`` tokens; None if it is only in the prefix cache."""
    done: int = 0

    def takes_place_of(self, other: _Prompt) -> bool:
        """Whether it is the next prompt of the same conversation: half of the other's tokens or more are equal."""
        return 2 * num_equal(self.ids, other.ids) >= len(other.ids)


class IdleCompletion:
    """Completes the exact KV of one engine's prompts, the latest first, on a thread of its own.

    Args:
        clock: seconds, for the length of slices.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._prompts: list[_Prompt] = []
        """The latest last."""
        self._steps: list[tuple[Runtime, Callable[[], bool], float]] = []
        """What else is done while no answer is under way, after the prompts, and after how many seconds without one."""
        self._rows = 0
        """Prompt tokens of the next slice; 0: as few as the prefix cache takes."""
        self._worker: threading.Thread | None = None
        """Runs while prompts are waiting."""
        self._waiter = Waiter()
        """Leaves when the worker must not wait for its turn any longer."""
        self._changed = threading.Condition()

    def add(self, runtime: Runtime, prompt_cache: PromptCache, ids: Sequence[int], generation: int) -> None:
        """Complete the exact KV of these tokens later, in whole blocks of the prefix cache. Takes the place of an
        earlier prompt of the same conversation. ``generation`` is what :attr:`PromptCache.generation` was when the
        question came: if it is another number later, texts may have been released, and nothing is kept."""
        whole = len(ids) - len(ids) % prompt_cache.block_tokens
        if not runtime.can_extend or not 0 < whole <= runtime.reuse_tokens:
            return
        new = _Prompt(runtime, prompt_cache, np.asarray(ids[:whole], np.int64), generation)
        with self._changed:
            others = [each for each in self._prompts if not new.takes_place_of(each)]
            self._prompts = [*others, new][-_MOST_PROMPTS:]
            self._start()

    def add_step(self, runtime: Runtime, step: Callable[[], bool], quiet_s: float = 0.0) -> None:
        """Call ``step`` in turns of its own until it returns True, each when no answer has ended for ``quiet_s``
        seconds. One that waits is not added again. Its errors are only logged."""
        with self._changed:
            if (runtime, step, quiet_s) not in self._steps:
                self._steps.append((runtime, step, quiet_s))
            self._start()

    def _start(self) -> None:
        if self._worker is None or not self._worker.is_alive():  # as after a fork
            self._waiter = Waiter()
            self._worker = threading.Thread(target=self._work, name="cacheclip-idle", daemon=True)
            self._worker.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no prompt is left; False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._worker is None, timeout_s)

    def close(self) -> None:
        """Leave all prompts as they are, and return after the running slice."""
        with self._changed:
            self._prompts.clear()
            self._steps.clear()
            self._waiter.leave()
            worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        with self._waiter.asking():
            while True:
                with self._changed:
                    if not self._prompts and not self._steps:
                        self._worker = None
                        self._changed.notify_all()
                        return
                    prompt = self._prompts[-1] if self._prompts else None
                    for other in self._prompts[:-1]:
                        other.state = None  # memory holds one prompt's KV at a time
                if prompt is None:
                    self._take_step()
                elif self._is_over_after_slice(prompt):
                    with self._changed:
                        self._prompts = [each for each in self._prompts if each is not prompt]

    def _take_step(self) -> None:
        with self._changed:
            runtime, step, quiet_s = self._steps.pop(0) if self._steps else (None, None, 0.0)
        if runtime is None or step is None:
            return
        try:
            with turns_of(runtime).idle(quiet_s):
                is_over = step()
        except CallerLeft:
            return
        except Exception:
            logger.warning("work that waited until no answer was under way failed", exc_info=True)
            return
        with self._changed:
            if not is_over and not self._waiter.has_left and (runtime, step, quiet_s) not in self._steps:
                self._steps.append((runtime, step, quiet_s))

    def _is_over_after_slice(self, prompt: _Prompt) -> bool:
        """Compute the next slice. Returns whether it was the last one."""
        turns = turns_of(prompt.runtime)
        if not turns.is_idle:
            prompt.state = None  # memory is for the answers that are under way
        try:
            with turns.idle():
                if prompt not in self._prompts[-1:]:
                    return False  # a later prompt came while this one waited
                return self._extend(prompt)
        except CallerLeft:
            return True
        except Exception as error:  # for instance out of memory: the answer itself is not affected
            logger.warning("the exact KV of a prompt could not be completed: %s", str(error) or type(error).__name__)
            return True

    @torch.inference_mode()
    def _extend(self, prompt: _Prompt) -> bool:
        runtime, prompt_cache, ids = prompt.runtime, prompt.prompt_cache, prompt.ids
        started = self._clock()
        if prompt.state is None:
            with prompt_cache.match(ids.tolist()) as match:
                prompt.done = match.num_tokens
                if prompt.done == len(ids):
                    return True
                prompt.state = runtime.begin(match, len(ids))
        rows = torch.from_numpy(ids[prompt.done : prompt.done + max(self._rows, prompt_cache.block_tokens)])
        runtime.extend(prompt.state, rows, prompt.done, head=False)
        wait_for(runtime.device)
        prompt.done += len(rows)
        done = ids[: prompt.done].tolist()
        prompt_cache.insert(done, prompt.state, generation=prompt.generation)
        seconds = max(self._clock() - started, 1e-6)
        self._rows = min(int(len(rows) * _SLICE_S / seconds), _MOST_ROWS)
        has_room = prompt_cache.known(done) + prompt_cache.block_tokens > prompt.done
        return prompt.done == len(ids) or not has_room
