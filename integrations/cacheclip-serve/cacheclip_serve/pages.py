"""One answer as an HTML page: what its KV was made of, what it cost, and how exact it is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from cacheclip_rag import Answer, ConfigurationError, FusionStats, Trace
from cacheclip_rag.adapters import html_table, whole_page

_LEAST_FRESH = 32
"""Fewest tokens of a text that could be stored: shorter parts are not reused."""
_LEVELS = 9
"""Widths of the line under scored tokens."""
_SHOWN = 90
"""Characters of a text in a table."""
_REST = re.compile(r"\A\W+")
"""What stands before a text: a chunk's last character is often in a token with the line end after it."""
_LEAST_SEEN = 0.002
"""Share of the time that a phase in the legend has at least; the others are in the bar."""
_LEAST_LAST = 128
"""Fewest tokens of the prompt's last text that could be stored: a shorter one is the question."""
_NAMES = {
    "prefix": "shared prefix, as stored",
    "cached": "prefix cache",
    "continued": "an earlier prompt, continued",
    "moved": "an earlier prompt, moved",
    "chunk": "as stored",
    "fresh": "computed, not stored",
}
_EXACT = ("prefix", "cached")
_ENDS = {"length": "cut off at the limit of tokens", "cancelled": "stopped by its client"}
_PHASES = ("queued", "lookup", "read", "select", "assemble", "recompute", "first")

_STYLE = """
body { max-width: 70rem; }
h1 { font-size: 1.35rem; margin: .3rem 0; overflow-wrap: anywhere; }
nav { color: var(--faint); } nav ol { list-style: none; padding: 0; }
nav li a { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); color: var(--ink);
  text-decoration: none; overflow-wrap: anywhere; }
nav small { display: block; }
.answer { font-size: 1.05rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 .8rem; }
.tag { display: inline-block; border: 1px solid var(--line); border-radius: .7rem; padding: .05rem .7rem; }
.bar { display: flex; height: 1.4rem; border-radius: .3rem; overflow: hidden; margin-top: .8rem; }
ul.key { list-style: none; padding: 0; margin: .4rem 0 1rem; display: flex; gap: .2rem 1rem; flex-wrap: wrap;
  color: var(--faint); }
ul.key i { display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem; border-radius: .15rem; }
table { width: 100%; margin: .5rem 0 1rem; }
td { white-space: nowrap; } td:last-child { white-space: normal; } td.text { min-width: 7rem; }
td.text small { display: block; } meter { width: 4rem; }
form, form button { display: inline; font: inherit; }
pre.prompt { font: .9rem/1.9 ui-monospace, monospace; border: 1px solid var(--line); border-radius: .5rem;
  padding: .9rem; }
pre.prompt b, b.differs { font-weight: 400; } pre.prompt b.control, i.nl { color: var(--faint); font-style: normal; }
i.number { font: .75rem system-ui; background: #1f4e8c; color: #fff; border-radius: .6rem; padding: 0 .4rem;
  margin-right: .15rem; }
.kept { background: rgb(90 150 235 / .28); } .redo { background: rgb(255 150 30 / .42); }
.exact { background: rgb(80 165 70 / .25); } .fresh { outline: 1px solid var(--line); }
pre.prompt .fresh { outline: 0; } .looked { background: rgb(140 50 190); } .differs { background: rgb(220 60 60 / .3); }
.queued { background: #c4c8cd; } .lookup { background: #9aa7b5; } .read { background: #6fa8dc; }
.select { background: #b48ad6; } .assemble { background: #7fc4b2; } .recompute { background: #ef9f4b; }
.first { background: #8d6e63; }
"""


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """Beside an answer: what full prefill chooses along it."""

    same: str
    """The answer's beginning that full prefill chooses too."""
    differs_at: int | None
    """Number of the first token, from 0, that it does not choose; None: there is none in what was compared."""
    choice: str = ""
    """What it chooses there."""


@dataclass(frozen=True, slots=True)
class FreshText:
    """A longer text of users in a prompt that no store has."""

    start: int
    stop: int
    text: str


