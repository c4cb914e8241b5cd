"""``cacheclip eval``: compares methods' quality and speed on questions with known answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, print_json

from .common import VariantsOption, measured, print_tables

if TYPE_CHECKING:
    from cacheclip_rag import EngineConfig
    from cacheclip_rag.runtime import Runtime

    from ..evaluation.lab import PlannedRun
    from ..evaluation.results import Comparison


@engine_options("primary", "auxiliary", "dtype")
def evaluate(
    settings: CommandSettings,
    dataset: Annotated[
        list[str],
        typer.Option(
            help="Records as JSON lines, plain or gzip: question, answers, chunks. Give several files comma-separated "
            "or by repeating the option."
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            show_default="full,full-again,full-reordered,direct,epic-corrected,cacheclip; epic if layers are recurrent",
            help="Comma-separated names of presets and variants; 'all' for every preset (without an "
            "auxiliary model, every one that needs none). "
            "'full-again' is full prefill with its sums in another order (what rounding alone changes), "
            "'full-reordered' with its chunks in another order.",
        ),
    ] = None,
    variants: VariantsOption = None,
    ratios: Annotated[str, typer.Option(help="Comma-separated recompute ratios, of variants too.")] = "0.2",
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default="all", help="Most questions of each file."),
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(help="Every second question of each file: dev (to choose settings) or test (to judge them)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for answers and report; an interrupted run continues from it.")
    ] = None,
    submit: Annotated[
        Path | None,
        typer.Option(help="File for figures, machine, versions and digests, without any text, to hand in as a result."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods with full prefill on the same questions: scores, fidelity, time to the first token."""
    from ..evaluation.lab import Lab
    from ..evaluation.questions import INSTRUCTION
    from ..evaluation.records import read_together
    from ..evaluation.report import summarise
    from ..variants import read_variants

    # check options before weights are loaded
    _check_places(out, submit)
    config = measured(settings, recompute_ratio=None, system_prompt=settings.engine.get("system_prompt", INSTRUCTION))
    asked_for = config, methods, ratios, read_variants(variants)
    _runs(*asked_for)
    asked = read_together(_files(dataset), limit=limit, half=half)
    name = f"{asked.name} ({half} half)" if half else asked.name
    comparison = Lab(name=name, records=asked.records, config=config, runs=_runnable(*asked_for), folder=out).run()
    comparison = replace(comparison, skipped=[*asked.skipped, *comparison.skipped])
    summary = summarise(comparison)
    _write(comparison, summary, out, submit)
    _tell_skipped(summary)
    (print_json if as_json else _print)(summary)


def _check_places(out: Path | None, submit: Path | None) -> None:
    from ..evaluation.journal import check_folder

    if out is not None:
        check_folder(out)
    if submit is not None and (submit.is_dir() or not submit.absolute().parent.is_dir()):
        raise ConfigurationError(f"--submit expects a file in a folder that is there, got {submit}. Name another.")


def _write(comparison: Comparison, summary: dict[str, Any], out: Path | None, submit: Path | None) -> None:
    from ..evaluation.report import write_report
    from ..evaluation.submission import submission

    if out is not None:
        write_report(comparison, summary, out)
    if submit is not None:
        submit.write_text(json.dumps(submission(comparison, summary), indent=1) + "\n", encoding="utf-8")


def _print(summary: dict[str, Any]) -> None:
    from rich.markup import escape

    from ..evaluation.tables import console_tables, notes

    tables = {escape(title): rows for title, rows in console_tables(summary).items()}
    print_tables(tables, *map(escape, notes(summary)))


def _runnable(config: EngineConfig, methods: str | None, ratios: str, variants: dict[str, Any]) -> list[PlannedRun]:
    """Without those that were not named and that the model, which is loaded, cannot run."""
    from cacheclip_rag.models import concrete, load_model

    from ..evaluation.lab import runnable

    if methods is not None and "all" not in _split(methods):
        return _runs(config, methods, ratios, variants)
    config = concrete(config)
    primary = load_model(config.primary, dtype=config.dtype, device=config.device)
    return runnable(_runs(config, methods, ratios, variants, primary), primary)


def _runs(
    config: EngineConfig, methods: str | None, ratios: str, variants: dict[str, Any], primary: Runtime | None = None
) -> list[PlannedRun]:
    from ..evaluation.lab import every_method, planned_runs

    without_scores = "epic" if primary and primary.computed_edges[0] else "epic-corrected"  # as auto chooses
    names = _split(methods or f"full,full-again,full-reordered,direct,{without_scores},cacheclip")
    if "all" in names and not primary and (without := every_method(config)[1]):
        typer.echo(f"'all' leaves out methods that need an auxiliary model: {', '.join(without)}", err=True)
    return planned_runs(names, [_ratio(value) for value in _split(ratios)], config, variants)


def _tell_skipped(summary: dict[str, Any]) -> None:
    """Print on stderr how many records were skipped, and the reasons for the first of them."""
    from ..evaluation.tables import first_skipped

    if not summary["skipped"]:
        return
    shown = first_skipped(summary)
    more = summary["skipped"] - len(shown)
    typer.echo(f"skipped {summary['skipped']} of {summary['n'] + summary['skipped']} records:", err=True)
    for line in [*shown, *([f"and {more} more"] if more else [])]:
        typer.echo(f"  {line}", err=True)


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
