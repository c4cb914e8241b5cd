"""``cacheclip eval``: compares methods' quality and speed on questions with known answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigurationError
from .common import (
    AuxiliaryDeviceOption,
    AuxiliaryOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    PrimaryOption,
    VariantsOption,
    print_json,
)

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..lab.evaluation.records import Record, Skipped

_PER_TASK = 20
"""Questions of a RULER task."""


def evaluate(
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
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk of a RULER prompt.")] = 1000,
    overlap_tokens: Annotated[int, typer.Option(help="Tokens that neighbouring chunks share.")] = 50,
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated names of presets and variants; 'all' for every preset except "
            "block, turborag and link (for specially trained checkpoints) and, without an auxiliary model, presets "
            "that need one. 'full-again' is full prefill with its sums in another order: what rounding alone changes."
        ),
    ] = "full,direct,anchored,cacheclip",
    variants: VariantsOption = None,
    ratios: Annotated[str, typer.Option(help="Comma-separated recompute ratios, of variants too.")] = "0.2",
    limit: Annotated[
        int | None,
        typer.Option(help="Most questions of each file; questions of each RULER task. [default: all; RULER: 20]"),
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(help="Every second question of each file: dev (to choose settings) or test (to judge them)."),
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option(help="Seed of another order of every question's chunks. [default: as in the file]")
    ] = None,
    against: Annotated[
        str,
        typer.Option(help="Label of a method (direct, epic@0.2); every method's mean KL is divided by this method's."),
    ] = "full",
    metrics: Annotated[
        str | None, typer.Option(help="Comma-separated metrics instead of the records' own: f1, f1_zh, em, ...")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated needles.")] = 42,
    out: Annotated[
        Path | None, typer.Option(help="Folder for answers and report; an interrupted run continues from it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report in that folder.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the primary's chunk caches.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods with full prefill on the same questions: scores, fidelity, time to the first token."""
    from ..config import EngineConfig
    from ..lab.evaluation.journal import check_folder
    from ..lab.evaluation.lab import Lab, every_method, planned_runs
    from ..lab.evaluation.questions import INSTRUCTION
    from ..lab.evaluation.records import read_together, shuffled
    from ..lab.evaluation.report import FILES, summarise, to_markdown, write_report
    from ..lab.evaluation.ruler import chosen_tasks
    from ..lab.evaluation.scores import check_metric
    from ..lab.variants import read_variants
    from .settings import DEFAULT_SETTINGS, parse_auxiliary

    if (not dataset) == (ruler is None):
        raise ConfigurationError("give either --dataset FILE or --ruler TASKS.")
    if half is not None and not dataset:
        raise ConfigurationError("--half divides the questions of files: give --dataset FILE, or another --seed.")
    if shuffle is not None and not dataset:
        raise ConfigurationError("--shuffle orders the chunks of files: give --dataset FILE.")
    if limit is not None and limit < 1:
        raise ConfigurationError(
            f"--limit must be 1 or more questions, got {limit}. Leave it out for the usual number."
        )
    # check options before weights are loaded
    if out is not None:
        if not overwrite and (out / FILES["summary"]).exists():
            raise ConfigurationError(f"{out} holds a report already. Name another folder, or add --overwrite.")
        check_folder(out)
    config = EngineConfig(
        primary=primary or DEFAULT_SETTINGS.primary,
        auxiliary=parse_auxiliary(auxiliary) if auxiliary else DEFAULT_SETTINGS.auxiliary,
        dtype=dtype or DEFAULT_SETTINGS.dtype,
        device=device,
        auxiliary_device=auxiliary_device,
        codec=codec,
    )
    names = _split(methods)
    if "all" in names and (without := every_method(config)[1]):
        typer.echo(f"'all' leaves out methods that need an auxiliary model: {', '.join(without)}", err=True)
    runs = planned_runs(names, [_ratio(value) for value in _split(ratios)], config, read_variants(variants))
    labels = [planned.run.label for planned in runs]
    if against not in labels:
        raise ConfigurationError(f"--against must be one of {', '.join(labels)}, got {against!r}.")
    chosen_metrics = _split(metrics or "")
    for metric in chosen_metrics:
        check_metric(metric)
    unreadable: tuple[Skipped, ...] = ()
    if dataset:
        found = read_together(_files(dataset), limit=limit, half=half)
        name, records, unreadable = found.name, list(found.records), found.skipped
        if half is not None:
            name += f" ({half} half)"
        if shuffle is not None:
            name += f" (chunks shuffled by {shuffle})"
            records = [shuffled(record, shuffle) for record in records]
        config = replace(config, system_prompt=INSTRUCTION)
    else:
        assert ruler is not None
        name = f"ruler-{length}"
        text = _read_haystack(haystack)
        tasks = chosen_tasks(_split(ruler), has_haystack=text is not None)
        count = _PER_TASK if limit is None else limit
        records = _needles(config, tasks, length, count, seed, text, chunk_tokens, overlap_tokens)
    lab = Lab(
        name=name,
        records=records,
        config=config,
        runs=runs,
        folder=out,
        metrics=chosen_metrics,
    )
    comparison = lab.run()
    comparison = replace(comparison, skipped=[*unreadable, *comparison.skipped])
    summary = summarise(comparison, against=against)
    if out is not None:
        write_report(comparison, out, overwrite=overwrite, summary=summary)
    _tell_skipped(summary)
    if as_json:
        print_json(summary)
    else:
        typer.echo(to_markdown(summary))


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
    config: EngineConfig,
    tasks: list[str],
    length: int,
    count: int,
    seed: int,
    text: str | None,
    chunk: int,
    overlap: int,
) -> list[Record]:
    from ..engine import CacheClipEngine
    from ..lab.evaluation.ruler import generate

    runtime = CacheClipEngine(replace(config, auxiliary=None)).primary
    return [
        record
        for name in tasks
        for record in generate(
            name,
            num_tokens=length,
            count=count,
            offsets=lambda part: runtime.tokenize(part).offsets,
            seed=seed,
            haystack=text,
            chunk_tokens=chunk,
            overlap_tokens=overlap,
        )
    ]


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
