"""What one evaluation measured, for others: figures, machine, versions and digests, and nothing that anyone wrote.

``cacheclip eval --submit FILE`` writes one. A folder of them is a table (``benchmarks/results`` in the repository).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import expanded, json_digest

from .journal import digest_of
from .results import Comparison

FORMAT = 1
_IDENTITY = ("device", "dtype", "codec", "backend", "auxiliary_device", "auxiliary_codec")
_DIGESTS = ("primary_sha256", "primary_tokenizer_sha256", "auxiliary_sha256", "auxiliary_tokenizer_sha256")
_VERSIONS = ("cacheclip_rag", "transformers", "torch")
_FIGURES = (
    *("method", "ratio", "n", "n_paired", "answered_plainly", "f1", "contains", "difference_to_full", "no_worse"),
    *("flips", "equal_answers", "equal_answers_interval", "first_token_agreement", "first_token_agreement_interval"),
    *("kl_to_full", "kl_interval", "charged_ratio", "ttft_s", "speedup_vs_full", "gate"),
)
_FIELDS = {"format", "dataset", "primary", "auxiliary", "settings", "digests", "versions", "machines", "methods"}


def submission(comparison: Comparison, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a summary (:func:`~cacheclip_lab.evaluation.report.summarise`), ready for JSON. Of questions,
    passages, prompts, answers and the places of files it has numbers and digests only."""
    settings = summary["settings"]
    digests = {name: settings.get(name) for name in (*_DIGESTS, "auxiliary_heads_sha256")}
    own = {name: value for name, value in settings.items() if name not in ("date", "primary", "auxiliary", "methods")}
    return {
        "format": FORMAT,
        "dataset": {
            "name": summary["dataset"],
            "n": summary["n"],
            "skipped": summary["skipped"],
            "sha256": json_digest(sorted(map(digest_of, comparison.questions))),
        },
        "primary": _name(summary["primary"]),
        "auxiliary": summary["auxiliary"] and _name(summary["auxiliary"]),
        "settings": {name: settings.get(name) for name in _IDENTITY},
        "digests": {**digests, "settings_sha256": json_digest(own)},
        "versions": {name: settings.get(name) for name in _VERSIONS},
        "machines": [*summary["measured_on"]],
        "methods": {
            label: {
                **{name: row[name] for name in _FIGURES if name in row},
                "settings_sha256": json_digest(settings["methods"][label]),
            }
            for label, row in summary["methods"].items()
        },
    }


def read_submissions(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the files of a folder, by name. Raises ConfigurationError: one is no submission, or has
    fields that none has."""
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            fields, figures = set(value), {name for row in value["methods"].values() for name in row}
            is_one = value["format"] == FORMAT and fields == _FIELDS and figures <= {*_FIGURES, "settings_sha256"}
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            is_one = False
        if not is_one:
            raise ConfigurationError(f"expected what cacheclip eval --submit writes in {path}. Write it again.")
        yield path.stem, value


def _name(model: str) -> str:
    """A model's name; of a file or folder the last part, because the others say who you are."""
    return expanded(model).name if expanded(model).exists() else model
