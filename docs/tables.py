"""Tables that the documentation site makes from the package, so that they cannot fall behind it.

A page asks for one by a line of its own: ``<!-- table: methods -->``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cacheclip_lab.evaluation.submission import read_submissions
from cacheclip_lab.packaged.catalogue import PACKAGED_MODELS
from cacheclip_testing import verdicts

from cacheclip_rag.methods import PRESET_NAMES, PRESET_NOTES, PRESETS, Method

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
MODELS = Path(__file__).with_name("models.toml")
_SHOWN = {"equal_answers": "{:.0%}", "kl_to_full": "{:.3f}", "charged_ratio": "{:.2f}", "speedup_vs_full": "{:.1f}x"}
_PLACE = re.compile(r"^<!-- table: ([\w-]+) -->$", re.MULTILINE)


def methods_table() -> str:
    """One row a preset: what it does, where it comes from, what it needs, when it equals full prefill."""
    rows = [
        (
            f"`{name}`",
            PRESET_NOTES[name].summary,
            PRESET_NOTES[name].source,
            _needs(PRESETS[name]),
            _exact(PRESETS[name]),
        )
        for name in PRESET_NAMES
    ]
    return _table(("name", "what it does", "source", "needs", "equals full prefill"), rows)


def _needs(method: Method) -> str:
    wanted = ((method.needs_auxiliary, "an auxiliary model"), (method.learns, "earlier prompts"))
    return ", ".join(text for is_wanted, text in wanted if is_wanted)


def _exact(method: Method) -> str:
    if not method.reuses_chunks:
        return "always"
    return "at ratio 1.0" if method.has_ratio and method.exact_at_one else "never with several chunks"


def packaged_models_table() -> str:
    """One row a packaged model."""
    rows = [
        (f"`packaged:{m.name}`", m.description, f"{m.num_bytes / 1e6:.0f} MB", m.context_tokens, m.license)
        for m in PACKAGED_MODELS.values()
    ]
    return _table(("name", "model", "download", "context, tokens", "licence"), rows)


def models_table() -> str:
    """One row a model that people run, with the verdict about its classes."""
    models = tomllib.loads(MODELS.read_text(encoding="utf-8"))
    verdict_of = {name: kind for kind, names in _by_verdict().items() for name in names}
    rows = [
        (
            name,
            ", ".join(f"`{each}`" for each in classes),
            "; ".join(dict.fromkeys(verdict_of[each] for each in classes)),
        )
        for name, classes in models.items()
    ]
    return _table(("model", "`model_type`", "verdict"), rows)


def _by_verdict() -> dict[str, list[str]]:
    """Classes of transformers by what ``benchmarks/prove_models.py`` found out about them."""
    kinds: dict[str, list[str]] = {"exact": verdicts()["exact"], "exact, experimental": verdicts()["recurrent"]}
    for name, reason in verdicts()["refused"].items():
        kinds.setdefault(f"refused: {reason}", []).append(name)
    return kinds


def classes_table() -> str:
    """One row a verdict, with all classes that have it."""
    kinds = _by_verdict()
    rows = [(kind, len(names), ", ".join(f"`{name}`" for name in names)) for kind, names in kinds.items()]
    return _table(("verdict", "classes", "`model_type`"), rows[:2] + sorted(rows[2:], key=lambda row: -row[1]))


def results_table() -> str:
    """One row a method of each file of ``benchmarks/results``."""
    columns = ("F1 minus `full`'s", "same answer", "KL", "chunk tokens computed", "sooner")
    head = ("pair", "questions", "method", *columns, "machine")
    rows = []
    for name, one in read_submissions(RESULTS):
        pair = " with ".join(f"`{model}`" for model in (one["primary"], one["auxiliary"]) if model)
        about = f"{pair}, {one['settings']['dtype']}", f"{one['dataset']['n']}, `{name}`"
        for label, row in one["methods"].items():
            if row["method"] != "full":
                figures = _difference(row["difference_to_full"].get("f1")), *map(_figure, _SHOWN, map(row.get, _SHOWN))
                rows.append((*about, f"`{label}`", *figures, "; ".join(one["machines"])))
    return _table(head, rows)


def _figure(name: str, value: float | None) -> str:
    return "" if value is None else _SHOWN[name].format(value)


def _difference(figures: Sequence[float] | None) -> str:
    return "" if figures is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*figures)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "packaged-models": packaged_models_table,
    "models": models_table,
    "classes": classes_table,
    "results": results_table,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return _PLACE.sub(lambda place: TABLES[place[1]](), markdown)
