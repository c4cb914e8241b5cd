"""The core's tiny models, a worker and a server without vLLM."""

from __future__ import annotations

import importlib.util

from cacheclip_shared.testing import bucket, s3_address
from vllm_served import config
from vllm_worker import made

__all__ = ["bucket", "config", "made", "s3_address"]

# An environment of its own has vLLM: make test-vllm.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["inside"]
