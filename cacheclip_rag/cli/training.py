"""``cacheclip calibrate`` and ``cacheclip finetune``: a head set for a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError, ModelError
from .common import (
    AuxiliaryDeviceOption,
    AuxiliaryOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    PrimaryOption,
    print_json,
)

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..selection.heads import HeadSet
    from ..training.families import Sample
    from ..training.report import Table
    from ..training.tuning import TuningSettings

DataOption = Annotated[
    list[str] | None,
    typer.Option(help="Files to learn from beside the synthetic questions: records as JSON lines, or documents."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="File of the head set; default where engines of this pair of models look.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a head set that is there.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the synthetic questions and of training.")]
SamplesOption = Annotated[int, typer.Option("--samples", help="Synthetic questions to learn from.")]
PromptsOption = Annotated[
    int, typer.Option("--prompts", help="Of those to measure by, how many are asked of the primary.")
]


def calibrate(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    data: DataOption = None,
    samples: SamplesOption = 90,
    prompts: PromptsOption = 10,
    seed: SeedOption = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the heads of the auxiliary model that look at evidence; engines of this pair use them from then on."""
    from ..training.calibrate import calibrate as run
    from ..training.report import calibration_json, calibration_table

    config = _config(primary, auxiliary, dtype, device, auxiliary_device)
    path = _target(config, out, overwrite)
    found = run(config, num_samples=samples, num_prompts=prompts, given=_given(config, data, seed), seed=seed)
    found.heads.save(path)
    if as_json:
        print_json({**calibration_json(found), "path": str(path)})
    else:
        _print("Heads of the auxiliary model", calibration_table(found), path)


