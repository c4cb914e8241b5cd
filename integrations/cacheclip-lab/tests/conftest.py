"""Tests of the laboratory, with the core's tiny models."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest_plugins = ["cacheclip_rag.testing.plugin"]
