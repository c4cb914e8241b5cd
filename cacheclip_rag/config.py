"""Settings of an engine. They are checked when they are made, hashable, and do not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from .base.checks import (
    by_real_names,
    check_choice,
    check_confidence,
    check_flag,
    check_namespace,
    check_number,
    check_ratio_and_limit,
    check_store_url,
    check_whole_number,
    model_place,
    refuse_unknown,
    store_place,
)
from .base.errors import ConfigurationError
from .base.names import SETTINGS, refuse_removed
from .base.paths import is_url
from .base.sampling import FINISH_MODES, MOVED_MODES
from .base.urls import shown_url
from .chunks.context import check_chunk_context
from .methods import DEFAULT_METHOD, check_method
from .runtime.base import DTYPES

if TYPE_CHECKING:
    from .methods.base import Method

_CODECS = (*DTYPES, "int8")
_ON_MISS = ("store", "ignore")

_T = TypeVar("_T")


def _setting(default: _T, help: str) -> _T:
    """A field with its default, and the help text of its option. The docstring after the field says the rest."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an engine. Unknown or invalid settings raise ConfigurationError."""

    primary: str = _setting(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Model that answers: hub id, local folder (a string or a ``Path``), GGUF file, or ``packaged:NAME``.",
    )
    auxiliary: str | None = _setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "Small model that scores tokens; None for methods that need none."
    )
    store: str | PathLike[str] | None = _setting(
        None,
        "Folder of the chunk-cache store, or the URL of a shared one (``s3://bucket/prefix``, ``gs://``, ``az://``), "
        "with a hot tier before it as ``s3://bucket/prefix?hot=valkey://host:6379``; None keeps chunk caches in "
        "memory only.",
    )
    namespace: str = _setting("default", "Tenant.")
    """Two namespaces never share an entry."""
    method: str | Method = _setting(
        DEFAULT_METHOD,
        "Default method of :meth:`~cacheclip_rag.engine.CacheClipEngine.generate`: a preset's name, a Method instance, "
        "or ``auto``, which means ``cacheclip`` if the auxiliary model is available and has a head set, else "
        "``epic-corrected``.",
    )
    recompute_ratio: float | str | None = _setting(
        None,
        "Share of chunk tokens to recompute, 0 to 1; None: the method's own ratio (0.2; ``cacheclip-gated`` has 0.05).",
    )
    """``auto`` chooses: the least ratio that a certificate calls faithful (without a certificate, the method's own),
    more if ``max_ttft_s`` leaves time for it, and plain prefill where reuse would not be sooner. It needs the profile
    that ``cacheclip profile`` measures; without one, it is the method's own ratio."""
    max_ttft_s: float | None = _setting(
        None,
        "Seconds after which the first token should be there: of all ratios that are predicted to keep to it, the "
        "largest is taken.",
    )
    """Implies ``recompute_ratio="auto"``. A time that not even the least ratio keeps to is not an error."""
    min_confidence: float | str | None = _setting(
        None, "Least difference between the probabilities of the two likeliest next tokens, 0 to 1."
    )
    """If the first token is below it, the prompt is prefilled in full; if a later one is, the exact KV is completed
    before it is chosen. ``cacheclip certify`` shows what a value gives and costs. ``auto``: the value, and unless one
    is given the recompute ratio, that the certificate promises (``certify --max-differ``). 0: none. None: the method's
    own; that of the method ``auto`` is what its certificate promises, none where its certificate calls the ratio
    faithful (but for ``recompute_ratio="auto"``), else 0.1. It holds for methods given by
    name; a Method instance has its own."""
    chunk_context: str = _setting(
        "passages",
        "What chunks are precomputed after: ``prefix`` (the shared prefix) or ``passages`` (the shared prefix and a "
        "few neutral paragraphs).",
    )
    """After passages, a chunk's KV is closer to its KV in the middle of a prompt, but a chunk right after the prefix is
    not exact. Some methods set their own chunk context. Chunks stored with one context are not found with another."""
    system_prompt: str | None = _setting(None, "System prompt of the shared prefix; None: the chat template's default.")
    dtype: str = _setting("auto", "Compute dtype of both models: ``float32``, ``bfloat16`` or ``float16``.")
    """``auto``: that of the primary's checkpoint on an accelerator; on a processor, ``bfloat16`` for a checkpoint of 16
    bits if the processor has it in hardware, else ``float32``. The log says which. A GGUF file keeps its own: it is the
    auxiliary's then."""
    device: str = _setting("auto", "Device of the models: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.")
    """``auto``: ``cuda`` if there is one, then ``mps`` if it works, else ``cpu``. With ``balanced``, ``balanced_low_0``
    or ``sequential``, accelerate spreads the layers over all devices."""
    auxiliary_device: str | None = _setting(
        None, "Device of the auxiliary model, such as ``cpu`` beside a primary on a GPU; None: ``device``."
    )
    codec: str | None = _setting(None, "Codec of chunk caches.")
    """None: the compute dtype, which is lossless, for the primary's; ``bfloat16`` for the auxiliary's, which only rank
    tokens, so that a coarser codec suffices."""
    memory_bytes: int = _setting(0, "Limit of a memory tier before a disk store; 0: none.")
    """The operating system's page cache serves repeated reads too, but its pages are checked at each read."""
    gpu_bytes: int | None = _setting(
        None, "Bytes of chunk caches in the memory of a GPU; None: a quarter of what is free at the first question."
    )
    """Prompts are gathered from them. The least recently used make room. Integers (codec ``int8``) do not go there."""
    max_bytes: int | None = _setting(None, "Limit of the store, recorded in it for all its users.")
    """Above it, the tenant with the most bytes loses its least recently used chunk caches. 0: no limit, and a recorded
    one is removed. None: the recorded limit, or no limit."""
    prefix_cache_bytes: int = _setting(
        2**28, "Size of the prefix cache: exact KV that prompts with the same first tokens share."
    )
    """0 switches it off."""
    store_prompts: bool = _setting(
        False,
        "Whether exact KV of prompts goes into the store, too, while no answer is under way: after a restart, "
        "conversations go on from there.",
    )
    """It needs ``max_bytes``: each token takes as many bytes as one of a chunk. It takes room that is free, never a
    chunk's, and is deleted with anything that is released."""
    moved: str = _setting(
        "on",
        "Whether KV that earlier prompts left is used for the same tokens at another position or behind other text: "
        "``on`` or ``off``.",
    )
    """Such KV is approximate, also after the edit of one line. With ``off``, a text that was deleted from a
    conversation has no influence on what stood behind it."""
    on_miss: str = _setting(
        "store", "For chunks that were not stored: ``store`` them after the answer, or ``ignore`` them."
    )
    require_certificate: bool = _setting(
        False,
        "True: refuse to reuse chunks without a certificate (``cacheclip certify``) for these models, method and "
        "ratio.",
    )
    """False: warn once."""
    finish: str = _setting(
        "none",
        "What becomes of an answer from approximate KV: ``none`` leaves it as it is; ``idle`` too, but completes the "
        "exact KV afterwards, while no answer is under way; ``verify`` completes it while the answer is decoded, and "
        "states in the statistics how many tokens full prefill would choose too; ``revise`` also corrects a greedy "
        "answer from the first token that differs.",
    )
    """The exact KV goes into the prefix cache, where the next question finds it."""
    shadow_rate: float = _setting(
        0.0, "Share of the answers, 0 to 1, that are compared with full prefill, after the answer and in a thread."
    )
    """Results go to metrics and log. Each comparison costs a full prefill. Answers that ``finish`` verifies are always
    compared, at no further cost."""

    def __post_init__(self) -> None:
        for name in ("primary", "auxiliary"):
            object.__setattr__(self, name, model_place(getattr(self, name)))
        check_ratio_and_limit(self.recompute_ratio, self.max_ttft_s)
        if self.min_confidence is not None:
            check_confidence("min_confidence", self.min_confidence)
        check_method(self.method)
        check_chunk_context(self.chunk_context)
        choices = {"dtype": ("auto", *DTYPES), "on_miss": _ON_MISS, "finish": FINISH_MODES, "moved": MOVED_MODES}
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        check_number("shadow_rate", self.shadow_rate, "a number from 0 (none) to 1 (all)", most=1.0)
        check_flag("require_certificate", self.require_certificate)
        check_flag("store_prompts", self.store_prompts)
        if self.store_prompts and (self.store is None or is_url(self.store)):
            raise ConfigurationError(f"store_prompts needs a folder as store, got store={self.store!r}.")
        if self.store_prompts and not self.max_bytes:
            raise ConfigurationError("store_prompts stores the KV of every prompt: limit the store with max_bytes.")
        if self.codec is not None:
            check_choice("codec", self.codec, _CODECS)
        if self.store is not None:
            if not isinstance(self.store, str | PathLike) or not str(self.store):
                raise ConfigurationError(f"store must be a folder, a URL, or None for memory only, got {self.store!r}.")
            if is_url(self.store):
                check_store_url(str(self.store))
                if self.max_bytes is not None:
                    raise ConfigurationError(
                        "max_bytes limits a store folder. What a shared store holds is decided by ingest and by "
                        "cacheclip store gc; leave max_bytes out."
                    )
            object.__setattr__(self, "store", store_place(self.store))
        check_namespace(self.namespace)
        for name in ("primary", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name} must be a non-empty string, got {value!r}.")
        for name in ("auxiliary", "auxiliary_device", "system_prompt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{name} must be a string or None, got {value!r}.")
        for name, may_be_none in (
            ("memory_bytes", False),
            ("prefix_cache_bytes", False),
            ("gpu_bytes", True),
            ("max_bytes", True),
        ):
            value = getattr(self, name)
            if value is not None or not may_be_none:
                check_whole_number(name, value, of="bytes")

    def __repr__(self) -> str:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own["store"] = self.store and shown_url(self.store)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    @property
    def fixed_ratio(self) -> float | None:
        return None if isinstance(self.recompute_ratio, str) else self.recompute_ratio

    @property
    def auxiliary_codec(self) -> str:
        """Codec of the auxiliary's chunk caches, for settings that name a dtype."""
        return self.codec or ("bfloat16" if self.auxiliary != self.primary else self.dtype)

    @classmethod
    def from_options(cls, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
        """``config`` (or the defaults) overridden by ``options``, also under their
        :data:`~cacheclip_rag.base.checks.ALIASES`. An unknown option raises ConfigurationError."""
        known = [field.name for field in fields(cls)]
        options = by_real_names(options, known)
        refuse_removed(sorted(options), SETTINGS)
        refuse_unknown("option", options, known)
        return replace(config or cls(), **options)