def fresh_texts(trace: Trace) -> list[FreshText]:
    """The longer texts of a prompt that were computed because nothing of them is stored."""
    texts = []
    runs = groupby(trace.spans, key=lambda span: span.kind == "fresh" and span.text is None and not span.is_control)
    for is_fresh, spans in runs:
        start, *_, stop = [edge for span in spans for edge in (span.start, span.stop)]
        is_last = all(span.is_control for span in trace.spans if span.start >= stop)
        if is_fresh and stop - start >= (_LEAST_LAST if is_last else _LEAST_FRESH):
            text = "".join(trace.tokens[start:stop]).strip()
            texts.append(FreshText(start, stop, _REST.sub("", text)))
    return texts


def answer_page(
    question: str,
    answer: Answer,
    *,
    model: str,
    compared: ComparedAnswer | None = None,
    place: str | None = None,
    asks: bool = True,
) -> str:
    """The page of one answer.

    Args:
        question: a short form of what was asked, as the heading.
        compared: what full prefill chooses along the answer; None: it was not compared.
        place: address of the page on a server; None: it is a file.
        asks: whether the server says why a text was not found, and stores it.
    """
    stats, trace = answer.stats, answer.trace
    parts = ['<nav><a href="/inspect">all answers</a></nav>'] if place is not None else []
    parts += [f'<p class="answer" dir="auto">{escape(answer.text or answer.reasoning)}</p>', _compared(compared)]
    parts.append(_summary(answer, model))
    bar, widths = _phases(stats)
    parts.append(bar)
    levels = "".join(
        f".s{n} {{ box-shadow: inset 0 -3px 0 rgb(140 50 190 / {n / _LEVELS:.2f}); }}\n" for n in range(1, _LEVELS + 1)
    )
    if trace is not None:
        prompt = f'<pre class="prompt">{"".join(_prompt(trace))}</pre>'
        parts += [_sources(trace, stats, place if asks else None), _legend(trace), prompt]
    return whole_page(question, *parts, style=_STYLE + levels + widths)


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigurationError(
            f"--inspect must be a file in a folder that can be written, got {file}: {why}."
        ) from error


def page_writer(file: Path, *, model: str) -> Callable[[str, Answer], None]:
    """What writes the page of a question and its answer to a file, in a folder that is made now. Raises
    ConfigurationError, before there is an answer where that can be known: the file cannot be written."""
    with _refusing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError("it is a folder, or may not be written")

    def write(question: str, answer: Answer) -> None:
        page = answer_page(question, answer, model=model)
        with _refusing(file):
            file.write_text(page, encoding="utf-8")

    return write


def list_page(rows: Sequence[tuple[int, str, Answer]], most: int) -> str:
    """The page of all answers, the latest first: number, question and answer of each."""
    items = "".join(
        f'<li><a href="/inspect/{number}">{escape(question)}<small>{_in_short(answer)}</small></a></li>'
        for number, question, answer in rows
    )
    none = "" if rows else "<p>No question was answered yet.</p>"
    return whole_page(
        "Answers", f"<nav>the last {most}, of this process, in memory only<ol>{items}</ol></nav>{none}", style=_STYLE
    )


def note_page(title: str, text: str, place: str) -> str:
    """A page that says one thing."""
    back = f'<nav><a href="{escape(place)}">back to the answer</a></nav>'
    return whole_page(title, back, f'<p class="answer">{escape(text)}</p>', style=_STYLE)


def _in_short(answer: Answer) -> str:
    stats, end = answer.stats, _ENDS.get(answer.finish_reason)
    texts = "text" if stats.hits == 1 else "texts"
    facts = [f"{stats.hits} {texts} found", f"{stats.reused_tokens:,} of {stats.prompt_tokens:,} tokens reused"]
    return " · ".join([*facts, f"first token after {stats.ttft_s:.2f} s", *([end] if end else [])])


def _compared(compared: ComparedAnswer | None) -> str:
    if compared is None:
        return ""
    if compared.differs_at is None:
        return "<p><small>Full prefill chooses the same tokens.</small></p>"
    says = f"Full prefill differs from token {compared.differs_at + 1} on:"
    choice = f'<b class="differs">{escape(compared.choice)}</b>'
    return f'<p><small>{says}</small></p><p class="answer" dir="auto">{escape(compared.same)}{choice} …</p>'


