"""Settings of an engine: checked when made, hashable, and free of torch so that making them costs nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from .checks import check_ratio, check_whole_number
from .chunks.context import check_chunk_context
from .errors import ConfigurationError
from .methods import DEFAULT_METHOD, check_method
from .models.packaged.catalogue import DEFAULT_AUXILIARY, DEFAULT_PRIMARY

if TYPE_CHECKING:
    from .methods.base import Method
from .runtime.base import DTYPES

__all__ = ["SHADOW_MODES", "EngineConfig"]

_ON_MISS = ("store", "ignore")
_FALLBACK = ("error", "full")
SHADOW_MODES = ("background", "inline")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is made of. Unknown or senseless settings raise ConfigurationError."""

    primary: str = DEFAULT_PRIMARY
    """Model that answers: local folder, packaged name or hub id."""
    auxiliary: str | None = DEFAULT_AUXILIARY
    """Small model that scores tokens; None for methods that need none."""
    store: str | PathLike[str] | None = None
    """Folder of the chunk-cache store; None keeps chunk caches in memory only."""
    namespace: str = "default"
    """Tenant: two namespaces never share an entry."""
    method: str | Method = DEFAULT_METHOD
    """Default method of :meth:`~cacheclip_rag.engine.CacheClipEngine.generate`: a preset's name, a method of your own,
    or ``auto``: ``cacheclip`` where the auxiliary model can be had and has a head set, ``anchored`` elsewhere."""
    recompute_ratio: float | None = None
    """Share of chunk tokens to recompute, 0 to 1, in place of the method's own (0.2 for all presets that have one)."""
    heads: str | PathLike[str] = "auto"
    """Head set of the auxiliary model, for methods that use one: a file; ``auto`` for the one that ``cacheclip
    calibrate`` or ``finetune`` wrote for this pair of models, else the one in the package; ``none``."""
    chunk_context: str = "passages"
    """What chunks are precomputed behind, for methods that do not say it themselves: the shared ``prefix``, or
    ``passages``, the prefix and a few paragraphs of no importance. Behind these, a chunk's KV is nearer to what it is
    in the middle of a prompt; right behind the prefix, where it would have been exact, it is not. Chunks stored with
    one are missing for the other."""
    system_prompt: str | None = None
    """Shared prefix's system prompt; None takes the chat template's default."""
    dtype: str = "float32"
    """Compute dtype of both models: ``float32``, ``bfloat16`` or ``float16``."""
    device: str = "cpu"
    """Device of the models: ``cpu``, ``cuda``, ``cuda:1``; or ``auto`` (also ``balanced``, ``balanced_low_0``,
    ``sequential``), with which accelerate spreads the layers over what there is."""
    auxiliary_device: str | None = None
    """Device of the auxiliary model where it is another, such as ``cpu`` beside a primary on a GPU."""
    fallback: str = "error"
    """What happens with a model whose KV cannot be reused exactly: ``error`` refuses it, ``full`` lets it answer by
    ordinary prefill and says so in every answer."""
    codec: str | None = None
    """How the primary's chunk caches are stored; None keeps the compute dtype, so that storing loses nothing."""
    auxiliary_codec: str = "bfloat16"
    """The same for the auxiliary's, which only rank tokens and never reach the answer: half the bytes."""
    memory_bytes: int = 0
    """Size of the memory tier before a disk store (the page cache already serves repeated reads)."""
    max_bytes: int | None = None
    """Limit of the store; the least recently used chunk caches are evicted above it. None: no limit."""
    prefix_cache_bytes: int = 2**28
    """Memory for the KV of prompts' starts, which other prompts that begin alike reuse exactly; 0 switches it off."""
    on_miss: str = "store"
    """What happens, after the answer, to a chunk that was not stored: ``store`` it, or ``ignore``."""
    require_certificate: bool = False
    """True refuses to reuse chunks without a certificate of ``cacheclip certify`` that covers these models, this
    method and this ratio; False warns once."""
    shadow_rate: float = 0.0
    """Share of the answers, 0 to 1, that are compared with full prefill (a full prefill each): into metrics and log."""
    shadow_mode: str = "background"
    """When: ``background``, after the answer in a thread of its own, or ``inline``, before the call returns."""

    def __post_init__(self) -> None:
        if self.recompute_ratio is not None:
            check_ratio(self.recompute_ratio)
        check_method(self.method)
        check_chunk_context(self.chunk_context)
        choices = {
            "dtype": DTYPES,
            "auxiliary_codec": DTYPES,
            "on_miss": _ON_MISS,
            "fallback": _FALLBACK,
            "shadow_mode": SHADOW_MODES,
        }
        for name, allowed in choices.items():
            _check_choice(name, getattr(self, name), allowed)
        if isinstance(self.shadow_rate, bool) or not isinstance(self.shadow_rate, int | float):
            raise ConfigurationError(f"shadow_rate must be a number from 0 to 1, got {self.shadow_rate!r}.")
        if not 0.0 <= self.shadow_rate <= 1.0:
            raise ConfigurationError(f"shadow_rate must be between 0 (none) and 1 (all), got {self.shadow_rate!r}.")
        if not isinstance(self.require_certificate, bool):
            raise ConfigurationError(f"require_certificate must be True or False, got {self.require_certificate!r}.")
        if self.codec is not None:
            _check_choice("codec", self.codec, DTYPES)
        if self.store is not None:
            if not isinstance(self.store, str | PathLike) or not str(self.store):
                raise ConfigurationError(f"store must be a folder, or None for memory only, got {self.store!r}.")
            if "://" in str(self.store):
                raise ConfigurationError(
                    f"store must be a folder, got {str(self.store)!r}. No store behind a URL ships yet: give the "
                    "engine a ChunkStore with a backend of your own."
                )
            # in full: however the folder was named, and wherever the process goes, it stays the same
            object.__setattr__(self, "store", os.path.abspath(os.path.expanduser(self.store)))
        if not isinstance(self.heads, str | PathLike) or not str(self.heads):
            raise ConfigurationError(f"heads must be auto, none or a file, got {self.heads!r}.")
        if self.heads not in ("auto", "none"):
            object.__setattr__(self, "heads", os.path.abspath(os.path.expanduser(self.heads)))
        for name in ("primary", "namespace", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name} must be a non-empty string, got {value!r}.")
        for name in ("auxiliary", "auxiliary_device", "system_prompt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{name} must be a string or None, got {value!r}.")
        for name, may_be_none in (("memory_bytes", False), ("prefix_cache_bytes", False), ("max_bytes", True)):
            value = getattr(self, name)
            if value is not None or not may_be_none:
                check_whole_number(name, value, of="bytes")

    @classmethod
    def from_options(cls, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
        """``config`` (or the defaults) with ``options`` on top; an unknown option raises ConfigurationError."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigurationError(f"unknown option {', '.join(unknown)}. Known: {', '.join(known)}.")
        return replace(config or cls(), **options)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
