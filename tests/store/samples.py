"""Keys, KV and payload files for the tests of the store."""

import io
import os
import resource
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from store_entries import *  # noqa: F403
from store_entries import TOKENS, key, kv

from cacheclip_rag.finding.texts import text_row
from cacheclip_rag.store import encode_frame, text_digest

BLOCK = 4096
"""Bytes of a disk block."""


def frame(number: int, tokens: int = TOKENS) -> bytearray:
    """The payload of such an entry."""
    text = f"text {number}"
    entry = kv(number, tokens)
    return encode_frame(entry, "float32", key(number), namespace="t", digest=text_digest(text), text=text_row(text))


def size(tokens: int = TOKENS) -> int:
    """Bytes of such a payload in memory."""
    return len(frame(0, tokens))


def blocks(tokens: int = TOKENS) -> int:
    """Bytes of such a payload on disk."""
    return -(-size(tokens) // BLOCK) * BLOCK


def run(program: str | Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: forked, because importing torch again takes seconds."""
    opening = "import os, signal, sys\nimport torch\nfrom pathlib import Path\nfrom tests.store.samples import *\n"
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(1)  # a fork has none of the others
                exec(opening + program, {}) if isinstance(program, str) else program()
                status = 0
            except BaseException:
                traceback.print_exc(file=errors)
                errors.flush()
            os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return subprocess.CompletedProcess(str(program), code, "", errors.read())


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond ``num_bytes``: writing fails in the midst, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(call: str, error: Callable[[], BaseException], only: Callable[[Any], bool]) -> Iterator[list[object]]:
    """Calls of the system raise an error, of the files that ``only`` chooses by path, name or descriptor. Yields what
    failed."""
    failed: list[object] = []
    patch = pytest.MonkeyPatch()

    def fail(what: Any) -> None:
        if only(what):
            failed.append(what)
            raise error()

    if call == "read":

        class Failing(io.FileIO):
            def readinto(self, buffer: Any, /) -> int:
                fail(os.readlink(f"/proc/self/fd/{self.fileno()}"))
                return super().readinto(buffer)

        patch.setattr("cacheclip_rag.store.disk.io.FileIO", Failing)
        read = os.read
        patch.setattr(os, "read", lambda file, size: (fail(os.readlink(f"/proc/self/fd/{file}")), read(file, size))[1])
    else:
        original = getattr(os, call)

        def called(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            fail(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path))
            return original(path, *arguments, **options)

        patch.setattr(os, call, called)
    try:
        yield failed
    finally:
        patch.undo()