def _summary(answer: Answer, model: str) -> str:
    stats, trace = answer.stats, answer.trace
    is_exact = stats.gated or stats.bypassed or not stats.reused_tokens or (trace is not None and trace.is_exact)
    if is_exact:
        tag = "exact: all KV is full prefill's"
    elif trace is None:
        tag = "approximate"
    else:
        other = sum(span.stop - span.start for span in trace.spans if not span.is_exact) - len(trace.recomputed)
        tag = f"approximate: {max(other, 0):,} of {stats.prompt_tokens:,} tokens carry KV that was computed elsewhere"
    facts = [f"method {stats.method}", f"ratio {stats.nominal_ratio:.3g}", model]
    if stats.confidence is not None:
        facts.insert(2, f"confidence {stats.confidence:.2f}")
    if answer.finish_reason in _ENDS:
        facts.append(_ENDS[answer.finish_reason])
    if stats.verified_tokens is not None:
        facts.append(f"{stats.verified_tokens} of {stats.generated_tokens} tokens are full prefill's own")
    if stats.fallback:
        facts.append(f"plain prefill: {stats.fallback}")
    return f'<p><span class="tag">{tag}</span> {escape(" · ".join(facts))}</p>'


def _phases(stats: FusionStats) -> tuple[str, str]:
    """The bar of phases with its legend, and the style of its widths."""
    seconds = {"queued": stats.queued_s, **stats.phases_s}
    shown = {name: seconds.get(name, 0.0) for name in _PHASES if seconds.get(name, 0.0) > 0}
    whole = max(sum(shown.values()), 1e-9)
    bar = "".join(f'<div class="{name} w-{name}" title="{name} {each:.4f} s"></div>' for name, each in shown.items())
    seen = {name: each for name, each in shown.items() if each > _LEAST_SEEN * whole}
    key = "".join(f'<li><i class="{name}"></i>{name} {each:.2f} s</li>' for name, each in seen.items())
    widths = "".join(f".w-{name} {{ flex: {each / whole:.5f}; }}\n" for name, each in shown.items())
    total = f"<li>= first token after {stats.ttft_s:.2f} s, answer {stats.decode_s:.2f} s later</li>"
    return f'<div class="bar">{bar}</div><ul class="key">{key}{total}</ul>', widths


def _sources(trace: Trace, stats: FusionStats, place: str | None) -> str:
    """What the prompt's KV came from, a row each, then what no store had."""
    titles = ("", "source", "tokens", "computed again", "share of scores", "read from", "exact")
    return html_table(titles, [*_of_kinds(trace), *_of_texts(trace, stats), *_not_found(trace, place)], {"source"})


def _of_kinds(trace: Trace) -> Iterator[tuple[str, ...]]:
    for kind in _NAMES:
        spans = [span for span in trace.spans if span.kind == kind and span.text is None]
        if spans and kind != "fresh":
            tokens = sum(span.stop - span.start for span in spans)
            yield ("", _NAMES[kind], f"{tokens:,}", "", "", "memory", _exactness(trace, spans))


def _of_texts(trace: Trace, stats: FusionStats) -> Iterator[tuple[str, ...]]:
    again = {*trace.recomputed}
    for number, text in enumerate(trace.texts):
        spans = [span for span in trace.spans if span.text == number]
        used = [span for span in spans if span.kind != "fresh"]
        sources = ", ".join(dict.fromkeys(document or source for source, document in text.sources))
        title = f"{escape(_short(text.text))}<small>{escape(sources)}</small>"
        if not used:
            why = (
                "stands here in another form" if text.is_altered else stats.fallback if text.is_stored else "not stored"
            )
            tokens = sum(span.stop - span.start for span in spans)
            yield (str(number + 1), title, f"{tokens:,} / {text.num_tokens:,}", "all", "", escape(why or ""), "yes")
            continue
        tokens = sum(span.stop - span.start for span in used)
        computed = sum(n in again for span in used for n in range(span.start, span.stop))
        shares = [span.score_share for span in used if span.score_share is not None]
        meter = f'<meter value="{sum(shares):.3f}"></meter> {sum(shares):.0%}' if shares else "–"
        share_again = f"{computed:,} <small>{computed / tokens:.0%}</small>"
        count = f"{tokens:,} / {text.num_tokens:,}"
        medium = escape(text.medium or "memory")
        yield (str(number + 1), title, count, share_again, meter, medium, _exactness(trace, used))


