"""``cacheclip doctor``: what recorded requests would gain from a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import JsonOption, check_number, print_json, progress_bar

from .common import print_tables

T = TypeVar("T")


def doctor(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Files of recorded requests: JSON lines, or a server's log that holds them."),
    ],
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Speed of prefill on your machine; cacheclip profile measures it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer counts tokens. Default: four characters are a token.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a figure to this file.")] = None,
    record: Annotated[
        str | None, typer.Option(help="URL of a server: run a proxy in front of it, which writes requests to the file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what of recorded requests an exact prefix cache serves, where prefixes break, and what this package would
    add. Needs no model. Each request counts what stood in those before it, of the same files."""
    if record is not None:
        _record(logs, record)
        return
    if tokens_per_second is not None:
        check_number("--tokens-per-second", tokens_per_second, "above 0", above=0.0, most=float("inf"))

    from ..doctor.report import TEXTS, Report, chars_per_token, to_html
    from ..doctor.requests import RequestLog
    from ..doctor.reuse import CHARS_PER_TOKEN, measured

    tokenize = None if tokenizer is None else _tokenizer(tokenizer)
    log = RequestLog(logs)
    prompts = _with_progress("reading requests", log.prompts(), None)
    reuses = _with_progress("comparing prompts", measured(prompts), len(prompts))
    chars = CHARS_PER_TOKEN if tokenize is None else chars_per_token((each.text for each in prompts), tokenize)
    report = Report.of(
        prompts, reuses, tokens_per_second=tokens_per_second, unreadable=log.unreadable, chars_per_token=chars
    )
    if html is not None:
        _write(html, to_html(report, reuses))
    if as_json:
        print_json(report.to_dict())
        return
    left = [f"{report.unreadable:,} lines hold no request."] if report.unreadable else []
    print_tables(report.tables(), *report.meanings(), *left, report.verdict(), texts=TEXTS)


def _with_progress(title: str, items: Iterable[T], total: int | None) -> list[T]:
    done = list[T]()
    with progress_bar(title, total, "requests") as advance:
        for item in items:
            done.append(item)
            advance(len(done))
    return done


def _tokenizer(model: str) -> Callable[[str], list[int]]:
    from cacheclip_rag.models import loader_of  # it loads torch

    tokenize = loader_of(model).tokenizer()
    if tokenize is None:
        raise ConfigurationError(f"{model} has no tokenizer without its weights. Name a model of transformers.")
    return tokenize


def _write(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}. Name another file.") from error


def _record(files: Sequence[Path], target: str) -> None:
    if len(files) != 1:
        raise ConfigurationError(f"expected one file to write requests to, got {len(files)}.")

    from ..doctor.proxy import proxy

    with proxy(files[0], target) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        typer.echo(f"Recording to {files[0]}. Let clients ask {address}, not {target}; Ctrl+C ends it.", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo(f"cacheclip doctor {files[0]} says what it holds.", err=True)
