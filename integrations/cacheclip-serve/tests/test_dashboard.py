"""The Grafana dashboard shows every metric that there is, and no other."""

from __future__ import annotations

import json
import re

from cacheclip_serve import Counters
from serve_cases import REPOSITORY

from cacheclip_rag.guards.metrics import _HELP


def test_it_shows_every_metric() -> None:
    panels = json.loads((REPOSITORY / "docs/grafana.json").read_text(encoding="utf-8"))["panels"]
    shown = set(re.findall(r"cacheclip_(\w+)", " ".join(each["expr"] for panel in panels for each in panel["targets"])))
    exposed = set(re.findall(r"# HELP cacheclip_(\w+)", Counters().text(running=0, waiting=0)))
    planners = REPOSITORY / "integrations/cacheclip-vllm/cacheclip_vllm/planners.py"
    of_vllm = set(re.findall(r'exposition\("(\w+)"', planners.read_text(encoding="utf-8")))
    assert len(exposed) == 5 and len(of_vllm) == 2
    assert shown == {*_HELP, *exposed, *of_vllm}
