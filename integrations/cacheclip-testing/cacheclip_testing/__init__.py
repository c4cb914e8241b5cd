"""Conformance suites that others inherit to test their own parts; tiny models and a fake model for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .backends import (
        BackendConformance as BackendConformance,
        sample_key as sample_key,
        sample_payload as sample_payload,
    )
    from .classes import (
        build_class as build_class,
        class_names as class_names,
        tiny_of_class as tiny_of_class,
        verdicts as verdicts,
    )
    from .command import CommandRun as CommandRun, run_without_torch as run_without_torch
    from .door import names_outside_the_door as names_outside_the_door, names_taken as names_taken
    from .fake import (
        FakeRuntime as FakeRuntime,
        Latch as Latch,
        fake_models as fake_models,
        fake_of as fake_of,
        messages_of as messages_of,
    )
    from .methods import MethodConformance as MethodConformance
    from .runtimes import RuntimeConformance as RuntimeConformance
    from .throttled import ThrottledBackend as ThrottledBackend
    from .tiny import (
        SENTENCES as SENTENCES,
        TINY_MODELS as TINY_MODELS,
        add_bos as add_bos,
        build_auxiliary as build_auxiliary,
        build_model as build_model,
        make_tokenizer as make_tokenizer,
        tiny_spec as tiny_spec,
    )


# before the suites are imported
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("backends", "methods", "runtimes")))

__getattr__, __all__ = late_names(
    __name__,
    {
        "backends": "BackendConformance sample_key sample_payload",
        "classes": "build_class class_names tiny_of_class verdicts",
        "command": "CommandRun run_without_torch",
        "door": "names_outside_the_door names_taken",
        "fake": "FakeRuntime Latch fake_models fake_of messages_of",
        "methods": "MethodConformance",
        "runtimes": "RuntimeConformance",
        "throttled": "ThrottledBackend",
        "tiny": "SENTENCES TINY_MODELS add_bos build_auxiliary build_model make_tokenizer tiny_spec",
    },
)
