"""``cacheclip demo``: what reuse gains, on documents of its own."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheclip_rag import MissingExtraError
from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, print_json

from .common import measured, print_tables

PAIR = {"primary": "packaged:qwen2.5-coder-0.5b", "auxiliary": "packaged:smollm2-135m"}
"""From the package index, so that no model hub is needed."""


@engine_options()
def demo(
    settings: CommandSettings,
    primary: Annotated[str | None, typer.Option(help="Model that answers.", show_default=PAIR["primary"])] = None,
    inspect: Annotated[
        Path | None, typer.Option(help="Write, and open, a page that shows how the last answer came about.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask three questions about six documents that come with it, with full prefill and with stored KV, and show a table
    of speeds. Unless others are named, the models come from the package index, 590 MB once: Qwen2.5-Coder-0.5B and
    SmolLM2-135M."""
    from ..demonstration import QUESTIONS, demonstrate

    typed = {"primary": primary} if primary else {}
    config = measured(settings, **{name: value for name, value in PAIR.items() if name not in settings.engine} | typed)
    write = None
    if inspect is not None:
        try:
            from cacheclip_serve import page_writer
        except ModuleNotFoundError as error:
            raise MissingExtraError("--inspect", "serve") from error
        write = page_writer(inspect, model=config.primary)
    if not as_json:
        typer.echo(
            f"Models: {config.primary} answers, {config.auxiliary} chooses tokens. Fetched once, then loaded ..."
        )
    for step in demonstrate(config, write):
        if as_json and step["step"] == "table" and step["questions"] == len(QUESTIONS):
            print_json({"primary": config.primary, "auxiliary": config.auxiliary, **step})
        elif not as_json:
            _show(step, f"{config.primary} + {config.auxiliary}")
    if inspect is not None and not as_json:
        typer.echo(f"How the last answer came about: {inspect.resolve().as_uri()}")
        if sys.stdout.isatty():
            webbrowser.open(inspect.resolve().as_uri())


def _show(step: dict[str, Any], models: str) -> None:
    seconds = f"[{step['seconds']:4.0f} s]"
    if step["step"] == "loaded":
        typer.echo(f"{seconds} loaded. Now the documents run once through both models, and their KV is stored ...")
    elif step["step"] == "stored":
        typer.echo(f"{seconds} {step['documents']} documents stored. Now three questions, each over all of them ...")
    elif step["step"] == "answered":
        typer.echo(f"{seconds} {step['question']}")
        for answer in step["methods"].values():
            typer.echo(f"  {answer['method']:<10} first token after {answer['ttft_s']:6.2f} s  {answer['text']}")
    else:
        titles = ("method", "first token s", "sooner", "prompt tokens", "reused", "recomputed", "same answer as full")
        rows = [
            (
                row["method"],
                f"{row['ttft_s']:.2f}",
                f"{row['sooner']:.1f}x",
                *(f"{row[name]:.0f}" for name in ("prompt_tokens", "reused_tokens", "recomputed_tokens")),
                f"{row['same_answers']:.0f} of {step['questions']}",
            )
            for row in step["methods"].values()
        ]
        of = "the first question" if step["questions"] == 1 else f"medians of {step['questions']} questions"
        print_tables({f"{models} ({of})": (titles, rows)})
