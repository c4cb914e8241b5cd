"""What was measured, in one place: everything that can change an answer. Journals of evaluations, certificates and
promises compare all of it.

A setting of an engine is part of it unless it is named here, so that none can be forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import transformers

from cacheclip_rag import EngineConfig, __version__
from cacheclip_rag.measuring import KVSources
from cacheclip_rag.methods import Method, describe
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import json_digest

if TYPE_CHECKING:
    from cacheclip_rag import CacheClipEngine
    from cacheclip_rag.planning import PlanningEngine

TOLD_OTHERWISE = frozenset(
    ("primary", "auxiliary", "method", "chunk_context", "dtype", "device", "auxiliary_device", "codec")
)
"""Settings that fields of :class:`Identity` tell: by what was loaded, not by what it was called."""
CHANGES_NO_ANSWER: Mapping[str, str] = {
    "store": "where KV lies; what is read is compared with checksums",
    "namespace": "whose KV it is",
    "memory_bytes": "where KV lies",
    "gpu_bytes": "where KV lies",
    "max_bytes": "what was evicted is computed as fresh text",
    "store_prompts": "where exact KV lies; it is compared with checksums",
    "moved": "no certificate covers moved KV; where one is required, none is moved",
    "on_miss": "what is missing is computed as fresh text",
    "recompute_ratio": "each ratio has figures of its own",
    "max_ttft_s": "chooses among ratios",
    "min_confidence": "each gate has figures of its own",
    "require_certificate": "refuses, or computes in full",
    "finish": "replaces tokens by full prefill's only",
    "shadow_rate": "compares after the answer",
}
"""Settings that are no part of an identity, with the reason."""
_OF_THE_METHOD = ("method", "method_settings")


@dataclass(frozen=True, slots=True)
class Identity:
    """The combination for which figures hold."""

    primary_sha256: str
    """SHA-256 of the primary's config and weights."""
    primary_tokenizer_sha256: str
    """SHA-256 of the primary's tokenizer and chat template."""
    primary_eos_ids: Sequence[int]
    """Token ids that end its answers."""
    auxiliary_sha256: str | None
    """SHA-256 of the auxiliary's config and weights. This and what begins like it: None if the method needs no
    auxiliary model."""
    auxiliary_tokenizer_sha256: str | None
    auxiliary_heads_sha256: str | None
    """SHA-256 of its head set; ``none`` without one."""
    auxiliary_device: str | None
    auxiliary_codec: str | None
    method: str
    """Its name."""
    method_settings: Mapping[str, Any]
    """The method's type and settings without recompute ratio and confidence gate, with the digests of its chunk context
    and of the head sets that it names."""
    settings: Mapping[str, Any]
    """Settings of the engine that are neither in :data:`TOLD_OTHERWISE` nor in :data:`CHANGES_NO_ANSWER`."""
    dtype: str
    device: str
    """Kind of device of the primary, ``cpu`` or ``cuda``."""
    codec: str
    """Codec of the primary's chunk caches."""
    transformers: str
    torch: str
    cacheclip_rag: str
    backend: str = ""
    """What computes answers and chunks of the primary: empty for transformers in one process, else for instance
    ``vllm 0.32.0 on cpu``. Figures of one say nothing about another, whose kernels round otherwise."""

    def digest(self) -> str:
        return json_digest(asdict(self))

    @property
    def of_engine(self) -> dict[str, Any]:
        """All but the method, each setting by its name."""
        own = {name: value for name, value in asdict(self).items() if name not in (*_OF_THE_METHOD, "settings")}
        return {**own, **self.settings}

    def of_method(self, method: Method) -> dict[str, Any]:
        """The method with its recompute ratio and gate, of this identity."""
        return _plain({**self.method_settings, **describe(method)})


def identity_of(engine: CacheClipEngine | PlanningEngine, method: Method) -> Identity:
    """Everything that can change an answer of this engine with this method, but its ratio and gate. Loads the models
    that the method needs."""
    return make_identity(engine.config, method, engine.parts.kv_sources(method))


def make_identity(config: EngineConfig, method: Method, kv_sources: KVSources) -> Identity:
    """Identity of an engine with these settings and this method, whose KV has these sources."""
    primary, scorer, context = kv_sources.prefix_caches, kv_sources.auxiliary, kv_sources.primary.context
    auxiliary = scorer.caches if scorer else None
    described = {**describe(method.at(0.0) if method.has_ratio else method), "chunk_context_sha256": context.sha256}
    del described["chunk_context"]  # the digest of the context identifies it
    del described["min_confidence"]  # each gate has figures of its own
    if scorer and scorer.named:
        described["named_heads_sha256"] = {name: heads.digest() for name, heads in scorer.named.items()}
    return Identity(
        primary_sha256=primary.runtime.fingerprint,
        primary_tokenizer_sha256=primary.runtime.tokenizer_sha256,
        primary_eos_ids=sorted(primary.runtime.eos_ids),
        auxiliary_sha256=auxiliary.runtime.fingerprint if auxiliary else None,
        auxiliary_tokenizer_sha256=auxiliary.runtime.tokenizer_sha256 if auxiliary else None,
        auxiliary_heads_sha256=(scorer.heads.digest() if scorer.heads else "none") if scorer else None,
        auxiliary_device=auxiliary.runtime.device.type if auxiliary else None,
        auxiliary_codec=auxiliary.codec if auxiliary else None,
        method=method.name,
        method_settings=_plain(described),
        settings=_settings(config),
        dtype=concrete(config).dtype,
        device=primary.runtime.device.type,
        codec=primary.codec,
        transformers=transformers.__version__,
        torch=torch.__version__,
        cacheclip_rag=__version__,
        # an engine with the weights fuses for another process that only decodes, if a gate asks for logits
        backend=primary.runtime.backend if not primary.runtime.reads_kv or not method.min_confidence else "",
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """What of ``here`` differs there, by name: what is there."""
    left, right = dict(_leaves(there)), dict(_leaves(here))
    return {
        name: f"{left[name]!r}" if name in left else "not recorded"
        for name in dict.fromkeys((*right, *left))
        if (name in left, left.get(name)) != (name in right, right.get(name))
    }


def _settings(config: EngineConfig) -> dict[str, Any]:
    taken = {*TOLD_OTHERWISE, *CHANGES_NO_ANSWER}
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in taken}
    return _plain({**settings, "system_prompt": config.system_prompt or None})  # both mean the chat template's


def _leaves(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{before}{name}.")
        else:
            yield before + name, inner


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back; also of a method whose settings JSON cannot write."""
    plain: dict[str, Any] = json.loads(json.dumps(value, sort_keys=True, default=repr))
    return plain
