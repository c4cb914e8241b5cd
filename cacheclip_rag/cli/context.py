"""``cacheclip train-context``: learn the KV after which chunks of a primary model are precomputed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from .common import (
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
    from ..lab.training.context import ContextTraining


def train_context(
    primary: PrimaryOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Files to learn from besides synthetic texts: records as JSON lines, or documents."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training. [default: 160]")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts per step. [default: 4]")] = None,
    held_out: Annotated[int | None, typer.Option(help="Prompts of the check. [default: 24]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command continues. [default: no limit]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the trained context. [default: where engines with this model look]")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Folder from which an interrupted run continues.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write the context even if it is not better.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Learn what chunks of the primary are precomputed after, so that answers come closer to full prefill. The model
    stays unchanged. Engines with this model and chunk context 'auto' then use it. An interrupted run continues where it
    stopped."""
    from ..chunks.trained import TrainedContext
    from ..config import EngineConfig
    from ..lab.training.context import ContextSettings
    from ..lab.training.context import train_context as run
    from .settings import DEFAULT_SETTINGS

    check_folder(work, "working files")
    name, dtype = primary or DEFAULT_SETTINGS.primary, dtype or DEFAULT_SETTINGS.dtype
    config = EngineConfig(primary=name, auxiliary=None, dtype=dtype, device=device)
    given = {"steps": steps, "batch": batch, "held_out": held_out, "seed": seed}
    settings = ContextSettings(**{name: value for name, value in given.items() if value is not None})
    path = _target(config, out)
    rival = None if overwrite or not path.exists() else TrainedContext.load(path)
    with stoppable():
        found = run(config, settings, data=data or (), folder=work, minutes=minutes, rival=rival)
    is_in_use = rival is not None and found.context is not None and found.context.sha256 == rival.sha256
    kept = found.context is not None and (found.is_better or is_in_use or overwrite)
    if kept and found.context is not None:
        found.context.save(path)
    if as_json:
        from ..lab.training.report import context_json

        print_json({**context_json(found), "path": str(path) if kept else None})
    else:
        _print(found, path if kept else None, is_used=out is None)


def _print(found: ContextTraining, path: Path | None, *, is_used: bool) -> None:
    from ..lab.training.report import context_table, context_verdict

    if found.context is None:
        print_tables(
            {},
            f"Stopped after {found.step} of {found.steps} steps. The work so far is saved in {found.folder}; the same "
            "command continues from there.",
        )
        return
    lines = [f"Trained context: {path}"]
    if is_used:
        lines.append(
            "New engines with this model and chunk context 'auto' use it. Encode a store again with: cacheclip ingest "
            "--upgrade --store DIR (add --chunk-context auto if the store was made with another)."
        )
    else:
        lines.append("No engine looks there: copy it to the model's folder as cacheclip-context.st to use it.")
    if path is None:
        lines = ["It was not kept. Write it with --overwrite; nothing is computed twice."]
    print_tables({"Distance from full prefill": context_table(found)}, context_verdict(found), *lines)


def _target(config: EngineConfig, out: Path | None) -> Path:
    """Path of the new context: ``out``, or the path where engines with this model look."""
    from ..chunks.trained import trained_context_path
    from ..engine import CacheClipEngine
    from ..lab.models import transformers_model
    from ..runtime.base import weights_digest

    primary = transformers_model(CacheClipEngine(config).primary)
    path = out or trained_context_path(weights_digest(primary.fingerprint))
    if path.is_dir():
        raise ConfigurationError(f"a trained context is a file, but {path} is a folder. Name a file with --out.")
    return path
