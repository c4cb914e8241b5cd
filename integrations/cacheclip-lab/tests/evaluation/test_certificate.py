"""Files of certificates: what is written, what of an older one stays, and what engines read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.certificates import THRESHOLDS, Guarantee, PromisedGate
from cacheclip_lab.certificates.identity import Identity
from cacheclip_lab.certificates.verdicts import find_certificate
from cacheclip_lab.evaluation.certificate import (
    Certificate,
    GateFigures,
    RatioFigures,
    TurnFigures,
    check_writable,
    saved_certificate,
)
from cacheclip_testing import FakeRuntime

from cacheclip_rag import CacheClipEngine, CertificateError
from cacheclip_rag.methods import preset
from cacheclip_rag.models import register_runtime

GATES = ((0.0, 0.95, 0.2, 0.0, "faithful"), (0.1, 1.0, 0.3, 0.1, "faithful"), (1.0, 1.0, 1.2, 1.0, "exact"))
GATE = tuple(GateFigures(*each) for each in GATES)
LOW_GATE = (GateFigures(0.0, 0.8, 0.2, 0.0, "not faithful"), GateFigures(0.3, 1.0, 0.4, 0.2, "faithful"))
PROMISED = (PromisedGate(0.1, 0.4, 3, 0.09, 0.5), PromisedGate(0.3, 0.15, 2, 0.08, 0.6))
PROMISE = Guarantee(0.1, 0.95, 100, PROMISED, (900, 1200), (5, 5), (2, 32))
SPREAD = {"mean": 0.05, "median": 0.04, "max": 0.1}


COUNTS = {"turn": 1, "prompt_tokens": 900.0, "continued_tokens": 0.0, "computed_tokens": 200.0}
FOUND = {"agreement": 0.9, "needle_accuracy": 1.0, "needle_accuracy_of_full": 1.0, "verdict": "not faithful"}
TURN = TurnFigures(**COUNTS, **FOUND, first_token_kl=SPREAD, answer_kl=SPREAD)  # type: ignore[arg-type]


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    register_runtime("fake", FakeRuntime)
    engine = CacheClipEngine(primary="fake:certified", auxiliary=None)
    return engine.parts.certificates.identity(preset("epic"))


def certificate_for(identity: Identity, **changes: Any) -> Certificate:
    verdicts = {0.0: "not faithful", 0.1: "not faithful", 0.2: "faithful", 0.5: "exact"}
    gates = {0.1: LOW_GATE, 0.2: GATE}
    rows = [RatioFigures(r, r, SPREAD, SPREAD, 0.95, 1.0, v, gate=gates.get(r, ())) for r, v in verdicts.items()]
    fields: dict[str, Any] = {"primary": "p", "auxiliary": "a", "identity": identity, "verdict": "faithful"}
    fields |= {"ratio": 0.2, "exactness": {"passed": True, "checks": {"greedy": {"figure": 1.0}}}, "ratios": rows}
    fields |= {"needle_accuracy_of_full": 1.0, "thresholds": dict(THRESHOLDS), "prompts": 24, "quick": False}
    return Certificate(**{**fields, "seconds": 1.0, "created": "2026-01-01T00:00:00+00:00", **changes})


def test_engines_read_what_was_written(identity: Identity) -> None:
    made = certificate_for(identity, guarantee=PROMISE, turns=(TURN,))
    path = made.save()
    assert path == made.path and path.parent.name == "certificates"
    assert saved_certificate(identity) == made
    assert find_certificate(identity) == (made.verdicts, "")
    verdicts = made.verdicts
    assert [verdicts.at(ratio) for ratio in (0.1, 0.2, 0.5)] == ["not faithful", "not faithful", "exact"]
    assert verdicts.at(0.1, 0.3) == "faithful" and verdicts.at(0.2, 1.0) == "exact", "a gate has figures of its own"
    assert verdicts.guarantee == PROMISE and not verdicts.quick and verdicts.ratio == 0.2


@pytest.mark.parametrize("guarantee", [PROMISE, replace(PROMISE, prompt_tokens=None, gates=())])
def test_a_promise_stays(identity: Identity, guarantee: Guarantee) -> None:
    """Where a later certificate was not asked for one; one that was asked replaces it."""
    made = certificate_for(identity, guarantee=guarantee)
    made.save()
    certificate_for(identity).save()
    assert saved_certificate(identity) == made
    other = replace(made, guarantee=replace(guarantee, most=0.2))
    other.save()
    assert saved_certificate(identity) == other


class TestSaving:
    def test_quick_does_not_replace_thorough(self, identity: Identity) -> None:
        """Thorough replaces quick."""
        made = certificate_for(identity)
        replace(made, quick=True, ratios=[replace(made.ratios[0], ratio=0.75)]).save()
        path = made.save()
        assert saved_certificate(identity) == made
        assert replace(made, quick=True, prompts=4, verdict="not faithful").save() == path
        assert saved_certificate(identity) == made

    def test_ratios_come_together(self, identity: Identity) -> None:
        made = certificate_for(identity)
        made.save()
        newer = [replace(made.ratios[0], ratio=0.3, verdict="faithful"), replace(made.ratios[2], verdict="exact")]
        replace(made, ratios=newer, ratio=0.3).save()
        found = saved_certificate(identity)
        assert found is not None
        rows = {row.ratio: row.verdict for row in found.ratios}
        assert rows == {0.0: "not faithful", 0.1: "not faithful", 0.2: "exact", 0.3: "faithful", 0.5: "exact"}

    def test_failed_checks_replace_everything(self, identity: Identity) -> None:
        made = certificate_for(identity)
        made.save()
        failed = replace(made, exactness={**made.exactness, "passed": False}, ratios=made.ratios[:1])
        failed.save()
        assert saved_certificate(identity) == failed

    def test_folder_that_cannot_be_written(
        self, identity: Identity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made = certificate_for(identity)
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "file"))
        for attempt in (made.save, check_writable):
            with pytest.raises(CertificateError, match=r"cannot be written.*CACHECLIP_HOME"):
                attempt()
