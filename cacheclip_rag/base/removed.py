"""Names of earlier versions that are gone, each with what to use instead. They are refused for one version with their
sentence; after it, as any unknown name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from .errors import ConfigurationError

_VARIANTS = "is gone as a preset: pass --variants with benchmarks/variants.toml of the repository, which has it"
_CHAINS = "use LangChain's or LlamaIndex's chain of this kind, with our LLM"
METHODS: dict[str, str] = {
    "ape": "ape is gone: use direct, which is nearer to full prefill, or cacheclip.",
    "cacheblend": "cacheblend is gone: use epic, which is nearer to full prefill, or cacheclip.",
    "direct_gapped": "direct_gapped is gone: use direct.",
    "turborag": "turborag is gone: use block, which puts no special tokens around chunks.",
    "link": "link is gone: use cacheclip or anchored.",
    "cachecraft": "cachecraft is gone: use cacheclip or anchored, with stored chunks.",
    "prophetkv": "prophetkv is gone: use query_attention.",
    "qcfuse": "qcfuse is gone: use query_attention.",
    "infoflow": "infoflow is gone: use query_attention.",
    "map_reduce": f"map_reduce is gone: {_CHAINS}.",
    "map_rerank": f"map_rerank is gone: {_CHAINS}.",
    "epic-paper": f"epic-paper {_VARIANTS}.",
    "cacheblend-equal-charge": "cacheblend-equal-charge is gone: use epic or cacheclip.",
    "random": f"random {_VARIANTS}.",
    "oracle": f"oracle {_VARIANTS}.",
}
"""Presets, by name."""

SETTINGS: dict[str, str] = {
    "chunk_context=auto": "chunk_context='auto' is gone: use chunk_context='passages'.",
    "chunk_context=trained": "chunk_context='trained' is gone: use chunk_context='passages'.",
    "heads": "heads is gone: the scorer of the method names its head set, as in AuxiliaryAttention(heads="
    "'./my.safetensors'); what finetune wrote is found without it.",
    "auxiliary_codec": "auxiliary_codec is gone: use codec, which the auxiliary's chunk caches follow.",
    "shadow_mode": "shadow_mode is gone: answers are compared in the background, and engine.wait_for_observers() waits "
    "for it.",
    "fallback": "fallback is gone: use transformers itself for a model whose KV cannot be reused.",
    "hide_hits": "hide_hits is gone: use the server's, hide_hits = true under [serve] in the file of --settings.",
}
"""Settings of :class:`~cacheclip_rag.config.EngineConfig`, by name; values that are gone as ``name=value``."""

OPTIONS: dict[str, str] = {
    "train-context": "train-context is gone: chunk_context is passages or prefix.",
    "--upgrade": "--upgrade is gone: ingest the documents into a new store, with another chunk_context.",
    "--rank": "--rank is gone: finetune chooses heads and weights only.",
    "--epochs": "--epochs is gone: finetune chooses heads and weights only.",
    "--learning-rate": "--learning-rate is gone: finetune chooses heads and weights only.",
    "--heads": '--heads is gone: name the head set in a method of --variants (scorer = {heads = "my.safetensors"}), or '
    "let finetune write it, which cacheclip finds by itself.",
    "--data": "--data is gone: finetune asks questions that it writes itself.",
    "--against": "--against is gone: compare the mean KLs of the report.",
    "--auxiliary-codec": "--auxiliary-codec is gone: the auxiliary's chunk caches follow codec (--settings).",
    "--fallback": "--fallback is gone: a model whose KV cannot be reused is refused when it is loaded.",
    "--embedding": "--embedding is gone: the store knows what its passages were embedded with. Leave it out.",
    "--explain": "--explain is gone: bench --json has the seconds of every phase.",
    "--max-ttft": "--max-ttft is gone: write max_ttft_s = SECONDS in the file of --settings.",
    "--memory": "--memory is gone here: write memory_bytes = BYTES in the file of --settings.",
    "--overlap": "--overlap is gone: write overlap_tokens = TOKENS under [ingest] in the file of --settings.",
    "--overwrite": "--overwrite is gone: name another folder, or delete the old report.",
    "--ratio": "--ratio is gone here: write recompute_ratio = RATIO in the file of --settings.",
    "--report": "--report is gone: cacheclip eval says what a head set is worth.",
    "--ruler": "--ruler is gone: benchmarks/ruler.py of the repository writes its questions as a file for --dataset.",
    "--timeout": "--timeout is gone: write timeout_s = SECONDS under [serve] in the file of --settings.",
    "--variants": "--variants is gone here: bench, certify and eval take it.",
    "--vllm": "--vllm is gone: write NAME = VALUE under [vllm] in the file of --settings.",
    "--work": "--work is gone: a run of finetune takes minutes and is not continued.",
}
"""Options and commands of the command line, options with their dashes. An option that
became a setting of the same name in the file of ``--settings`` needs no entry."""

_INSTALL = "of the distribution that the extra [{}] of cacheclip-rag installs"
MODULES: dict[str, str] = {
    "cacheclip_rag.ingest": f"cacheclip_rag.ingest is gone: use cacheclip_ingest, {_INSTALL.format('ingest')}.",
    "cacheclip_rag.lab": f"cacheclip_rag.lab is gone: use cacheclip_lab, {_INSTALL.format('lab')}.",
    "cacheclip_rag.serving": f"cacheclip_rag.serving is gone: use cacheclip_serve, {_INSTALL.format('serve')}.",
    "cacheclip_rag.testing": f"cacheclip_rag.testing is gone: use cacheclip_testing, {_INSTALL.format('testing')}.",
    "cacheclip_rag.timing": f"cacheclip_rag.timing is gone: use cacheclip_lab.timing, {_INSTALL.format('lab')}.",
    "cacheclip_rag.vllm": f"cacheclip_rag.vllm is gone: use cacheclip_vllm, {_INSTALL.format('vllm')}.",
    "cacheclip_adapters": "cacheclip_adapters is gone: use cacheclip_rag.adapters.",
}
"""Modules, by the names under which they were imported."""

_INSTEAD: dict[tuple[str, str], str] = {
    ("plugins", "unit_name"): f"that of cacheclip_lab.machine, {_INSTALL.format('lab')}",
    ("planning", "copy_stream"): f"that of cacheclip_vllm.layers_ahead, {_INSTALL.format('vllm')}",
    ("measuring", "Controller Cost Profile Work find_profile"): "that of cacheclip_lab.timing.controller, "
    + _INSTALL.format("lab"),
    ("guards", "Certificate GateFigures RatioFigures TurnFigures check_writable"): "that of "
    f"cacheclip_lab.evaluation.certificate, {_INSTALL.format('lab')}",
    ("guards", "verdict_at"): "Verdicts.at",
    ("store", "clear collect_garbage repair verify"): f"that of cacheclip_care, {_INSTALL.format('care')}",
    ("selection", "FixedStarts Oracle Random"): f"that of cacheclip_lab.comparators, {_INSTALL.format('lab')}",
}
NAMES: dict[str, str] = {
    f"cacheclip_rag.{room}.{name}": f"cacheclip_rag.{room}.{name} is gone: use {instead}."
    for (room, names), instead in _INSTEAD.items()
    for name in names.split()
}
"""Names in public modules, with their module."""


class RemovedModules:
    """A finder of modules, the last one to be asked, which finds none and says where those that are gone are now."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """None. Raises ImportError with the sentence of a module that is gone. (``from package import name`` would not
        show a ModuleNotFoundError.)"""
        if name in MODULES:
            raise ImportError(MODULES[name], name=name)


def refuse_removed_modules() -> None:
    """From now on, imports of modules that are gone are refused with their sentences."""
    if RemovedModules not in sys.meta_path:
        sys.meta_path.append(RemovedModules)


def refuse_removed(names: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ConfigurationError with the sentence of each of the ``names`` that is in ``table``."""
    sentences = [table[name] for name in names if name in table]
    if sentences:
        raise ConfigurationError(" ".join(sentences))
