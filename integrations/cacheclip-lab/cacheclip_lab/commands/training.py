"""``cacheclip finetune``: makes a head set for a pair of models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, print_json

from .common import measured
from .tables import FinetuneTable

if TYPE_CHECKING:
    from cacheclip_rag import EngineConfig


@engine_options("primary", "auxiliary", "dtype", "device")
def finetune(
    settings: CommandSettings,
    out: Annotated[
        Path | None, typer.Option(show_default="where engines with these models look", help="File of the head set.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the head set that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fit the heads of the auxiliary model to the tokens that the primary attends to and that are stale. Engines with
    these models then use them; ``cacheclip eval`` says what they are worth."""
    from ..evaluation.questions import INSTRUCTION
    from ..training.finetune import finetune as run

    table, config = settings.table(FinetuneTable), measured(settings, recompute_ratio=None, system_prompt=INSTRUCTION)
    path = _target(config, out)
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"there is a head set in {path}. Replace it with --overwrite, or name another file with --out and compare "
            "the two with cacheclip eval."
        )
    started = time.perf_counter()
    found = run(config, num_samples=table.samples, num_targets=table.targets, seed=table.seed)
    found.save(path)
    if as_json:
        seconds = time.perf_counter() - started
        print_json({"digest": found.digest(), "about": found.about, "seconds": seconds, "path": str(path)})
    else:
        typer.echo(f"Head set: {path}")


def _target(config: EngineConfig, out: Path | None) -> Path:
    """Path of the new head set: ``out``, or the path where engines with these models look."""
    from cacheclip_rag.measuring import auxiliary_caches
    from cacheclip_rag.models import weights_digest
    from cacheclip_rag.selection import head_set_path

    from ..training.finetune import open_engine

    engine = open_engine(config)
    auxiliary, primary = (
        weights_digest(each.fingerprint) for each in (auxiliary_caches(engine).runtime, engine.primary)
    )
    path = out or head_set_path(auxiliary, primary)
    if path.is_dir():
        raise ConfigurationError(f"a head set is a file, but {path} is a folder. Name a file with --out.")
    return path
