"""Shared parts of the commands: options, printing, errors."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.checks import check_choice
from ..base.errors import CacheClipError, ConfigurationError, DocumentError, UnknownModelError
from ..base.urls import shown_url
from .options import existing_store

if TYPE_CHECKING:
    from ..store import StoreKind

BACKENDS = ("transformers", "vllm")
"""What runs the primary: values of ``--backend``."""


def check_backend(name: str) -> str:
    """The name, unless it is none of :data:`BACKENDS`.

    Raises:
        ConfigurationError: it is none of them.
    """
    check_choice("backend", name, BACKENDS)
    return name


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
ExistingStoreOption = Annotated[
    str, typer.Option("--store", callback=existing_store, help="Folder of chunk caches and documents.")
]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Tenant; tenants never share chunk caches.")]

_USAGE_ERRORS = (ConfigurationError, UnknownModelError, DocumentError)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line, its ``store`` without a password. Infinity and NaN become null, halves of
    surrogate pairs question marks."""
    if "store" in value:
        value = {**value, "store": shown_url(value["store"])}
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8") + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_names(title: str, names: Sequence[object], *, err: bool = False) -> None:
    """Print a line for each name, up to 20."""
    for name in names[:20]:
        typer.echo(f"{title}: {name}", err=err)
    if len(names) > 20:
        typer.echo(f"{title}: and {len(names) - 20} more (all of them: --json)", err=err)


def look_after(store: str, run: Callable[[StoreKind], dict[str, Any]], as_json: bool) -> dict[str, Any]:
    """Show what was done in a shared store, also where some tenants could not be looked after."""
    from ..store import TenantsError, store_kind

    try:
        done = run(store_kind(store))
    except TenantsError as error:
        show_done({"store": store, **error.found}, as_json)
        raise
    show_done({"store": store, **done}, as_json)
    return done


def show_done(done: dict[str, Any], as_json: bool) -> None:
    """What was done in a shared store."""
    if as_json:
        print_json(done)
        return
    for name, value in {**done, "store": shown_url(done["store"])}.items():
        if isinstance(value, list):
            print_names(name, value)
        elif not isinstance(value, dict):
            typer.echo(f"{name.replace('_', ' '):<15}{format_bytes(value) if name == 'bytes' else value}")


def format_bytes(count: float) -> str:
    """A size as text, such as ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_bytes(text: str | int) -> int:
    """A size as a number of bytes, or as text such as ``8GiB`` or ``500 MB``.

    Raises:
        typer.BadParameter: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"expected a size such as 8GiB, 500MB or a number of bytes, got {text!r}.")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit) + 1)) if unit else int(float(number))


def guarded(run: Callable[[], None]) -> None:
    """Run a command. Errors of this library become one line on stderr, with exit code 2 for bad usage and 1 for
    others."""
    try:
        run()
    except CacheClipError as error:
        sys.stderr.write(f"cacheclip: {error}\n")
        raise SystemExit(2 if isinstance(error, _USAGE_ERRORS) else 1) from None
