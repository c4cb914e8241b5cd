"""Conformance suites that third parties inherit to test their own parts, and tiny models for tests.

Needs pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..base.late import late_names

if TYPE_CHECKING:
    from .backends import BackendConformance
    from .command import CommandRun, run_without_torch
    from .fake import FakeRuntime, Latch, fake_models, fake_of, messages_of
    from .faults import Broken, Fault
    from .methods import MethodConformance
    from .object_storage import s3_server
    from .runtimes import RuntimeConformance
    from .server import FakeServer
    from .throttled import ThrottledBackend
    from .tiny import SENTENCES, TINY_MODELS, build_auxiliary, build_model, make_tokenizer, tiny_spec

__all__ = [
    "SENTENCES",
    "TINY_MODELS",
    "BackendConformance",
    "Broken",
    "CommandRun",
    "FakeRuntime",
    "FakeServer",
    "Latch",
    "Fault",
    "MethodConformance",
    "RuntimeConformance",
    "ThrottledBackend",
    "build_auxiliary",
    "build_model",
    "fake_models",
    "fake_of",
    "make_tokenizer",
    "messages_of",
    "run_without_torch",
    "s3_server",
    "tiny_spec",
]

pytest.register_assert_rewrite(*(f"cacheclip_rag.testing.{name}" for name in ("backends", "methods", "runtimes")))

__getattr__ = late_names(
    __name__,
    {
        "SENTENCES": "tiny",
        "TINY_MODELS": "tiny",
        "BackendConformance": "backends",
        "Broken": "faults",
        "CommandRun": "command",
        "FakeRuntime": "fake",
        "FakeServer": "server",
        "Latch": "fake",
        "Fault": "faults",
        "MethodConformance": "methods",
        "RuntimeConformance": "runtimes",
        "ThrottledBackend": "throttled",
        "build_auxiliary": "tiny",
        "build_model": "tiny",
        "fake_models": "fake",
        "fake_of": "fake",
        "make_tokenizer": "tiny",
        "messages_of": "fake",
        "run_without_torch": "command",
        "s3_server": "object_storage",
        "tiny_spec": "tiny",
    },
)
