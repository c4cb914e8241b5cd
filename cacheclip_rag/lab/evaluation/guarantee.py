"""The promise of a certificate: from bundled prompts that are asked for it, or from answers of ``cacheclip eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import ConfigurationError
from ...config import EngineConfig
from ...guards.certificate import Identity
from ...guards.promise import Guarantee, PromisedGate
from ...methods import preset
from ...methods.base import Method
from ...methods.settings import describe
from .answering import FULL
from .journal import read_journal
from .lab import Lab, PlannedRun
from .promise import CONFIDENCE, Pairs, held_gates
from .prompts import bundled_prompts
from .records import Record, RecordChunk
from .results import ItemResult, Run

_PROMPTS_TIMES_SHARE = 10
"""Bundled prompts are so many that ten may differ where a promise is just not kept."""


def check_max_differ(most: float) -> None:
    """Raise ConfigurationError unless it is a share that a hundred or a thousand prompts can show."""
    if not 0.01 <= most <= 0.5:
        raise ConfigurationError(
            f"max_differ must be a share from 0.01 to 0.5, got {most:g}. 0.1 means that at most one answer of ten "
            "differs; a smaller share needs more prompts than anyone measures."
        )


def asked_answers(config: EngineConfig, methods: Mapping[float, Method], most: float) -> dict[float, Pairs]:
    """By recompute ratio, answers to bundled prompts, each with full prefill's."""
    records = [
        Record(f"{number}", "", each.question, (each.needle or "none",), _chunks(each.chunks), {})
        for number, each in enumerate(bundled_prompts(round(_PROMPTS_TIMES_SHARE / most)))
    ]
    runs = [PlannedRun(Run(FULL, FULL, None), preset(FULL))]
    runs += [PlannedRun(Run(f"{ratio}", m.name, ratio, m.learns), m) for ratio, m in methods.items()]
    items = Lab("bundled prompts", records, config, runs).run().items
    return {ratio: _pairs(items, f"{ratio}") for ratio in methods}


def kept_answers(
    folder: Path, config: EngineConfig, identity: Identity, methods: Mapping[float, Method]
) -> dict[float, Pairs]:
    """By recompute ratio, answers that ``cacheclip eval`` wrote with these models and this method.

    Raises:
        ConfigurationError: the folder holds no comparison, or none with these models, settings and method.
    """
    journal = read_journal(folder)
    settings, items = {**journal.settings}, list(journal.items.values())
    wanted: dict[str, Any] = {
        "primary_sha256": identity.primary_sha256,
        "primary_tokenizer_sha256": identity.primary_tokenizer_sha256,
        "device": _kind(config.device),
        "dtype": identity.dtype,
        "codec": config.codec or identity.dtype,
        "chunk_context": config.chunk_context,
        "cacheclip_rag": identity.cacheclip_rag,
        "torch": identity.torch,
    }
    if identity.auxiliary_sha256:
        wanted |= {
            "auxiliary_sha256": identity.auxiliary_sha256,
            "auxiliary_tokenizer_sha256": identity.auxiliary_tokenizer_sha256,
            "auxiliary_device": _kind(config.auxiliary_device or config.device),
        }
    for name in ("device", "auxiliary_device"):
        settings[name] = _kind(settings.get(name) or "")
    if other := [f"{key} is {settings.get(key)!r}" for key, value in wanted.items() if settings.get(key) != value]:
        raise ConfigurationError(
            f"expected answers with the certified models and versions in {folder}, and there {', '.join(other)}. "
            "Run cacheclip eval again with these models, into another folder."
        )
    described: dict[str, Any] = {label: _plain(method) for label, method in settings["methods"].items()}
    found = {
        ratio: _pairs(items, label)
        for ratio, method in methods.items()
        for label, other in described.items()
        if other == _plain(describe(method))
    }
    if found := {ratio: pairs for ratio, pairs in found.items() if pairs}:
        return found
    raise ConfigurationError(
        f"expected answers of method {identity.method!r} at ratio {', '.join(f'{ratio:g}' for ratio in methods)} and "
        f"of full in {folder}, got {', '.join(described)}. Run cacheclip eval with --methods full,{identity.method}."
    )


def guarantee_of(answers: Mapping[float, Pairs], most: float) -> Guarantee:
    """What the answers show: per recompute ratio the cheapest gate."""
    promises = held_gates({f"{ratio}": pairs for ratio, pairs in answers.items()}, most)
    items = [own for pairs in answers.values() for own, _ in pairs]
    return Guarantee(
        most,
        CONFIDENCE,
        max(map(len, answers.values())),
        tuple(PromisedGate(float(p.label), p.min_confidence, p.wrong, p.bound, p.cost) for p in promises),
        _range(item.prompt_tokens for item in items),
        _range(item.chunks for item in items),
        _range(item.answer_tokens for item in items),
    )


def _chunks(texts: Sequence[str]) -> tuple[RecordChunk, ...]:
    return tuple(RecordChunk("", text) for text in texts)


def _kind(device: str) -> str:
    """``cuda`` of ``cuda:1``."""
    return device.partition(":")[0]


def _plain(method: Mapping[str, Any]) -> dict[str, Any]:
    """Without the gate, which is looked for."""
    return {name: value for name, value in method.items() if name != "min_confidence"}


def _pairs(items: Iterable[ItemResult], label: str) -> Pairs:
    own, full = ({each.id: each for each in items if each.label == name} for name in (label, FULL))
    return [(own[id_], full[id_]) for id_ in full if id_ in own]


def _range(values: Iterable[int | None]) -> tuple[int, int] | None:
    known = [each for each in values if each is not None]
    return (min(known), max(known)) if known else None
