"""The promise of a certificate: from bundled prompts that are asked for it, or from answers of ``cacheclip eval``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.methods import Method, preset

from ..certificates import Guarantee, PromisedGate
from ..certificates.identity import Identity, differences
from .answering import FULL
from .journal import METHODS, read_journal
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
    """By recompute ratio, answers that ``cacheclip eval`` wrote with this identity, and without a gate.

    Raises:
        ConfigurationError: the folder holds no comparison, or none with these models, settings and method.
    """
    journal = read_journal(folder)
    _check_engine(journal.settings, config, identity, folder)
    recorded = journal.settings.get(METHODS)
    labels = recorded if isinstance(recorded, dict) else {}
    wanted = {ratio: identity.of_method(method) for ratio, method in methods.items()}
    items = list(journal.items.values())
    same = [(ratio, label) for ratio, here in wanted.items() for label, there in labels.items() if there == here]
    if found := {ratio: pairs for ratio, label in same if (pairs := _pairs(items, label))}:
        return found
    raise ConfigurationError(
        f"expected answers of method {identity.method!r} at ratio {', '.join(f'{ratio:g}' for ratio in methods)} "
        f"without a gate, and of full, in {folder}, got {', '.join(labels) or 'none'}"
        f"{_nearest(labels, wanted.values())}. Run cacheclip eval with --methods full,{identity.method}."
    )


def _check_engine(there: Mapping[str, Any], config: EngineConfig, identity: Identity, folder: Path) -> None:
    """Raise ConfigurationError unless all that the identity says of the engine was recorded so."""
    here = {
        name: value
        for name, value in identity.of_engine.items()
        if value is not None or not name.startswith("auxiliary")  # else the method needs no auxiliary model
    }
    if other := differences({name: there[name] for name in here if name in there}, here):
        raise ConfigurationError(
            f"expected answers with the certified models, settings and versions in {folder}, and there "
            f"{_listed(other)}. Run cacheclip eval again with these models (--primary {config.primary}) and the same "
            "file of --settings, into another folder."
        )


def _nearest(labels: Mapping[str, Any], wanted: Iterable[Mapping[str, Any]]) -> str:
    """What differs in the recorded method that is most like one of these."""
    known = {label: each for label, each in labels.items() if isinstance(each, dict) and label != FULL}
    found = [(differences(there, here), label) for label, there in known.items() for here in wanted]
    if not found:
        return ""
    other, label = min(found, key=lambda each: len(each[0]))
    return f" ({_listed(other)} in {label})" if other else " (not of the same questions)"


def _listed(other: Mapping[str, str]) -> str:
    return ", ".join(f"{name} is {there}" for name, there in other.items())


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


def _pairs(items: Iterable[ItemResult], label: str) -> Pairs:
    own, full = ({each.id: each for each in items if each.label == name} for name in (label, FULL))
    return [(own[id_], full[id_]) for id_ in full if id_ in own]


def _range(values: Iterable[int | None]) -> tuple[int, int] | None:
    known = [each for each in values if each is not None]
    return (min(known), max(known)) if known else None
