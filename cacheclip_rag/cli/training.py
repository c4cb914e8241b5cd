"""``cacheclip calibrate`` and ``cacheclip finetune``: make a head set for a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigurationError, ModelError
from .common import JsonOption, check_folder, print_json, print_tables, stoppable
from .options import CommandSettings, engine_options
from .tables import CalibrateTable, FinetuneTable

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..lab.training.given import UserSamples

DataOption = Annotated[
    list[str] | None,
    typer.Option(help="Training files besides the synthetic questions: records as JSON lines, or documents."),
]
OutOption = Annotated[
    Path | None, typer.Option(show_default="where engines with these models look", help="File of the head set.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing head set.")]
WorkOption = Annotated[Path | None, typer.Option(help="Folder from which an interrupted run continues.")]


@engine_options("primary", "auxiliary", "dtype", "device")
def calibrate(
    settings: CommandSettings,
    data: DataOption = None,
    out: OutOption = None,
    work: WorkOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the heads of the auxiliary model that attend to evidence. Engines with these models then use them. An
    interrupted run continues where it stopped."""
    from ..lab.evaluation.questions import INSTRUCTION
    from ..lab.training.calibrate import calibrate as run
    from ..lab.training.report import calibration_json, calibration_note, calibration_table, ranking_tables

    check_folder(work, "working files")
    table, config = settings.table(CalibrateTable), settings.measured(recompute_ratio=None, system_prompt=INSTRUCTION)
    path = _target(config, out, overwrite)
    with stoppable():
        given = _given(config, data, table.data_limit, table.seed, work)
        found = run(
            config,
            num_samples=table.samples,
            num_prompts=table.prompts,
            given=given.samples if given else (),
            seed=table.seed,
            folder=work,
        )
    found.heads.save(path)
    if as_json:
        print_json({**calibration_json(found), "path": str(path)})
    else:
        tables = {**ranking_tables(found), "Heads of the auxiliary model": calibration_table(found)}
        print_tables(tables, calibration_note(found), f"Head set: {path}")


@engine_options("primary", "auxiliary", "dtype", "device")
def finetune(
    settings: CommandSettings,
    data: DataOption = None,
    out: OutOption = None,
    report: Annotated[Path | None, typer.Option(help="Folder for report.md.")] = None,
    work: WorkOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fit the heads of the auxiliary model to the tokens that the primary attends to and that are stale. An interrupted
    run continues where it stopped."""
    from ..lab.evaluation.questions import INSTRUCTION
    from ..lab.training.calibrate import open_engine
    from ..lab.training.finetune import finetune as run
    from ..lab.training.report import (
        finetuning_json,
        finetuning_note,
        finetuning_table,
        finetuning_verdict,
        write_report,
    )
    from ..selection.heads import HeadSet, shipped_set

    check_folder(report, "the report")
    check_folder(work, "working files")
    table, config = settings.table(FinetuneTable), settings.measured(recompute_ratio=None, system_prompt=INSTRUCTION)
    path = _target(config, out, overwrite, instead_of="calibrate")
    rival = HeadSet.load(path) if path.exists() and not overwrite else None
    with stoppable():
        given = _given(config, data, table.data_limit, table.seed, work)
        found = run(
            config,
            num_samples=table.samples,
            num_targets=table.targets,
            num_tests=table.tests,
            num_prompts=table.prompts,
            given=given.samples if given else (),
            given_from=given.files if given else (),
            seed=table.seed,
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
    reports = [str(write_report(found, report))] if report else []
    if as_json:
        print_json({**finetuning_json(found), "path": None if kept else str(path), "reports": reports})
    else:
        tables = {"On families and words never trained on": finetuning_table(found)}
        written = [] if kept else [f"Head set: {path}"]
        print_tables(tables, finetuning_note(found), finetuning_verdict(found), *written)


def _given(
    config: EngineConfig, data: Sequence[str] | None, limit: int, seed: int, work: Path | None
) -> UserSamples | None:
    """Samples from the user's data, with a summary on stderr; None without data. Questions that the primary writes for
    documents are saved in ``work``, by default in a folder that all jobs share."""
    from ..base.paths import cache_home
    from ..lab.training.calibrate import open_engine
    from ..lab.training.given import given_samples

    if limit < 1:
        raise ConfigurationError(f"data_limit must be 1 question or more, got {limit}. Leave out --data for none.")
    if not data:
        return None
    folder = work or cache_home() / "training" / "questions"
    found = given_samples(open_engine(config), data, limit=limit, seed=seed, folder=folder)
    typer.echo(f"--data: learning from {found.summary}; at most {limit} (data_limit).", err=True)
    return found


def _target(config: EngineConfig, out: Path | None, overwrite: bool, *, instead_of: str = "") -> Path:
    """Path of the new head set: ``out``, or the path where engines with these models look. A head set made by the
    command ``instead_of`` may be replaced."""
    from ..lab.models import auxiliary_caches
    from ..lab.training.calibrate import open_engine
    from ..runtime.base import weights_digest
    from ..selection.heads import HeadSet, head_set_path

    engine = open_engine(config)
    auxiliary, primary = (
        weights_digest(each.fingerprint) for each in (auxiliary_caches(engine).runtime, engine.primary)
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
