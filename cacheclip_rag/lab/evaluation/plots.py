"""Plots quality against the time to the first token, with matplotlib, as one PNG."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import Any

from ...base.errors import MissingExtraError
from .tables import number_text, score_title

_COLOURS = (
    "#0072b2",
    "#c04e00",
    "#00795a",
    "#a8427f",
    "#7a6300",
    "#5b4fc4",
    "#8c1d1d",
    "#4a6b00",
    "#00616f",
    "#84502a",
)
"""Colours of the methods: after Okabe and Ito, darkened for contrast."""
_MARKERS = ("o", "s", "D", "^")
_KL_FLOOR = 1e-7
"""KL below this is rounding of float32 logits. It is drawn as 0, so that it does not stretch the axis."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run in a plot."""

    x: float
    """Median time to the first token, seconds."""
    y: float
    label: str
    """Recompute ratio; the run's name if it has none."""


def curves(summary: dict[str, Any], key: str) -> dict[str, list[Point]]:
    """The runs that have the figure ``key``, by method, by increasing ratio."""
    rows = {label: row for label, row in summary["methods"].items() if None not in (row["ttft_s"], row[key])}
    found: dict[str, list[Point]] = {}
    for method in dict.fromkeys(row["method"] for row in rows.values()):
        own = [(label, row) for label, row in rows.items() if row["method"] == method]
        own.sort(key=lambda pair: -1.0 if pair[1]["ratio"] is None else pair[1]["ratio"])
        found[method] = [
            Point(row["ttft_s"], row[key], label if row["ratio"] is None else number_text(row["ratio"]))
            for label, row in own
        ]
    return found


def to_png(summary: dict[str, Any]) -> bytes | None:
    """KL to full prefill and each of the questions' own scores against the time to the first token, side by side, as a
    PNG file, without touching pyplot's global state; None if no run has a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    keys = [key for key in ("kl_to_full", *summary["own_scores"]) if set(curves(summary, key)) - {"full"}]
    if not keys:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib (for the picture of a report)", "lab") from error
    methods = list(dict.fromkeys(method for key in keys for method in curves(summary, key)))
    columns = max(1, int(6.0 * len(keys) / (0.7 + 0.075 * max(map(len, methods)))))  # as many as there is width for
    rows = math.ceil(len(methods) / columns)
    figure = Figure(figsize=(6.0 * len(keys), 4.0 + 0.25 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    legend: dict[str, Any] = {}
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        _draw(axes, curves(summary, key), methods, key)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    # below the plots: within them it would hide points
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=columns, fontsize=9)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing")  # a name in a script that its font lacks
        figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Any, found: dict[str, list[Point]], methods: list[str], key: str) -> None:
    """One plot. Full prefill is a dashed line: of its score, or, where its KL of 0 is no news, of its time."""
    is_kl = key == "kl_to_full"
    for method, points in found.items():
        if method == "full":
            line = axes.axvline if is_kl else axes.axhline
            line(points[0].x if is_kl else points[0].y, color="#555555", linestyle="--", label="full")
            continue
        number = methods.index(method)
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
        ys = [0.0 if is_kl and point.y <= _KL_FLOOR else point.y for point in points]
        axes.plot([p.x for p in points], ys, color=colour, marker=marker, label=_verbatim(method), clip_on=False)
        for point, y in zip(points, ys, strict=True):
            placement = {"xytext": (0, (6, -13)[number % 2]), "textcoords": "offset points", "ha": "center"}
            axes.annotate(_verbatim(point.label), (point.x, y), fontsize=8, color=colour, **placement)
    title = "KL to full prefill (nats a token)" if is_kl else score_title(key)
    axes.margins(y=0.1)  # room for the labels
    if is_kl:
        positive = [p.y for method, own in found.items() if method != "full" for p in own if p.y > _KL_FLOOR]
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(positive, default=1.0))), linscale=0.5)
        axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    axes.set(xlabel="time to the first token (s, median)", ylabel=title, title=f"{title} against time")
    axes.grid(alpha=0.3)


def _verbatim(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")
