"""Plots quality against the time to the first token, with matplotlib, as one PNG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import MissingExtraError
from .tables import number_text, score_title

__all__ = ["Plot", "Point", "Series", "look", "plots", "to_png"]

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
_LINES = ("-", "--", ":", "-.")
_MOST_ACROSS = 3
"""Plots in one row of the picture."""
_KL_FLOOR = 1e-7
"""KL below this is rounding of float32 logits. It is drawn as 0 at the bottom, so that it does not stretch the axis."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    """Time to the first token, seconds."""
    y: float
    label: str
    """Recompute ratio (the run's name if several runs of a method have the same ratio), or ``min_confidence``."""
    run: str


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one method, by increasing ratio; or one run with several confidence gates."""

    method: str
    """Its name in the legend."""
    points: list[Point]
    joined: bool
    """Whether a line connects the runs. False if ratios repeat, because the runs then differ in other settings."""


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    """Series of all methods except full prefill."""
    full: Point | None
    """Full prefill, a dashed line: horizontal, or vertical on a logarithmic axis, which cannot show its 0."""
    log: bool
    x_ticks: list[float]
    """Ticks of the y axis; the axis ends at the first and the last."""
    y_ticks: list[float]
    zero: float | None
    """Where 0 is drawn on a logarithmic axis, the first of ``y_ticks``; None if no point needs it."""


def plots(summary: dict[str, Any]) -> list[Plot]:
    """Plots of KL to full prefill and of the questions' scores against the median TTFT, if there are figures; and of
    equal answers and scores against the mean TTFT with confidence gates, if a gate would have looked at the answers."""
    made = [_plot(summary, "kl_to_full", "KL to full prefill", "KL (nats a token, log)", log=True)]
    for score in summary["own_scores"]:
        made.append(_plot(summary, score, score_title(score), score_title(score), log=False))
    made.append(_gate_plot(summary, "Equal answers", lambda gate: gate["equal_answers"]))
    for score in summary["own_scores"]:
        made.append(
            _gate_plot(summary, f"{score_title(score)} / full", lambda gate, name=score: _share(gate, name))  # type: ignore[misc]
        )
    return [plot for plot in made if plot is not None]


def _share(gate: dict[str, Any], score: str) -> float | None:
    found = gate["share_of_full"].get(score)
    return None if found is None else float(found[0])


def _gate_plot(summary: dict[str, Any], title: str, y_of: Callable[[dict[str, Any]], float | None]) -> Plot | None:
    """A line through the runs of each method without a gate, and a line for each run with rising ``min_confidence``."""
    rows = {label: row for label, row in summary["methods"].items() if row["gate"]}
    plain: dict[str, list[Point]] = {}
    series, full_s = [], None
    for label, row in rows.items():
        points = [
            Point(gate["mean_ttft_s"], y, number_text(gate["min_confidence"]), label)
            for gate in row["gate"]
            if (y := y_of(gate)) is not None
        ]
        if not points:
            continue
        without = row["gate"][0]
        if without["speedup_of_means"] is not None:
            full_s = without["speedup_of_means"] * without["mean_ttft_s"]
        ratio = label if row["ratio"] is None else number_text(row["ratio"])
        plain.setdefault(row["method"], []).append(replace(points[0], label=ratio))
        series.append(Series(f"{label} with min_confidence", points, joined=True))
    if not series:
        return None
    series = [*(Series(method, sorted(at, key=lambda p: p.x), joined=True) for method, at in plain.items()), *series]
    values = [point.y for one in series for point in one.points] + [1.0]
    x_ticks = linear_ticks(0.0, max([point.x for one in series for point in one.points] + ([full_s] if full_s else [])))
    full = None if full_s is None else Point(full_s, 1.0, "full", "full")
    return Plot(
        f"{title}, with and without a confidence gate",
        "time to the first token (s, mean)",
        title,
        series,
        full,
        False,
        x_ticks,
        linear_ticks(min(values), max(values)),
        None,
    )


def _plot(summary: dict[str, Any], key: str, title: str, y_label: str, *, log: bool) -> Plot | None:
    rows = {label: row for label, row in summary["methods"].items() if row["ttft_s"] is not None}
    methods = dict.fromkeys(row["method"] for row in rows.values() if row["method"] != "full")
    series = [one for method in methods if (one := _series(method, rows, key)).points]
    full = next((_point(label, row, key, log) for label, row in rows.items() if row["method"] == "full"), None)
    points = [point for one in series for point in one.points]
    if not points:
        return None
    x_ticks = linear_ticks(0.0, max(point.x for point in [*points, *([full] if full else [])]))
    title, x_label = f"{title} against time to the first token", "time to the first token (s, median)"
    if log:
        positive = [point.y for point in points if point.y > _KL_FLOOR]
        y_ticks = _log_ticks(positive, with_zero=len(positive) < len(points))
        zero = y_ticks[0] if len(positive) < len(points) else None
        return Plot(title, x_label, y_label, series, full, log, x_ticks, y_ticks, zero)
    values = [point.y for point in [*points, *([full] if full else [])]]
    return Plot(title, x_label, y_label, series, full, log, x_ticks, linear_ticks(min(values), max(values)), None)


def _series(method: str, rows: dict[str, dict[str, Any]], key: str) -> Series:
    own = [(label, row) for label, row in rows.items() if row["method"] == method and row[key] is not None]
    ratios = [row["ratio"] for _, row in own]
    distinct = len(set(ratios)) == len(ratios)
    own.sort(key=lambda pair: pair[1]["ratio"] if pair[1]["ratio"] is not None else -1.0)
    points = [
        Point(
            row["ttft_s"],
            row[key],
            number_text(row["ratio"]) if distinct and row["ratio"] is not None else label,
            label,
        )
        for label, row in own
    ]
    return Series(method, points, distinct)


def _point(label: str, row: dict[str, Any], key: str, log: bool) -> Point | None:
    value = 0.0 if log else row[key]
    return None if value is None else Point(row["ttft_s"], value, label, label)


def look(number: int) -> tuple[int, int, int]:
    """Indices of colour, marker and line style of a series. Colours repeat with other markers and styles, so that the
    first 160 methods differ."""
    again = number // len(_COLOURS)
    return number % len(_COLOURS), again % len(_MARKERS), (again + again // len(_MARKERS)) % len(_LINES)


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers in equal steps, at least four of them, from at most ``low`` to at least ``high``."""
    span = high - low or abs(high) or 1.0
    step = _decade(span / 4)
    step *= max(factor for factor in (1, 2, 5) if factor * step <= span / 4 * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]


def _log_ticks(positive: list[float], *, with_zero: bool) -> list[float]:
    """Powers of ten around the values, and one below them for 0."""
    low = math.floor(math.log10(min(positive, default=1.0)))
    high = max(math.ceil(math.log10(max(positive, default=1.0))), low + 1)
    return [10.0**n for n in range(low - with_zero, high + 1)]


def _decade(value: float) -> float:
    return float(10.0 ** math.floor(math.log10(value) + 1e-9))


def tick_text(plot: Plot, tick: float) -> str:
    """Label of a tick of the y axis."""
    return "0" if tick == plot.zero else f"{tick:g}"


def _shown(plot: Plot, point: Point) -> float:
    return plot.zero if plot.zero is not None and point.y <= _KL_FLOOR else point.y


def to_png(summary: dict[str, Any]) -> bytes | None:
    """The plots side by side as a PNG file, without touching pyplot's global state; None if there is nothing to plot.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    made = plots(summary)
    if not made:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib (for the picture of a report)", "lab") from error
    methods = {series.method for plot in made for series in plot.series}
    across = len(made) if len(made) <= _MOST_ACROSS else math.ceil(len(made) / 2)
    down = math.ceil(len(made) / across)
    columns = max(1, int(6.0 * across / (0.7 + 0.075 * max(map(len, methods)))))  # as many as there is width for
    rows = math.ceil((len(methods) + 1) / columns)
    figure = Figure(figsize=(6.0 * across, 4.0 * down + 0.25 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    drawn: dict[str, Any] = {}
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[len(made) :]:
        axes.remove()
    for axes, plot in zip(grid, made, strict=False):
        _draw(axes, plot)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    # below the plots: within them it would hide points
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=columns, fontsize=9)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing")  # a name in a script that its font lacks
        figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Any, plot: Plot) -> None:
    for number, series in enumerate(plot.series):
        xs, ys = [point.x for point in series.points], [_shown(plot, point) for point in series.points]
        colour, marker, line = look(number)
        style = _LINES[line] if series.joined else ""
        drawn = {"marker": _MARKERS[marker], "color": _COLOURS[colour], "clip_on": False}
        axes.plot(xs, ys, linestyle=style, label=_verbatim(series.method), **drawn)
        for x, y, point in zip(xs, ys, series.points, strict=True):
            placement = {"xytext": (0, (6, -13)[number % 2]), "textcoords": "offset points", "ha": "center"}
            axes.annotate(_verbatim(point.label), (x, y), fontsize=8, color=drawn["color"], **placement)
    if plot.full is not None:
        dashed = {"color": "#555555", "linestyle": "--", "label": "full"}
        if plot.log:
            axes.axvline(plot.full.x, **dashed)
        else:
            axes.axhline(plot.full.y, **dashed)
            axes.plot([plot.full.x], [plot.full.y], "D", color="#555555", clip_on=False)
    if plot.log:
        axes.set_yscale("log")
        axes.minorticks_off()
    axes.set_xticks(plot.x_ticks)
    axes.set_yticks(plot.y_ticks, [tick_text(plot, tick) for tick in plot.y_ticks])
    axes.set(xlim=(plot.x_ticks[0], plot.x_ticks[-1]), ylim=(plot.y_ticks[0], plot.y_ticks[-1]))
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title=plot.title)
    axes.grid(alpha=0.3)


def _verbatim(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")
