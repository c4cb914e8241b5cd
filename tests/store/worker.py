"""Processes that use one store at once, until their time is up or they are killed.

A program: for each line ``COUNT SECONDS MAX_BYTES`` on standard input it forks processes, prints their numbers, waits
for them and prints their exit codes. So torch is imported once.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tests.store.samples import TOKENS, key, kv, opened, put

NUMBERS = 30
"""Different entries that are written."""


def tokens_of(number: int) -> int:
    """From one to about twenty blocks."""
    return TOKENS + 60 * (number % 10)


def work(folder: Path, seed: int, seconds: float, max_bytes: int) -> None:
    """Write, read and delete entries. Raises AssertionError for KV that is not the key's."""
    store = opened(folder, max_bytes, memory_bytes=200_000 * (seed % 2))
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        number = chance.randrange(NUMBERS)
        action = chance.random()
        if action < 0.6:
            put(store, number, tokens=tokens_of(number))
        elif action < 0.9:
            got = store.get(key(number))
            assert got is None or torch.equal(got.tensor(), kv(number, tokens_of(number))), f"wrong KV under {number}"
        else:
            store.release([f"text {number}"])
    store.close()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for line in sys.stdin:
        count, seconds, max_bytes = line.split()
        children = []
        for seed in range(int(count)):
            child = os.fork()
            if child == 0:
                try:
                    work(folder, int(time.monotonic() * 1000) + seed, float(seconds), int(max_bytes))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        print(*children, flush=True)
        print(*[os.waitpid(child, 0)[1] for child in children], flush=True)


class Workers:
    """The program, for a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._running: list[int] = []

    def start(self, count: int, seconds: float, max_bytes: int) -> list[int]:
        """Numbers of the processes that are started."""
        assert self._process.stdin is not None
        print(count, seconds, max_bytes, file=self._process.stdin, flush=True)
        self._running = self._numbers()
        return self._running

    def wait(self) -> list[int]:
        """Exit codes of the processes, or the signals that ended them."""
        codes, self._running = self._numbers(), []
        return codes

    def end(self) -> None:
        """Kill what still runs, and end the program."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _numbers(self) -> list[int]:
        assert self._process.stdout is not None
        return [int(number) for number in self._process.stdout.readline().split()]


@contextmanager
def workers(folder: Path) -> Iterator[Workers]:
    """Processes on the store ``folder``."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.store.worker", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # helpers of tests
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        started = Workers(process)
        try:
            yield started
        finally:
            started.end()


if __name__ == "__main__":
    main()
