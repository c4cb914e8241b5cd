"""``cacheclip finetune``: makes a head set for a pair of models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigurationError, ModelError
from .common import JsonOption, print_json, print_tables
from .options import CommandSettings, engine_options
from .tables import FinetuneTable

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..selection.heads import HeadSet


@engine_options("primary", "auxiliary", "dtype", "device")
def finetune(
    settings: CommandSettings,
    out: Annotated[
        Path | None, typer.Option(show_default="where engines with these models look", help="File of the head set.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the head set that is there, whatever the test says.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fit the heads of the auxiliary model to the tokens that the primary attends to and that are stale, and test them.
    Engines with these models then use them."""
    from ..lab.evaluation.questions import INSTRUCTION
    from ..lab.training.finetune import finetune as run
    from ..lab.training.finetune import open_engine
    from ..lab.training.report import finetuning_json, finetuning_note, finetuning_table, finetuning_verdict
    from ..selection.heads import shipped_set

    table, config = settings.table(FinetuneTable), settings.measured(recompute_ratio=None, system_prompt=INSTRUCTION)
    path = _target(config, out)
    rival = _head_set(path) if path.exists() and not overwrite else None
    found = run(
        config,
        num_samples=table.samples,
        num_targets=table.targets,
        num_prompts=table.prompts,
        seed=table.seed,
        rival=rival,
    )
    in_use = path.exists() or bool(out is None and shipped_set(open_engine(config).auxiliary))
    is_refused = in_use and not overwrite and not found.is_accepted
    written = path.with_name(f"{path.stem}.refused{path.suffix}") if is_refused else path
    found.heads.save(written)
    if is_refused:
        current = f"the head set in {path}" if path.exists() else "the head set that comes with the package"
        typer.echo(f"The new head set was not accepted; engines keep using {current}.", err=True)
    if as_json:
        print_json({**finetuning_json(found), "path": None if is_refused else str(path)})
    else:
        tables = {"On questions of other kinds, with words never trained on": finetuning_table(found)}
        print_tables(tables, finetuning_note(found), finetuning_verdict(found), f"Head set: {written}")


def _head_set(path: Path) -> HeadSet:
    """The head set that a new one would replace."""
    from ..selection.heads import HeadSet

    try:
        return HeadSet.load(path)
    except ModelError as error:
        raise ConfigurationError(f"{error} Replace it with --overwrite, or name another file with --out.") from error


def _target(config: EngineConfig, out: Path | None) -> Path:
    """Path of the new head set: ``out``, or the path where engines with these models look."""
    from ..lab.models import auxiliary_caches
    from ..lab.training.finetune import open_engine
    from ..runtime.base import weights_digest
    from ..selection.heads import head_set_path

    engine = open_engine(config)
    auxiliary, primary = (
        weights_digest(each.fingerprint) for each in (auxiliary_caches(engine).runtime, engine.primary)
    )
    path = out or head_set_path(auxiliary, primary)
    if path.is_dir():
        raise ConfigurationError(f"a head set is a file, but {path} is a folder. Name a file with --out.")
    return path
