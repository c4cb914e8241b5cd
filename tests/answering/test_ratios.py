"""``recompute_ratio="auto"`` without the distribution that knows times."""

import logging
from typing import Any

import pytest
from cacheclip_testing.fake import FakeRuntime

from cacheclip_rag import CacheClipEngine, ConfigurationError, MissingExtraError
from cacheclip_rag.models.load import register_runtime
from tests.conftest import CHUNKS, rag_prompt


def make(**options: Any) -> CacheClipEngine:
    register_runtime("fake", FakeRuntime)
    engine = CacheClipEngine(**{"primary": "fake:ratios", "auxiliary": None, "method": "epic", **options})
    engine.precompute(CHUNKS)
    return engine


def test_a_method_keeps_its_own_ratio(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("cacheclip_rag.base.guests.MEASUREMENTS", "cacheclip.none")
    engine = make(recompute_ratio="auto")
    stats = [engine.generate(rag_prompt(CHUNKS), max_tokens=1).stats for _ in range(2)]
    assert [(each.nominal_ratio, each.predicted_ttft_s) for each in stats] == [(0.2, None)] * 2
    warned = [
        each.message for each in caplog.records if each.levelno == logging.WARNING and "predicted" in each.message
    ]
    assert len(warned) == 1 and "'epic' keeps its own ratio" in warned[0] and "cacheclip-rag[lab]" in warned[0]
    with pytest.raises(MissingExtraError, match="cacheclip-lab .needed to measure a profile. is not installed"):
        engine.profile_machine()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute_ratio": "fast"}, "a number from 0 to 1 or 'auto'"),
        ({"recompute_ratio": 2}, "between 0"),
        ({"max_ttft_s": 0}, "positive number of seconds"),
        ({"max_ttft_s": "2"}, "positive number of seconds"),
        ({"max_ttft_s": 2, "recompute_ratio": 0.3}, "Leave one of them out"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(**options)
    with pytest.raises(ConfigurationError, match=says):
        make().generate(rag_prompt(CHUNKS), **options)
