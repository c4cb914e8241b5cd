"""Files of certificates, as the laboratory writes them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheclip_lab.certificates import FORMAT_VERSION, THRESHOLDS, Guarantee, Verdicts, certificate_path
from cacheclip_lab.certificates.identity import Identity
from cacheclip_lab.certificates.verdicts import GateVerdict, RatioVerdict

from cacheclip_rag.plugins import json_digest, write_json

GATE = (GateVerdict(0.0, "faithful"), GateVerdict(0.1, "faithful"), GateVerdict(1.0, "exact"))
LOW_GATE = (GateVerdict(0.0, "not faithful"), GateVerdict(0.3, "faithful"))


def verdicts_for(identity: Identity, **changes: Any) -> Verdicts:
    """Faithful from ratio 0.2 on, exact from 0.5 on."""
    values: dict[str, Any] = {
        "ratio": 0.2,
        "exactness": {"passed": True, "checks": {"greedy": {"figure": 1.0}}},
        "ratios": (
            RatioVerdict(0.0, "not faithful"),
            RatioVerdict(0.1, "not faithful", LOW_GATE),
            RatioVerdict(0.2, "faithful", GATE),
            RatioVerdict(0.5, "exact"),
        ),
        "thresholds": dict(THRESHOLDS),
        "quick": False,
    }
    return Verdicts(identity, **{**values, **changes})


def save(verdicts: Verdicts) -> Path:
    """Where engines look."""
    content = {
        "format": FORMAT_VERSION,
        **asdict(verdicts),
        "verdict": "faithful",
        "primary": "p",
        "turns": [{"turn": number, "verdict": verdict} for number, verdict in enumerate(verdicts.turns, 1)],
    }
    path = certificate_path(verdicts.identity)
    write_json(path, {**content, "sha256": json_digest(content)})
    return path


def promise(*gates: Any, most: float = 0.1) -> Guarantee:
    return Guarantee(most, 0.95, 100, gates, None, None, None)
