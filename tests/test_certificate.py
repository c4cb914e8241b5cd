"""Certificates: what they cover, what engines do without, and what damage does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import cacheclip_rag.certificate as certificates
from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.certificate import Certificate, Identity, RatioFigures, find_certificate, verdict_at
from cacheclip_rag.errors import CertificateError, ModelError
from cacheclip_rag.methods import create
from tests.conftest import rag_prompt

ONE = SamplingParams(max_tokens=1)
SPREAD = {"mean": 0.05, "median": 0.04, "max": 0.1}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(certificates, "_warned", set())
    return tmp_path / "home"


@pytest.fixture
def make(tiny_models: dict[str, str]) -> Callable[..., CacheClipEngine]:
    def build(**options: Any) -> CacheClipEngine:
        return CacheClipEngine(**{"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], **options})

    return build


def certificate_for(engine: CacheClipEngine, method: str = "cacheclip", **changes: Any) -> Certificate:
    verdicts = {0.0: "not faithful", 0.1: "not faithful", 0.2: "faithful", 0.5: "exact"}
    rows = [RatioFigures(r, r, SPREAD, SPREAD, 0.95, 1.0, verdict) for r, verdict in verdicts.items()]
    settings = {"grouping": "window_score", "window": 8, "threshold": 5, "recompute_ratio": 0.2}
    made = Certificate(
        primary="p",
        auxiliary="a",
        identity=engine.identity(create(method, settings)),
        verdict="faithful",
        ratio=0.2,
        exactness={"passed": True, "checks": {}},
        needle_accuracy_of_full=1.0,
        ratios=rows,
        thresholds={"answer_kl": 0.1},
        prompts=24,
        quick=False,
        seconds=1.0,
        created="2026-01-01T00:00:00+00:00",
    )
    return replace(made, **changes)


class TestFile:
    def test_round_trip(self, make: Callable[..., CacheClipEngine], home: Path) -> None:
        made = certificate_for(make())
        path = made.save()
        assert path.parent == home / "certificates"
        assert find_certificate(made.identity) == (made, "")
        assert json.loads(path.read_text())["identity"]["method"] == "cacheclip"

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "",
            lambda text: "[]",
            lambda text: text.replace('"not faithful"', '"faithful"', 1),
            lambda text: text.replace('"format": 1', '"format": 2'),
        ],
    )
    def test_damaged_is_none(self, make: Callable[..., CacheClipEngine], damage: Callable[[str], str]) -> None:
        made = certificate_for(make())
        path = made.save()
        path.write_text(damage(path.read_text()))
        found, why = find_certificate(made.identity)
        assert found is None and "damaged" in why and str(path) in why

    @pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
    def test_covers_nothing_else(self, make: Callable[..., CacheClipEngine], name: str) -> None:
        made = certificate_for(make())
        made.save()
        found, why = find_certificate(replace(made.identity, **{name: "other"}))
        assert found is None
        if name == "primary_sha256":
            assert why == "it has not been certified"
        else:
            assert why == f"its certificate is of other {name.replace('_sha256', '').replace('_', ' ')}"

    def test_verdict_at_a_ratio(self, make: Callable[..., CacheClipEngine]) -> None:
        made = certificate_for(make())
        verdicts = [verdict_at(made, ratio) for ratio in (0.0, 0.15, 0.2, 0.3, 0.5, 0.9, 1.0)]
        assert verdicts == ["not faithful", "not faithful", "faithful", "faithful", "exact", "exact", "exact"]
        failed = replace(made, exactness={"passed": False})
        assert {verdict_at(failed, ratio) for ratio in (0.0, 0.5, 1.0)} == {"not faithful"}


class TestEngine:
    def test_without_it_warns_once_and_names_the_command(
        self,
        make: Callable[..., CacheClipEngine],
        chunks: list[str],
        caplog: pytest.LogCaptureFixture,
        tiny_models: dict[str, str],
    ) -> None:
        caplog.set_level(logging.WARNING)
        for engine in (make(), make()):
            for _ in range(2):
                engine.generate(rag_prompt(chunks), ONE)
        warnings = [record.getMessage() for record in caplog.records if "certificate" in record.getMessage()]
        assert len(warnings) == 1
        assert "has not been certified" in warnings[0]
        command = f"cacheclip certify --primary {tiny_models['llama']} --auxiliary {tiny_models['auxiliary']}"
        assert f"{command} --method cacheclip --ratio 0.2 --dtype float32 --device cpu" in warnings[0]

    def test_with_it_is_silent(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(require_certificate=True)
        certificate_for(engine).save()
        engine.generate(rag_prompt(chunks), ONE)
        engine.generate(rag_prompt(chunks), ONE, recompute_ratio=1.0)
        assert "certificate" not in caplog.text

    def test_required(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(require_certificate=True)
        with pytest.raises(CertificateError, match="cacheclip certify") as error:
            engine.generate(rag_prompt(chunks), ONE)
        assert isinstance(error.value, ModelError)
        engine.generate(rag_prompt(chunks), ONE, method="full")  # reuses nothing: needs none
        certificate_for(engine).save()
        engine.generate(rag_prompt(chunks), ONE)

    def test_not_faithful_at_this_ratio(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(require_certificate=True)
        certificate_for(engine).save()
        with pytest.raises(CertificateError, match=r"says 'not faithful' at recompute ratio 0\.1"):
            engine.generate(rag_prompt(chunks), ONE, recompute_ratio=0.1)

    def test_of_another_method(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(require_certificate=True)
        certificate_for(engine).save()
        with pytest.raises(CertificateError, match="method 'direct'"):
            engine.generate(rag_prompt(chunks), ONE, method="direct")

    def test_of_another_dtype(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        certificate_for(make()).save()
        with pytest.raises(CertificateError, match="certify"):
            make(require_certificate=True, dtype="bfloat16").generate(rag_prompt(chunks), ONE)

    def test_refuses_before_the_store_is_touched(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        engine = make(require_certificate=True, store=str(tmp_path / "store"))
        with pytest.raises(CertificateError):
            engine.generate(rag_prompt(chunks), ONE)
        assert list(engine.store.keys()) == []
