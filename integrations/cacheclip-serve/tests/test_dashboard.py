"""The Grafana dashboard shows every metric that there is, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cacheclip_serve.counters import Counters
from cacheclip_vllm import planners

from cacheclip_rag.guards import metrics

DASHBOARD = Path(__file__).parents[2] / "docs/grafana.json"


def test_it_shows_every_metric() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    shown = set(re.findall(r"cacheclip_(\w+)", " ".join(each["expr"] for panel in panels for each in panel["targets"])))
    exposed = set(re.findall(r"# HELP cacheclip_(\w+)", Counters().text(running=0, waiting=0)))
    of_vllm = set(re.findall(r'exposition\("(\w+)"', Path(planners.__file__).read_text(encoding="utf-8")))
    assert len(exposed) == 5 and len(of_vllm) == 2
    assert shown == {*metrics._HELP, *exposed, *of_vllm}
