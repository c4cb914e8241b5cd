"""Names of earlier versions that are gone, each with what to use instead. Kept for one version."""

from __future__ import annotations

__all__ = ["METHODS", "OPTIONS", "SETTINGS"]

METHODS: dict[str, str] = {}
"""Methods by name."""

SETTINGS: dict[str, str] = {}
"""Settings of the engine by name."""

OPTIONS: dict[str, str] = {
    "--embedding": "--embedding is gone: the store knows the model that ingest embedded its passages with. Leave it out.",
    "--explain": "--explain is gone: --json has the seconds of every phase.",
    "--heads": '--heads is gone: write a method with scorer = {heads = "./FILE"} in the file of --variants.',
    "--max-ttft": "--max-ttft is gone: write max_ttft_s = SECONDS in the file of --settings.",
    "--overlap": "--overlap is gone: write overlap_tokens = TOKENS under [ingest] in the file of --settings.",
    "--overwrite": "--overwrite is gone: name another folder, or delete the old report.",
    "--ratio": "--ratio is gone here: write recompute_ratio = RATIO in the file of --settings.",
    "--timeout": "--timeout is gone: write timeout_s = SECONDS under [serve] in the file of --settings.",
    "--upgrade": "--upgrade is gone: ingest the documents into a new store, with another chunk_context.",
    "--variants": "--variants is gone here: bench, eval and certify take it.",
    "--vllm": "--vllm is gone: write NAME = VALUE under [vllm] in the file of --settings.",
}
"""Options of commands that lost them. What became a setting of a file under its own name needs no entry."""
