"""``benchmarks/applications.py``, which plays the requests of applications."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[2] / "benchmarks/applications.py"
_spec = importlib.util.spec_from_file_location("benchmark_applications", _FILE)
assert _spec is not None and _spec.loader is not None
_found = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_found)
play, Unexpected = _found.play, _found.Unexpected
