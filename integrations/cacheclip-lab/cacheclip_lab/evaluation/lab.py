"""The laboratory: compares methods on the same questions, with quality and time to the first token in one run.

Every question's chunks are precomputed once and shared by all methods. Full prefill answers first. Each method is
compared with it along full prefill's answer, and then gives its own answer. The prefix cache is cleared between
methods. Methods that learn from earlier prompts are measured after one earlier prompt, the same question with its
chunks in reverse order. Every answer is written at once, so that a killed run can continue.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine, Chunk, ConfigurationError, EngineConfig, Segment
from cacheclip_rag.methods import PRESET_NAMES, Method, check_auxiliary, check_reads, preset
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import progress_bar
from cacheclip_rag.runtime import Runtime
from cacheclip_rag.selection import load_named

from ..certificates.identity import identity_of
from ..variants import AGAIN, REORDERED
from .answering import (
    FULL,
    NOT_THE_QUESTIONS,
    UnusableQuestion,
    answer_of,
    answering,
    followed,
    in_two_pieces,
    item_of,
    measured_on,
    reason_of,
)
from .journal import Journal, open_journal
from .questions import QuestionPrompt, ask
from .records import Record, SkippedRecord, first_few
from .reference import Reference
from .results import Comparison, ItemResult, Run
from .tables import number_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A method of the comparison, and its label."""

    run: Run
    method: Method


def every_method(config: EngineConfig) -> tuple[list[str], list[str]]:
    """Names that ``all`` means, and names that are left out because they need an auxiliary model and none is set."""
    without = [name for name in PRESET_NAMES if preset(name).needs_auxiliary and not config.auxiliary]
    return [name for name in PRESET_NAMES if name not in without], without


def planned_runs(
    methods: Sequence[str],
    ratios: Sequence[float],
    config: EngineConfig,
    variants: Mapping[str, Method] | None = None,
) -> list[PlannedRun]:
    """Every method at every ratio (once, if it has no ratio). ``full`` always comes first.

    Args:
        methods: names of presets and variants; ``all`` means the names of :func:`every_method`. Two noise floors:
            ``full-again`` is full prefill with its sums in another order, ``full-reordered`` with its chunks in
            another order.
        ratios: recompute ratios, 0 to 1.
        variants: other methods by name (:func:`cacheclip_lab.variants.read_variants`).

    Raises:
        ConfigurationError: an unknown method, a ratio out of range, a missing auxiliary model.
        ModelError: a head set that a method names is missing or cannot be read.
    """
    every, _ = every_method(config)
    names = [name for given in methods for name in (every if given == "all" else [given])]
    planned: dict[str, PlannedRun] = {}
    for name in [FULL, *names]:
        named = (variants or {}).get(name) or preset(FULL if name in {AGAIN, REORDERED} else name)
        check_auxiliary(named, config.auxiliary)
        for heads in named.head_sets:
            load_named(heads)  # report errors before weights are loaded
        if named.has_ratio and not ratios:
            raise ConfigurationError(f"method {name!r} needs a recompute ratio from 0 to 1; none was given.")
        for ratio in ratios if named.has_ratio else [None]:
            method = named if ratio is None else named.at(ratio)
            label = name if ratio is None else f"{name}@{number_text(ratio)}"
            planned.setdefault(label, PlannedRun(Run(label, name, ratio, method.learns), method))
    return list(planned.values())


def runnable(runs: Sequence[PlannedRun], primary: Runtime) -> list[PlannedRun]:
    """Those whose methods the loaded primary can run."""

    def runs_on(planned: PlannedRun) -> bool:
        try:
            check_reads(planned.method, primary)
        except ConfigurationError:
            return False
        return True

    return [*filter(runs_on, runs)]