def _not_found(trace: Trace, place: str | None) -> Iterator[tuple[str, ...]]:
    for text in fresh_texts(trace):
        links = "not stored"
        if place is not None:
            links += (
                f' · <a href="{escape(place)}/why?start={text.start}">why?</a> · <form method="post" '
                f'action="{escape(place)}/learn?start={text.start}"><button>learn it</button></form>'
            )
        yield ("–", escape(_short(text.text)), f"{text.stop - text.start:,}", "all", "", links, "yes")


def _exactness(trace: Trace, spans: Sequence[object]) -> str:
    if all(span.is_exact for span in spans):  # type: ignore[attr-defined]
        return "yes"
    kinds = {span.kind for span in spans}  # type: ignore[attr-defined]
    if "continued" in kinds:
        return f"no, {trace.turns} turns since"
    pasts = [span.past for span in spans if span.past is not None]  # type: ignore[attr-defined]
    return f"no, {sum(pasts) / len(pasts):.0%} of its past" if pasts else "no"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _legend(trace: Trace) -> str:
    counts = {"exact": 0, "kept": 0, "redo": 0, "fresh": 0}
    for name, _, _ in _looks(trace):
        counts[name] += 1
    names = {"exact": "exact", "kept": "computed elsewhere", "redo": "computed again", "fresh": "computed, not stored"}
    key = "".join(f'<li><i class="{name}"></i>{names[name]} {count:,}</li>' for name, count in counts.items() if count)
    line = '<li><i class="looked"></i>line: its score</li>' if any(span.scores for span in trace.spans) else ""
    return f'<ul class="key">{key}{line}</ul>'


def _looks(trace: Trace) -> Iterator[tuple[str, float | None, str]]:
    """Of each token its colour, its score, and what is known of it."""
    again = {*trace.recomputed}
    for span in trace.spans:
        number = "" if span.text is None else f"text {span.text + 1}: "
        for n in range(span.start, span.stop):
            score = span.scores[n - span.start] if span.scores else None
            if span.kind == "fresh":
                yield "fresh", score, f"{number}{_NAMES['fresh']}"
            elif n in again:
                yield "redo", score, f"{number}{_NAMES[span.kind]}, computed again"
            else:
                yield "exact" if span.is_exact else "kept", score, f"{number}{_NAMES[span.kind]}"


def _prompt(trace: Trace) -> Iterator[str]:
    """The prompt's tokens, neighbours that look alike in one element."""
    scores = sorted((score for span in trace.spans for score in span.scores), reverse=True)
    ranks = {score: rank for rank, score in reversed([*enumerate(scores, 1)])}
    highest = max(scores, default=0.0)
    heads = {span.start: span for span in trace.spans}
    looks = zip(_looks(trace), trace.tokens, strict=True)
    control, before = "", None
    for n, ((name, score, title), token) in enumerate(looks):
        if n in heads:
            span = heads[n]
            control = " control" if span.is_control else ""
            if before is not None:
                yield "</b>"
                before = None
            if span.text is not None and span.kind != "fresh":
                yield f'<i class="number">{span.text + 1}</i>'
        level = 0 if score is None or highest <= 0 else round(_LEVELS * (max(score, 0.0) / highest) ** 0.5)
        if score is not None:
            title = f"{title} · score {score:.4g}, rank {ranks[score]} of {len(scores)}"
        look = f'<b class="{name}{control}{f" s{level}" * bool(level)}" title="{escape(title)}">'
        if look != before:
            yield "</b>" * (before is not None) + look
            before = look
        yield escape(token).replace("\n", '<i class="nl">↵</i>\n')
    yield "</b>" * (before is not None)
