"""Shared parts of the commands: options, output, errors."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import check_choice
from ..chunks.context import CONTEXT_NAMES
from ..errors import CacheClipError, ConfigurationError, DocumentError, StoreError, UnknownModelError
from ..runtime.base import DTYPES

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "AuxiliaryDeviceOption",
    "AuxiliaryOption",
    "BackendOption",
    "ChunkContextOption",
    "DeviceOption",
    "DtypeOption",
    "EmbeddingOption",
    "ExistingStoreOption",
    "FinishOption",
    "JsonOption",
    "MinConfidenceOption",
    "NamespaceOption",
    "PrimaryOption",
    "RatioOption",
    "RequireCertificateOption",
    "StoreOption",
    "VLLMOption",
    "VariantsOption",
    "check_folder",
    "existing_store",
    "format_bytes",
    "guarded",
    "no_store",
    "number_or_name",
    "output",
    "print_json",
    "print_tables",
    "stoppable",
    "vllm_options",
]


def _checked_model(name: str | None) -> str | None:
    """Refuse a name that no model can have before anything is imported or loaded."""
    if name is not None and name != "none":
        from ..models.load import check_name

        check_name(name)
    return name


def existing_store(store: str) -> str:
    """Refuse a folder that does not exist, before anything is imported or loaded."""
    if not Path(store).expanduser().is_dir():
        raise no_store(store)
    return store


def no_store(store: str) -> StoreError:
    """The error about a folder that holds no store."""
    return StoreError(
        f"there is no store at {store}. Give the folder that ingest or the engine used, or make one: cacheclip "
        f"ingest PATH --store {store}"
    )


def _one_of(name: str, allowed: Sequence[str]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None:
            check_choice(name, value, allowed)
        return value

    return check


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
StoreOption = Annotated[str, typer.Option("--store", help="Folder of chunk caches and documents.")]
ExistingStoreOption = Annotated[
    str, typer.Option("--store", callback=existing_store, help="Folder of chunk caches and documents.")
]
PrimaryOption = Annotated[
    str | None,
    typer.Option("--primary", callback=_checked_model, help="Model that answers: folder, packaged name, hub id."),
]
AuxiliaryOption = Annotated[
    str | None,
    typer.Option("--auxiliary", callback=_checked_model, help="Small model that scores tokens; 'none' for none."),
]
AuxiliaryDeviceOption = Annotated[str | None, typer.Option(help="Device of the auxiliary model. [default: --device]")]
EmbeddingOption = Annotated[
    str | None,
    typer.Option("--embedding", callback=_checked_model, help="sentence-transformers model for retrieval."),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", callback=_one_of("dtype", DTYPES), help="float32, bfloat16 or float16.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1; auto spreads the layers.")]
ChunkContextOption = Annotated[
    str | None,
    typer.Option(
        "--chunk-context",
        callback=_one_of("chunk_context", CONTEXT_NAMES),
        help="What each chunk is precomputed after: 'prefix', 'passages', 'trained' or 'auto'. [default: auto: "
        "'trained' if the primary has a trained context, else 'passages']",
    ),
]
RatioOption = Annotated[
    float | None, typer.Option("--ratio", help="Share of chunk tokens to recompute, 0 to 1. [default: the method's]")
]
MinConfidenceOption = Annotated[
    str | None,
    typer.Option(
        "--min-confidence",
        help="Prefill in full if the two likeliest first tokens differ less in probability, 0 to 1; auto: the "
        "certificate's value.",
    ),
]
FinishOption = Annotated[
    str,
    typer.Option(
        "--finish",
        help="Full prefill while the answer is shown: none, verify (compares it), revise (corrects it).",
    ),
]
RequireCertificateOption = Annotated[
    bool,
    typer.Option("--require-certificate", help="Refuse models that 'cacheclip certify' has not found faithful."),
]
VariantsOption = Annotated[
    Path | None,
    typer.Option("--variants", help="TOML file of methods by name: each a preset with changed settings."),
]
BACKENDS = ("transformers", "vllm")
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        callback=_one_of("backend", BACKENDS),
        help="What runs the primary: transformers in this process, or vllm.",
    ),
]
VLLMOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vllm", metavar="NAME=VALUE", help="Argument of vLLM's LLM, such as tensor_parallel_size=2; may be repeated."
    ),
]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Tenant; tenants never share chunk caches.")]

_USAGE_ERRORS = (ConfigurationError, UnknownModelError, DocumentError)


def number_or_name(given: str | None) -> float | str | None:
    """An option's value as a number, if it is one."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def output() -> Console:
    """Console for tables. It is wide if stdout is not a terminal, so that no figure is cut off in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line. Infinity and NaN become null, halves of surrogate pairs question marks."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8") + "\n")


def print_tables(tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]], *lines: str) -> None:
    """Print tables by title, each the titles of its columns and its rows, then lines of text."""
    from rich.table import Table

    out = output()
    for title, (titles, rows) in tables.items():
        printed = Table(title=title)
        for number, each in enumerate(titles):
            is_name = number == 0  # is read whole; figures' titles may take several lines
            printed.add_column(each, justify="left" if is_name else "right", no_wrap=is_name)
        for row in rows:
            printed.add_row(*row)
        out.print(printed)
    for line in lines:
        out.print(line, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_bytes(count: float) -> str:
    """A size as text, such as ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_folder(path: Path | None, of: str) -> None:
    """Raise ConfigurationError if the folder for ``of`` is a file."""
    if path is not None and path.exists() and not path.is_dir():
        raise ConfigurationError(f"expected a folder for {of}, and {path} is a file. Name another.")


def vllm_options(given: Sequence[str] | None, backend: str) -> dict[str, Any]:
    """``--vllm NAME=VALUE`` as arguments. A value that is JSON is read as such, any other is text.

    Raises:
        ConfigurationError: no ``=``, or another backend.
    """
    if given and backend != "vllm":
        raise ConfigurationError(f"--vllm is for --backend vllm, and the backend is {backend}. Leave one out.")
    found: dict[str, Any] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise ConfigurationError(f"--vllm must be NAME=VALUE, got {each!r}. For instance: max_model_len=4096.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = {"True": True, "False": False}.get(value, value)
    return found


@contextmanager
def stoppable(folder: Path | None = None) -> Iterator[None]:
    """On Ctrl-C, print one line about kept work, and exit with code 130.

    Args:
        folder: where the work is kept; None: where the interrupted job says, if it says so.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        folder = folder or getattr(stop, "folder", None)  # of an Interrupted
        kept = (
            "This run saved no work."
            if folder is None
            else f"The work so far is saved in {folder}; the same command continues from there."
        )
        typer.echo(f"cacheclip: stopped. {kept}", err=True)
        raise typer.Exit(130) from None


def guarded(run: Callable[[], None]) -> None:
    """Run a command. Errors of this library become one line on stderr, with exit code 2 for bad usage and 1 for
    others."""
    try:
        run()
    except CacheClipError as error:
        sys.stderr.write(f"cacheclip: {error}\n")
        raise SystemExit(2 if isinstance(error, _USAGE_ERRORS) else 1) from None
