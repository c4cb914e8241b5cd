"""``cacheclip eval``: compares methods' quality and speed on questions with known answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigurationError
from .common import JsonOption, VariantsOption, print_json, print_tables
from .options import CommandSettings, engine_options
from .tables import EvalTable

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..lab.evaluation.lab import PlannedRun
    from ..lab.evaluation.records import Record, SkippedRecord

_PER_TASK = 20
"""Questions of a RULER task."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked."""

    name: str
    records: list[Record]
    skipped: tuple[SkippedRecord, ...] = ()
    """Records that cannot be read."""


@engine_options("primary", "auxiliary", "dtype")
def evaluate(
    settings: CommandSettings,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Records as JSON lines, plain or gzip: question, answers, chunks. Give several files comma-separated "
            "or by repeating the option."
        ),
    ] = None,
    ruler: Annotated[
        str | None, typer.Option(help="RULER needle tasks instead of a file, comma-separated, or 'all'.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a RULER prompt.")] = 4096,
    haystack: Annotated[Path | None, typer.Option(help="Text file that RULER hides its needles in.")] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated names of presets and variants; 'all' for every preset except "
            "block (for specially trained checkpoints) and, without an auxiliary model, presets that need one. "
            "'full-again' is full prefill with its sums in another order (what rounding alone changes), "
            "'full-reordered' with its chunks in another order."
        ),
    ] = "full,full-again,full-reordered,direct,anchored,cacheclip",
    variants: VariantsOption = None,
    ratios: Annotated[str, typer.Option(help="Comma-separated recompute ratios, of variants too.")] = "0.2",
    limit: Annotated[
        int | None,
        typer.Option(show_default="all; RULER: 20", help="Most questions of each file or RULER task."),
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(help="Every second question of each file: dev (to choose settings) or test (to judge them)."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(help="Label of a method (direct, epic@0.2); every method's mean KL is divided by this method's."),
    ] = "full",
    out: Annotated[
        Path | None, typer.Option(help="Folder for answers and report; an interrupted run continues from it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods with full prefill on the same questions: scores, fidelity, time to the first token."""
    from ..lab.evaluation.lab import Lab
    from ..lab.evaluation.questions import INSTRUCTION
    from ..lab.evaluation.report import summarise, write_report
    from ..lab.evaluation.scores import check_metric
    from ..lab.evaluation.tables import console_tables, notes
    from ..lab.variants import read_variants

    # check options before weights are loaded
    table = settings.table(EvalTable)
    _check_source(dataset, ruler, half, limit, table)
    if out is not None:
        _check_out(out)
    config = settings.measured(recompute_ratio=None)
    runs = _runs(config, methods, ratios, read_variants(variants), against)
    metrics = _split(table.metrics or "")
    for metric in metrics:
        check_metric(metric)
    if dataset:
        asked = _read_questions(_files(dataset), limit, half, table.shuffle)
        config = replace(config, system_prompt=INSTRUCTION)
    else:
        asked = _needles(config, _split(ruler or ""), length, limit or _PER_TASK, _read_haystack(haystack), table)
    lab = Lab(name=asked.name, records=asked.records, config=config, runs=runs, folder=out, metrics=metrics)
    comparison = lab.run()
    comparison = replace(comparison, skipped=[*asked.skipped, *comparison.skipped])
    summary = summarise(comparison, against=against)
    if out is not None:
        write_report(comparison, summary, out)
    _tell_skipped(summary)
    if as_json:
        print_json(summary)
    else:
        from rich.markup import escape

        tables = {escape(title): rows for title, rows in console_tables(summary).items()}
        print_tables(tables, *map(escape, notes(summary)))


def _check_source(
    dataset: list[str] | None, ruler: str | None, half: str | None, limit: int | None, table: EvalTable
) -> None:
    if (not dataset) == (ruler is None):
        raise ConfigurationError("give either --dataset FILE or --ruler TASKS.")
    if half is not None and not dataset:
        raise ConfigurationError("--half divides the questions of files: give --dataset FILE, or another seed.")
    if table.shuffle is not None and not dataset:
        raise ConfigurationError("shuffle orders the chunks of files: give --dataset FILE.")
    if limit is not None and limit < 1:
        raise ConfigurationError(
            f"--limit must be 1 or more questions, got {limit}. Leave it out for the usual number."
        )


def _check_out(out: Path) -> None:
    from ..lab.evaluation.journal import check_folder
    from ..lab.evaluation.report import FILES

    report = out / FILES["summary"]
    if report.exists():
        raise ConfigurationError(f"{out} holds a report already. Name another folder, or delete {report}.")
    check_folder(out)


def _runs(config: EngineConfig, methods: str, ratios: str, variants: dict[str, Any], against: str) -> list[PlannedRun]:
    from ..lab.evaluation.lab import every_method, planned_runs

    names = _split(methods)
    if "all" in names and (without := every_method(config)[1]):
        typer.echo(f"'all' leaves out methods that need an auxiliary model: {', '.join(without)}", err=True)
    runs = planned_runs(names, [_ratio(value) for value in _split(ratios)], config, variants)
    labels = [planned.run.label for planned in runs]
    if against not in labels:
        raise ConfigurationError(f"--against must be one of {', '.join(labels)}, got {against!r}.")
    return runs


def _read_questions(files: list[str], limit: int | None, half: str | None, shuffle: int | None) -> Questions:
    from ..lab.evaluation.records import read_together, shuffled

    found = read_together(files, limit=limit, half=half)
    name, records = found.name, list(found.records)
    if half is not None:
        name += f" ({half} half)"
    if shuffle is not None:
        name += f" (chunks shuffled by {shuffle})"
        records = [shuffled(record, shuffle) for record in records]
    return Questions(name, records, found.skipped)


def _tell_skipped(summary: dict[str, Any]) -> None:
    """Print on stderr how many records were skipped, and the reasons for the first of them."""
    from ..lab.evaluation.tables import first_skipped

    if not summary["skipped"]:
        return
    shown = first_skipped(summary)
    more = summary["skipped"] - len(shown)
    typer.echo(f"skipped {summary['skipped']} of {summary['n'] + summary['skipped']} records:", err=True)
    for line in [*shown, *([f"and {more} more"] if more else [])]:
        typer.echo(f"  {line}", err=True)


def _needles(
    config: EngineConfig, tasks: list[str], length: int, count: int, haystack: str | None, table: EvalTable
) -> Questions:
    """Questions of RULER tasks, ``count`` of each, in prompts of ``length`` tokens."""
    from ..engine import CacheClipEngine
    from ..lab.evaluation.ruler import chosen_tasks, generate

    chosen = chosen_tasks(tasks, has_haystack=haystack is not None)
    runtime = CacheClipEngine(replace(config, auxiliary=None)).primary
    records = [
        record
        for name in chosen
        for record in generate(
            name,
            num_tokens=length,
            count=count,
            offsets=lambda part: runtime.tokenize(part).offsets,
            seed=table.seed,
            haystack=haystack,
            chunk_tokens=table.chunk_tokens,
            overlap_tokens=table.overlap_tokens,
        )
    ]
    return Questions(f"ruler-{length}", records)


def _read_haystack(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the haystack must be a UTF-8 text file: {error}.") from error


def _files(given: list[str]) -> list[str]:
    """Paths, split at commas. A path that itself contains a comma must exist."""
    return [path for text in given for path in ([text] if Path(text).is_file() else _split(text))]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"--ratios must be numbers from 0 to 1, comma-separated, got {text!r}.") from None
