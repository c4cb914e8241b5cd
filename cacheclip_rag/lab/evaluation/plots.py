"""Quality against the time to the first token: one picture, drawn as SVG for the page and by matplotlib as PNG."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, MissingExtraError
from ...paths import atomic_path
from .tables import number_text, score_title

__all__ = ["COLOURS", "GLYPHS", "Plot", "Point", "Series", "look", "plots", "to_png", "to_svg"]

COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#c04e00", "#ff9a5c"),
    ("#00795a", "#37d3a7"),
    ("#a8427f", "#eb9bc8"),
    ("#7a6300", "#e3c64a"),
    ("#5b4fc4", "#b0a8ff"),
    ("#8c1d1d", "#f28b82"),
    ("#4a6b00", "#b5d65a"),
    ("#00616f", "#7fd8e8"),
    ("#84502a", "#d9a66b"),
)
"""Of the methods in turn, on light and on dark ground: after Okabe and Ito, darkened or lightened for contrast."""
_MARKERS = ("o", "s", "D", "^")
"""As matplotlib calls them: circle, square, diamond, triangle."""
_DASHES = (("-", ""), ("--", "7 4"), (":", "2 3"), ("-.", "8 3 2 3"))
"""Line styles as matplotlib calls them, and as SVG does."""
GLYPHS = ("●", "■", "◆", "▲")
"""The markers, in a legend of text."""
_KL_FLOOR = 1e-7
"""Nats below which float32 logits resolve nothing: such values stand at the bottom as 0, not to stretch the axis."""
_WIDTH, _HEIGHT = 560, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 16, 46


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    """Median time to the first token, seconds."""
    y: float
    label: str
    """Recompute ratio; the run's name where the ratio does not tell runs of a method apart."""
    run: str


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one method, by increasing ratio."""

    method: str
    points: list[Point]
    joined: bool
    """False where ratios repeat: those runs differ in something else, and no line leads from one to the next."""


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    y_label: str
    series: list[Series]
    """Without full prefill."""
    full: Point | None
    """Full prefill, the dashed line: horizontal, or on a logarithmic axis, where its 0 has no place, upright."""
    log: bool
    x_ticks: list[float]
    """The axis goes from the first to the last."""
    y_ticks: list[float]
    zero: float | None
    """Where 0 is drawn on a logarithmic axis, the first of ``y_ticks``; None if no point needs it."""


def plots(summary: dict[str, Any]) -> list[Plot]:
    """KL to full prefill and every own score of the questions against TTFT: those that there are figures for."""
    made = [_plot(summary, "kl_to_full", "KL to full prefill", "KL (nats a token, log)", log=True)]
    for score in summary["own_scores"]:
        made.append(_plot(summary, score, score_title(score), score_title(score), log=False))
    return [plot for plot in made if plot is not None]


def _plot(summary: dict[str, Any], key: str, title: str, y_label: str, *, log: bool) -> Plot | None:
    rows = {label: row for label, row in summary["methods"].items() if row["ttft_s"] is not None}
    methods = dict.fromkeys(row["method"] for row in rows.values() if row["method"] != "full")
    series = [one for method in methods if (one := _series(method, rows, key)).points]
    full = next((_point(label, row, key, log) for label, row in rows.items() if row["method"] == "full"), None)
    points = [point for one in series for point in one.points]
    if not points:
        return None
    x_ticks = linear_ticks(0.0, max(point.x for point in [*points, *([full] if full else [])]))
    title = f"{title} against time to the first token"
    if log:
        positive = [point.y for point in points if point.y > _KL_FLOOR]
        y_ticks = _log_ticks(positive, with_zero=len(positive) < len(points))
        zero = y_ticks[0] if len(positive) < len(points) else None
        return Plot(title, y_label, series, full, log, x_ticks, y_ticks, zero)
    values = [point.y for point in [*points, *([full] if full else [])]]
    return Plot(title, y_label, series, full, log, x_ticks, linear_ticks(min(values), max(values)), None)


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
    """Indices of colour, marker and dashes of a series: when the colours are used up they come again with the next
    marker and dashes, so that the first 160 methods differ."""
    again = number // len(COLOURS)
    return number % len(COLOURS), again % len(_MARKERS), (again + again // len(_MARKERS)) % len(_DASHES)


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
    """What stands beside a tick of the upright axis."""
    return "0" if tick == plot.zero else f"{tick:g}"


def to_svg(plot: Plot) -> str:
    """An ``<svg>`` element; its colours are the page's, by the classes ``p0``, ``p1``, … of the methods."""
    ticks = [_svg_x_tick(plot, tick) for tick in plot.x_ticks] + [_svg_y_tick(plot, tick) for tick in plot.y_ticks]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(plot.title)}">',
        *ticks,
        f'<text x="{middle:g}" y="{_HEIGHT - 8}" text-anchor="middle">time to the first token (s, median)</text>',
        f'<text transform="translate(14 {(_TOP + _HEIGHT - _BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(plot.y_label)}</text>",
        _svg_full(plot),
        # labels first: they may cross a line or one another, but hide no point
        *(_svg_group(plot, number, _svg_label) for number in range(len(plot.series))),
        *(_svg_group(plot, number, _svg_marker) for number in range(len(plot.series))),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _svg_x_tick(plot: Plot, tick: float) -> str:
    x, bottom = _x(plot, tick), _HEIGHT - _BOTTOM
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
    )


