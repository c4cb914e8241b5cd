"""Names of earlier versions that are gone, each with what to use instead. They are refused for one version with their
sentence; after it, as any unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import ConfigurationError

__all__ = ["METHODS", "OPTIONS", "SETTINGS", "refuse_removed"]

METHODS: dict[str, str] = {}
"""Presets, by name."""

SETTINGS: dict[str, str] = {
    "heads": "heads is gone: the scorer of the method names its head set, as in AuxiliaryAttention(heads="
    "'./my.safetensors'); what calibrate or finetune wrote is found without it.",
    "auxiliary_codec": "auxiliary_codec is gone: use codec, which the auxiliary's chunk caches follow.",
    "shadow_mode": "shadow_mode is gone: answers are compared in the background, and engine.wait_for_observers() waits "
    "for it.",
    "fallback": "fallback is gone: use transformers itself for a model whose KV cannot be reused.",
    "hide_hits": "hide_hits is gone: use the server, cacheclip serve --hide-hits.",
}
"""Settings of :class:`~cacheclip_rag.config.EngineConfig`, by name."""

OPTIONS: dict[str, str] = {
    "--heads": "--heads is gone: use --variants, a file of methods whose scorer names a head set (scorer = {heads = "
    "'./my.safetensors'}); what calibrate or finetune wrote is found without it.",
    "--auxiliary-codec": "--auxiliary-codec is gone: use --codec, which the auxiliary's chunk caches follow.",
    "--fallback": "--fallback is gone: use transformers itself for a model whose KV cannot be reused.",
}
"""Options and commands of the command line; options with their dashes."""


def refuse_removed(given: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ConfigurationError with the sentence of each ``given`` name that is in ``table``."""
    found = [table[name] for name in given if name in table]
    if found:
        raise ConfigurationError(" ".join(found))
