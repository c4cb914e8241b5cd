"""Engines without the distribution that reads certificates."""

from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, CertificateError, MissingExtraError
from cacheclip_rag.guards import certificates
from cacheclip_rag.measuring import Certificates
from cacheclip_rag.methods import preset
from tests.conftest import CACHECLIP, CHUNKS, Logs, Make, Models, Patch, rag_prompt


@pytest.fixture
def make(tiny_models: Models) -> Make:
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}

    def build(**options: Any) -> CacheClipEngine:
        engine = CacheClipEngine(**{**models, **CACHECLIP, **options})
        engine.precompute(CHUNKS)
        return engine

    return build


@pytest.fixture(autouse=True)
def alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr("cacheclip_rag.base.guests.MEASUREMENTS", "cacheclip.none")
    certificates._warn_once.cache_clear()


def test_reuse_without_a_certificate_is_told_once(make: Make, caplog: Logs) -> None:
    for engine in (make(), make()):
        assert type(engine.parts.certificates) is Certificates
        assert engine.generate(rag_prompt(CHUNKS), max_tokens=1).stats.hits
    [said] = [each.message for each in caplog.records if "not measured" in each.message]
    assert "cacheclip certify, of cacheclip-lab" in said


def test_what_certificates_say_needs_it(make: Make) -> None:
    engine = make(require_certificate=True)
    with pytest.raises(CertificateError, match=r"cacheclip-lab .* is not installed.*lab.*; or set require_certificate"):
        engine.generate(rag_prompt(CHUNKS), max_tokens=1)
    assert engine.generate(rag_prompt(CHUNKS), max_tokens=1, method="full").text is not None
    with pytest.raises(MissingExtraError, match="cacheclip-lab .* is not installed.*lab"):
        make(min_confidence="auto").make_method("cacheclip")
    assert engine.parts.certificates.may_be(preset("cacheclip")) is None