def finetune(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    data: DataOption = None,
    heads: Annotated[
        Path | None, typer.Option(help="Head set to begin with; default those nearest to what is wanted as they come.")
    ] = None,
    samples: SamplesOption = 96,
    targets: Annotated[int, typer.Option(help="Of those, how many the primary is asked about.")] = 36,
    tests: Annotated[int, typer.Option(help="Synthetic questions to measure by.")] = 36,
    prompts: PromptsOption = 6,
    epochs: Annotated[int, typer.Option(help="At most.")] = 60,
    rank: Annotated[int, typer.Option(help="Rank of the updates.")] = 8,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of AdamW: 1e-3 unless told, for a whole model 2e-5.")
    ] = None,
    scope: Annotated[
        str, typer.Option(help="heads: a head set. model: every weight up to its last layer; --out is then a folder.")
    ] = "heads",
    seed: SeedOption = 0,
    out: OutOption = None,
    report: Annotated[Path | None, typer.Option(help="Folder for report.md and report.html.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder that an interrupted run goes on from.")] = None,
    overwrite: OverwriteOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the auxiliary model to find what the primary attends to and holds stale; an interrupted run goes on."""
    from ..selection.heads import HeadSet
    from ..training.calibrate import SINKS
    from ..training.finetune import finetune as run
    from ..training.report import finetuning_json, finetuning_table, finetuning_verdict, write_report
    from ..training.tuning import WHOLE_LEARNING_RATE, TuningSettings

    if scope not in ("heads", "model") or (scope == "model" and out is None):
        raise ConfigurationError(f"scope must be heads, or model with a new folder as --out; got {scope!r}.")
    if report is not None and report.exists() and not report.is_dir():
        raise ConfigurationError(f"the report needs a folder, and {report} is a file. Name another.")
    config = _config(primary, auxiliary, dtype, device, auxiliary_device)
    begin = HeadSet.load(heads) if heads else None
    rate = learning_rate or (WHOLE_LEARNING_RATE if scope == "model" else TuningSettings().learning_rate)
    settings = TuningSettings(rank=rank, learning_rate=rate, epochs=epochs, sinks=SINKS, seed=seed)
    if scope == "model":
        if report is not None or work is not None:
            raise ConfigurationError("--report and --work are for head sets; with --scope model leave them out.")
        assert out is not None
        _finetune_whole(config, out, settings, begin, samples, targets, data, as_json)
        return
    path = _target(config, out, overwrite, instead_of="calibrate")
    found = run(
        config,
        settings,
        heads=begin,
        num_samples=samples,
        num_targets=targets,
        num_tests=tests,
        num_prompts=prompts,
        given=_given(config, data, seed),
        folder=work,
    )
    kept = path.exists() and not overwrite and not found.is_accepted
    if kept:
        typer.echo(
            f"{path} keeps the head set of 'cacheclip calibrate', since the new one was not accepted. Write it with "
            "--overwrite (nothing is computed twice), or elsewhere with --out.",
            err=True,
        )
    else:
        found.heads.save(path)
    reports = [str(each) for each in write_report(found, report)] if report else []
    if as_json:
        print_json({**finetuning_json(found), "path": None if kept else str(path), "reports": reports})
    else:
        _print("On families and words never trained on", finetuning_table(found), path, finetuning_verdict(found))


def _finetune_whole(
    config: EngineConfig,
    folder: Path,
    settings: TuningSettings,
    heads: HeadSet | None,
    samples: int,
    targets: int,
    data: Sequence[str] | None,
    as_json: bool,
) -> None:
    from ..selection.heads import HEADS_FILE
    from ..training.whole import finetune_whole

    given = _given(config, data, settings.seed)
    found = finetune_whole(config, folder, settings, heads=heads, num_samples=samples, num_targets=targets, given=given)
    if as_json:
        figures = {"history": list(found.history), "seconds": found.seconds}
        print_json({"model": str(folder), "digest": found.heads.digest(), **figures})
        return
    rows = [[f"{each['epoch']:.0f}", f"{each['loss']:.3f}", f"{each['held_out_recall']:.3f}"] for each in found.history]
    _print("Training of the whole model", (["epoch", "loss", "held-out recall"], rows), folder / HEADS_FILE)


def _config(
    primary: str | None, auxiliary: str | None, dtype: str | None, device: str, auxiliary_device: str | None
) -> EngineConfig:
    from ..config import EngineConfig
    from ..evaluation.questions import INSTRUCTION
    from .settings import DEFAULT_SETTINGS, parse_auxiliary

    return EngineConfig(
        primary=primary or DEFAULT_SETTINGS.primary,
        auxiliary=parse_auxiliary(auxiliary) if auxiliary else DEFAULT_SETTINGS.auxiliary,
        dtype=dtype or DEFAULT_SETTINGS.dtype,
        device=device,
        auxiliary_device=auxiliary_device,
        system_prompt=INSTRUCTION,
    )


def _given(config: EngineConfig, data: Sequence[str] | None, seed: int) -> list[Sample]:
    from ..training.calibrate import open_engine
    from ..training.given import given_samples

    return given_samples(open_engine(config), data, seed=seed) if data else []


def _target(config: EngineConfig, out: Path | None, overwrite: bool, *, instead_of: str = "") -> Path:
    """Where the head set goes: where it was asked for, or where engines of this pair of models look. One by the command
    ``instead_of`` may be there."""
    from ..selection.heads import HeadSet, head_set_path, weights_digest
    from ..training.calibrate import open_engine

    engine = open_engine(config)
    auxiliary, primary = (
        weights_digest(each.fingerprint) for each in (engine.auxiliary_caches.runtime, engine.primary)
    )
    path = out or head_set_path(auxiliary, primary)
    if path.is_dir():
        raise ConfigurationError(f"a head set is a file, and {path} is a folder. Name a file with --out.")
    if path.exists() and not overwrite:
        try:
            command = HeadSet.load(path).about.get("command", "an unknown command")
        except ModelError:
            command = "no command that is known: the file cannot be read"
        if not instead_of or command != instead_of:
            raise ConfigurationError(
                f"{path} holds a head set already (of {command}). Replace it with --overwrite, or name another file "
                "with --out."
            )
    return path


def _print(title: str, table: Table, path: Path, verdict: str = "") -> None:
    from rich.console import Console
    from rich.table import Table as Printed

    titles, rows = table
    printed = Printed(title=title)
    for number, each in enumerate(titles):
        printed.add_column(each, justify="left" if number == 0 else "right")
    for row in rows:
        printed.add_row(*row)
    out = Console()
    out.print(printed)
    if verdict:
        out.print(verdict)
    out.print(f"Head set: {path}", soft_wrap=True)