def _svg_y_tick(plot: Plot, tick: float) -> str:
    y = _y(plot, tick)
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(plot, tick)}</text>'
    )


def _svg_full(plot: Plot) -> str:
    if plot.full is None:
        return ""
    x, title = _x(plot, plot.full.x), f"<title>{html.escape(_described(plot.full))}</title>"
    if plot.log:
        line = f'<line class="full" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">{title}</line>'
        return f'{line}<text x="{x - 6:.1f}" y="{_TOP + 12}" text-anchor="end">full</text>'
    y = _y(plot, plot.full.y)
    return (
        f'<line class="full" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>'
        f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">full</text>'
    )


def _svg_group(plot: Plot, number: int, draw: Callable[[float, float, Point, int], str]) -> str:
    series = plot.series[number]
    places = [(_x(plot, point.x), _y(plot, _shown(plot, point)), point) for point in series.points]
    parts = [draw(x, y, point, number) for x, y, point in places]
    if draw is _svg_marker and series.joined and len(places) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        dashes = _DASHES[look(number)[2]][1]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.insert(0, f'<polyline points="{line}"{dashed}/>')
    return f'<g class="p{look(number)[0]}">{"".join(parts)}</g>'


def _svg_label(x: float, y: float, point: Point, number: int) -> str:
    above_or_below = (-9, 17)[number % 2]
    return f'<text x="{x:.1f}" y="{y + above_or_below:.1f}" text-anchor="middle">{html.escape(point.label)}</text>'


def _svg_marker(x: float, y: float, point: Point, number: int) -> str:
    title = f"<title>{html.escape(_described(point))}</title>"
    corners = _CORNERS[look(number)[1]]
    if not corners:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}">{title}</polygon>'


_CORNERS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
    ((0, -5.5), (5, 4), (-5, 4)),
)
"""Of the markers, from their middle; none for the circle."""


def _described(point: Point) -> str:
    return f"{point.run}: {point.y:.4g} at {point.x:.3f} s"


def _shown(plot: Plot, point: Point) -> float:
    return plot.zero if plot.zero is not None and point.y <= _KL_FLOOR else point.y


def _x(plot: Plot, value: float) -> float:
    low, high = plot.x_ticks[0], plot.x_ticks[-1]
    return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(plot: Plot, value: float) -> float:
    low, high = plot.y_ticks[0], plot.y_ticks[-1]
    if plot.log:
        low, high, value = math.log10(low), math.log10(high), math.log10(value)
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def to_png(summary: dict[str, Any], path: Path) -> None:
    """The same plots side by side, by matplotlib, without touching pyplot's global state.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigurationError: there is nothing to plot.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib (for the picture of a report)", "eval") from error
    made = plots(summary)
    if not made:
        raise ConfigurationError("expected a summary with KL or scores and times of a method, got none to plot.")
    methods = {series.method for plot in made for series in plot.series}
    columns = max(1, int(6.0 * len(made) / (0.7 + 0.075 * max(map(len, methods)))))  # as many as there is width for
    rows = math.ceil((len(methods) + 1) / columns)
    figure = Figure(figsize=(6.0 * len(made), 4.0 + 0.25 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    drawn: dict[str, Any] = {}
    for axes, plot in zip(figure.subplots(1, len(made), squeeze=False)[0], made, strict=True):
        _draw(axes, plot)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    # below the plots: within them it would hide points
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=columns, fontsize=9)
    with atomic_path(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing")  # a name in a script that its font lacks
        figure.savefig(temporary, format="png")


def _draw(axes: Any, plot: Plot) -> None:
    for number, series in enumerate(plot.series):
        xs, ys = [point.x for point in series.points], [_shown(plot, point) for point in series.points]
        colour, marker, dashes = look(number)
        style = _DASHES[dashes][0] if series.joined else ""
        drawn = {"marker": _MARKERS[marker], "color": COLOURS[colour][0], "clip_on": False}
        axes.plot(xs, ys, linestyle=style, label=_verbatim(series.method), **drawn)
        for x, y, point in zip(xs, ys, series.points, strict=True):
            place = {"xytext": (0, (6, -13)[number % 2]), "textcoords": "offset points", "ha": "center"}
            axes.annotate(_verbatim(point.label), (x, y), fontsize=8, color=drawn["color"], **place)
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
    axes.set(xlabel="time to the first token (s, median)", ylabel=plot.y_label, title=plot.title)
    axes.grid(alpha=0.3)


def _verbatim(text: str) -> str:
    """Names are no formulas."""
    return text.replace("$", r"\$")
