"""``cacheclip calibrate`` and ``cacheclip finetune``: make a head set for a pair of models."""

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
    check_folder,
    print_json,
    print_tables,
    stoppable,
)

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..lab.training.given import Given

DataOption = Annotated[
    list[str] | None,
    typer.Option(help="Training files besides the synthetic questions: records as JSON lines, or documents."),
]
DataLimitOption = Annotated[int, typer.Option(help="Most questions to take from --data.")]
OutOption = Annotated[
    Path | None, typer.Option(help="File of the head set. [default: where engines with these models look]")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing head set.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the synthetic questions and of training.")]
WorkOption = Annotated[Path | None, typer.Option(help="Folder from which an interrupted run continues.")]
SamplesOption = Annotated[int, typer.Option("--samples", help="Synthetic questions for training.")]
PromptsOption = Annotated[int, typer.Option("--prompts", help="Test questions that the primary answers.")]


def calibrate(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    data: DataOption = None,
    data_limit: DataLimitOption = 40,
    samples: SamplesOption = 90,
    prompts: PromptsOption = 10,
    seed: SeedOption = 0,
    out: OutOption = None,
    work: WorkOption = None,
    overwrite: OverwriteOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the heads of the auxiliary model that attend to evidence. Engines with these models then use them. An
    interrupted run continues where it stopped."""
    from ..lab.training.calibrate import calibrate as run
    from ..lab.training.report import calibration_json, calibration_note, calibration_table, ranking_tables

    check_folder(work, "working files")
    config = _config(primary, auxiliary, dtype, device, auxiliary_device)
    path = _target(config, out, overwrite)
    with stoppable():
        given = _given(config, data, data_limit, seed, work)
        found = run(
            config,
            num_samples=samples,
            num_prompts=prompts,
            given=given.samples if given else (),
            seed=seed,
            folder=work,
        )
    found.heads.save(path)
    if as_json:
        print_json({**calibration_json(found), "path": str(path)})
    else:
        tables = {**ranking_tables(found), "Heads of the auxiliary model": calibration_table(found)}
        print_tables(tables, calibration_note(found), f"Head set: {path}")


def finetune(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    data: DataOption = None,
    data_limit: DataLimitOption = 40,
    heads: Annotated[
        Path | None, typer.Option(help="Head set to start from. [default: the heads nearest to the training targets]")
    ] = None,
    samples: SamplesOption = 96,
    targets: Annotated[int, typer.Option(help="Training questions for which the primary computes targets.")] = 36,
    tests: Annotated[int, typer.Option(help="Synthetic test questions.")] = 36,
    prompts: PromptsOption = 12,
    epochs: Annotated[int, typer.Option(help="Most epochs.")] = 60,
    rank: Annotated[int, typer.Option(help="Rank of the updates.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of AdamW, above 0.")] = 1e-3,
    seed: SeedOption = 0,
    out: OutOption = None,
    report: Annotated[Path | None, typer.Option(help="Folder for report.md and report.html.")] = None,
    work: WorkOption = None,
    overwrite: OverwriteOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the auxiliary model to find tokens that the primary attends to and that are stale. An interrupted run
    continues where it stopped."""
    from ..lab.training.calibrate import SINKS, open_engine
    from ..lab.training.finetune import finetune as run
    from ..lab.training.report import (
        finetuning_json,
        finetuning_note,
        finetuning_table,
        finetuning_verdict,
        write_report,
    )
    from ..lab.training.tuning import TuningSettings
    from ..selection.heads import HeadSet, shipped_set

    check_folder(report, "the report")
    check_folder(work, "working files")
    config = _config(primary, auxiliary, dtype, device, auxiliary_device)
    begin = HeadSet.load(heads) if heads else None
    settings = TuningSettings(rank=rank, learning_rate=learning_rate, epochs=epochs, sinks=SINKS, seed=seed)
    path = _target(config, out, overwrite, instead_of="calibrate")
    rival = HeadSet.load(path) if path.exists() and not overwrite else None
    with stoppable():
        given = _given(config, data, data_limit, seed, work)
        found = run(
            config,
            settings,
            heads=begin,
            num_samples=samples,
            num_targets=targets,
            num_tests=tests,
            num_prompts=prompts,
            given=given.samples if given else (),
            given_from=given.files if given else (),
            folder=work,
            rival=rival,
        )
    in_use = path.exists() or bool(out is None and shipped_set(open_engine(config).auxiliary))
    kept = in_use and not overwrite and not found.is_accepted
    if kept:
        current = f"the head set in {path}" if path.exists() else "the head set that comes with the package"
        typer.echo(
            f"The new head set was not accepted; engines keep using {current}. Write the new one with --overwrite "
            "(nothing is computed twice), or to another file with --out.",
            err=True,
        )
    else:
        found.heads.save(path)
    reports = [str(each) for each in write_report(found, report)] if report else []
    if as_json:
        print_json({**finetuning_json(found), "path": None if kept else str(path), "reports": reports})
    else:
        tables = {"On families and words never trained on": finetuning_table(found)}
        written = [] if kept else [f"Head set: {path}"]
        print_tables(tables, finetuning_note(found), finetuning_verdict(found), *written)


def _config(
    primary: str | None, auxiliary: str | None, dtype: str | None, device: str, auxiliary_device: str | None
) -> EngineConfig:
    from ..config import EngineConfig
    from ..lab.evaluation.questions import INSTRUCTION
    from .settings import DEFAULT_SETTINGS, parse_auxiliary

    return EngineConfig(
        primary=primary or DEFAULT_SETTINGS.primary,
        auxiliary=parse_auxiliary(auxiliary) if auxiliary else DEFAULT_SETTINGS.auxiliary,
        dtype=dtype or DEFAULT_SETTINGS.dtype,
        device=device,
        auxiliary_device=auxiliary_device,
        system_prompt=INSTRUCTION,
    )


def _given(config: EngineConfig, data: Sequence[str] | None, limit: int, seed: int, work: Path | None) -> Given | None:
    """Samples from the user's data, with a summary on stderr; None without data. Questions that the primary writes for
    documents are saved in ``work``, by default in a folder that all jobs share."""
    from ..lab.training.calibrate import open_engine
    from ..lab.training.given import given_samples
    from ..paths import cache_home

    if limit < 1:
        raise ConfigurationError(f"--data-limit must be 1 question or more, got {limit}. Leave out --data for none.")
    if not data:
        return None
    folder = work or cache_home() / "training" / "questions"
    found = given_samples(open_engine(config), data, limit=limit, seed=seed, folder=folder)
    typer.echo(f"--data: learning from {found.summary}; at most {limit} (--data-limit).", err=True)
    return found


def _target(config: EngineConfig, out: Path | None, overwrite: bool, *, instead_of: str = "") -> Path:
    """Path of the new head set: ``out``, or the path where engines with these models look. A head set made by the
    command ``instead_of`` may be replaced."""
    from ..lab.training.calibrate import open_engine
    from ..selection.heads import HeadSet, head_set_path, weights_digest

    engine = open_engine(config)
    auxiliary, primary = (
        weights_digest(each.fingerprint) for each in (engine.parts.auxiliary_caches.runtime, engine.primary)
    )
    path = out or head_set_path(auxiliary, primary)
    if path.is_dir():
        raise ConfigurationError(f"a head set is a file, but {path} is a folder. Name a file with --out.")
    if path.exists() and not overwrite:
        try:
            command = HeadSet.load(path).about.get("command", "an unknown command")
        except ModelError:
            command = "an unknown command: the file cannot be read"
        if not instead_of or command != instead_of:
            raise ConfigurationError(
                f"{path} holds a head set already (of {command}). Replace it with --overwrite, or name another file "
                "with --out."
            )
    return path
