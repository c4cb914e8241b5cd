"""``benchmarks/serving.py --only equality`` on tiny models: a served vLLM and our own engine answer alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "serving.py"


def test_answers_are_equal(settings: Any, tmp_path: Path) -> None:
    """The primary is its own auxiliary, as where only one model is at hand."""
    model, out = settings().options["primary"], tmp_path / "found.json"
    sizes = ["--pool", "6", "--chunks", "4", "--chunk-tokens", "60", "--answer-tokens", "16", "--prompts", "50"]
    models = ["--primary", model, "--auxiliary", model, "--dtype", "float32"]
    command = [sys.executable, str(SCRIPT), "--only", "equality", *models, *sizes, "--json", str(out)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())["equality"]
    assert (found["kept"], found["equal"], found["outcomes"]) == (True, 50, {"fused": 50})