@dataclass(slots=True)
class Lab:
    """One comparison on one set of questions.

    A question is left out for every method, with the reason, if it cannot be asked or scored, does not fit the context,
    or gives figures that are not finite. Other errors stop the run, because leaving the question out would hide them.

    :meth:`run` raises ConfigurationError: a folder of another comparison, a method that does not fit the models, or no
    question that could be asked.
    """

    name: str
    """Name of the dataset."""
    records: Sequence[Record]
    config: EngineConfig
    """Settings of the engine. Store, ratio and method are not used."""
    runs: Sequence[PlannedRun]
    folder: Path | None = None
    """Folder for answers (``items.jsonl``), from which a killed run continues; None: in memory."""
    date: str = field(default_factory=lambda: time.strftime("%d %b %Y"))
    """Date for chat templates that state the date. A resumed run keeps the date of the first run."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Filled by :meth:`run`: ids of questions that were left out, with reasons."""

    def run(self) -> Comparison:
        """Ask all questions without an answer; returns the whole comparison, including earlier answers."""
        needs_auxiliary = any(planned.method.needs_auxiliary for planned in self.runs)
        config = replace(concrete(self.config), store=None, shadow_rate=0.0, require_certificate=False)
        engine = CacheClipEngine(config if needs_auxiliary else replace(config, auxiliary=None))
        for planned in self.runs:
            check_reads(planned.method, engine.primary)
        wanted = {(record.id, planned.run.label) for record in self.records for planned in self.runs}
        with open_journal(self.folder, self._settings(engine), self.records) as journal:
            self.date = journal.settings["date"]
            done = len(wanted & journal.items.keys())
            with progress_bar("asking", len(wanted), "answers", done=done) as advance:
                for record in self.records:
                    missing = [one for one in self.runs if (record.id, one.run.label) not in journal.items]
                    for number, item in enumerate(self._ask(engine, record, missing), 1):
                        journal.add(item)
                        advance(done + number)
                    done += len(missing)
                    advance(done)  # also for questions that are left out
        if len(self.skipped) == len(self.records):
            reasons = first_few(self._skipped()) or "there is none"
            raise ConfigurationError(f"no question of {self.name!r} could be asked. {reasons}")
        return self._comparison(engine, journal)

    # -- one question -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _ask(self, engine: CacheClipEngine, record: Record, runs: Sequence[PlannedRun]) -> Iterator[ItemResult]:
        """Answers of these runs."""
        if not runs:
            return
        try:
            yield from self._answers(engine, self._asked(engine, record), runs)
        except UnusableQuestion as reason:
            self.skipped[record.id] = str(reason)
            logger.info("question %s is left out", record.id, exc_info=reason)

    def _asked(self, engine: CacheClipEngine, record: Record) -> QuestionPrompt:
        try:
            return ask(engine, record, date=self.date)
        except NOT_THE_QUESTIONS:
            raise
        except Exception as error:  # records may hold anything
            raise UnusableQuestion(reason_of(error)) from error

    def _answers(
        self, engine: CacheClipEngine, asked: QuestionPrompt, runs: Sequence[PlannedRun]
    ) -> Iterator[ItemResult]:
        try:
            _clear_kept(engine)
            with answering(FULL, asked):
                full = engine.prefill(asked.segments, method=preset(FULL))
                reference = Reference.of(engine, full, asked.max_tokens)
                answered = followed(reference, full)
            if runs[0].run.label == FULL:
                yield item_of(asked, FULL, answered, measured_on(engine))
                runs = runs[1:]
            for planned in runs:
                with answering(planned.run.label, asked):
                    engine.precompute(asked.chunks, method=planned.method)
                    _clear_kept(engine)
                    if planned.method.learns:
                        _answer_first(engine, asked, planned.method)
                    if planned.run.method == AGAIN:
                        answered = followed(reference, in_two_pieces(engine, full, reference.max_tokens))
                    elif planned.run.method == REORDERED:
                        other = engine.prefill(_reordered(asked), method=planned.method)
                        answered = followed(reference, other)
                    else:
                        answered = answer_of(engine, asked, planned.method, reference)
                yield item_of(asked, planned.run.label, answered, measured_on(engine))
        finally:
            engine.release(asked.chunks)

    # -- what is kept -------------------------------------------------------------------------------------------

    def _settings(self, engine: CacheClipEngine) -> dict[str, Any]:
        """Settings that must be equal in all runs of a comparison. Questions and methods may be added."""
        identities = {planned.run.label: identity_of(engine, planned.method) for planned in self.runs}
        of_engine = identity_of(engine, preset(FULL)).of_engine
        for identity in identities.values():  # of the auxiliary model, those know that use it
            of_engine |= {name: value for name, value in identity.of_engine.items() if value is not None}
        return {
            "dataset": self.name,
            "primary": engine.config.primary,
            "auxiliary": engine.config.auxiliary,
            **of_engine,
            "methods": {one.run.label: identities[one.run.label].of_method(one.method) for one in self.runs},
            "date": self.date,
        }

    def _comparison(self, engine: CacheClipEngine, journal: Journal) -> Comparison:
        labels = {planned.run.label for planned in self.runs}
        return Comparison(
            dataset=self.name,
            primary=self.config.primary,
            auxiliary=engine.config.auxiliary,
            runs=[planned.run for planned in self.runs],
            questions=[record for record in self.records if record.id not in self.skipped],
            items=[item for (id_, label), item in journal.items.items() if label in labels and id_ not in self.skipped],
            settings=journal.settings,
            skipped=self._skipped(),
        )

    def _skipped(self) -> list[SkippedRecord]:
        return [SkippedRecord(f"question {id_}", reason) for id_, reason in self.skipped.items()]


def _clear_kept(engine: CacheClipEngine) -> None:
    """Clear KV of earlier prompts, which would make the next prompt faster or exact."""
    engine.prefixes.clear()


def _answer_first(engine: CacheClipEngine, asked: QuestionPrompt, method: Method) -> None:
    """Answer an earlier prompt with a method that learns: the question with its chunks in reverse order, if that is
    another prompt."""
    earlier = _with_chunks(asked, _chunks_of(asked)[::-1])
    if earlier != asked.segments:
        prefilled = engine.prefill(earlier, method=method, question=asked.record.question)
        prefilled.keep_prefix(prefilled.cache)


def _reordered(asked: QuestionPrompt) -> list[Segment]:
    """The prompt with its chunks in another order, which depends on the question's id alone."""
    chunks = _chunks_of(asked)
    mixed = random.Random(asked.record.id).sample(chunks, len(chunks))
    return _with_chunks(asked, mixed if mixed != chunks else mixed[::-1])


def _chunks_of(asked: QuestionPrompt) -> list[Chunk]:
    return [segment for segment in asked.segments if isinstance(segment, Chunk)]


def _with_chunks(asked: QuestionPrompt, chunks: Sequence[Chunk]) -> list[Segment]:
    """The prompt with these chunks in the places of its own."""
    given = iter(chunks)
    return [next(given) if isinstance(segment, Chunk) else segment for segment in asked.segments]
