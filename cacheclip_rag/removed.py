"""Names of earlier versions that are gone, each with what to use instead. They are refused for one version with their
sentence; after it, as any unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import ConfigurationError

__all__ = ["METHODS", "OPTIONS", "SETTINGS", "refuse_removed"]

_VARIANTS = "is a variant of the laboratory: pass --variants benchmarks/variants.toml to eval, bench or certify"
_CHAINS = "use the chain of this name in LangChain or LlamaIndex, with our LLM"
METHODS: dict[str, str] = {
    "direct_gapped": "direct_gapped is gone: use direct.",
    "turborag": "turborag is gone: use block, with the checkpoint's special tokens in the chunks' texts.",
    "link": "link is gone: use cacheclip or anchored.",
    "cachecraft": "cachecraft is gone: use cacheclip or anchored, with stored chunks.",
    "prophetkv": "prophetkv is gone: use query_attention.",
    "qcfuse": "qcfuse is gone: use query_attention.",
    "infoflow": "infoflow is gone: use query_attention.",
    "map_reduce": f"map_reduce is gone: {_CHAINS}.",
    "map_rerank": f"map_rerank is gone: {_CHAINS}.",
    "epic-paper": f"epic-paper {_VARIANTS}.",
    "cacheblend-equal-charge": f"cacheblend-equal-charge {_VARIANTS}.",
    "random": f"random {_VARIANTS}.",
    "oracle": f"oracle {_VARIANTS}.",
}
"""Presets, by name."""

SETTINGS: dict[str, str] = {
    "heads": "heads is gone: name the head set in the method, as in preset('cacheclip').with_settings(scorer={'heads': "
    "'my.safetensors'}), or let calibrate or finetune write it, which cacheclip finds by itself.",
    "auxiliary_codec": "auxiliary_codec is gone: the auxiliary's chunk caches follow codec.",
    "shadow_mode": "shadow_mode is gone: answers are always compared in the background; wait for the comparisons with "
    "engine.wait_for_observers().",
    "fallback": "fallback is gone: a model whose KV cannot be reused is refused when it is loaded; run it with "
    "transformers itself.",
}
"""Settings of :class:`~cacheclip_rag.config.EngineConfig`, by name."""

OPTIONS: dict[str, str] = {
    "--heads": '--heads is gone: name the head set in a method of --variants (scorer = {heads = "my.safetensors"}), or '
    "let calibrate or finetune write it, which cacheclip finds by itself.",
    "--auxiliary-codec": "--auxiliary-codec is gone: the auxiliary's chunk caches follow --codec.",
    "--fallback": "--fallback is gone: a model whose KV cannot be reused is refused when it is loaded.",
}
"""Options and commands of the command line, options with their dashes."""


def refuse_removed(given: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ConfigurationError with the sentence of each ``given`` name that is in ``table``."""
    found = [table[name] for name in given if name in table]
    if found:
        raise ConfigurationError(" ".join(found))
