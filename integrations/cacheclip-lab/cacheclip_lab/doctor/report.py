"""What recorded requests say about caches: figures, a verdict in words, and a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ..evaluation.page import report_page, text_table
from ..evaluation.tables import Rows
from .requests import RecordedPrompt
from .reuse import CHARS_PER_TOKEN, Cause, PromptReuse, causes, prefix_share, without_lines

_ENOUGH = 0.9
"""Share of what this package would serve from which on a prefix cache is enough."""
_AS_GOOD = 0.98
"""Share of what the prompts gain without a line from which on its one word is enough."""
_WORTH = 0.1
"""Least share that this package must add to be named."""
_RECOMPUTED = 0.2
"""Share of a stored chunk's tokens that is computed again."""
_MOST_COUNTED = 1_000_000
"""Characters that are enough to say how many are a token."""
_MOST_BARS = 160
_SHOWN = 60
TEXTS = ("line (then / now)",)
"""Titles of columns that are no figures."""
_KINDS = ("prefix", "moved", "recurring", "new")
_MEANINGS = {
    "prefix": "it began an earlier prompt, too: an exact prefix cache serves it",
    "moved": "it moved together with what stood before it: KV of earlier prompts serves it",
    "recurring": "it recurs in other company: stored chunks serve it, of which a fifth is computed again",
    "new": "it was never seen: it must be computed",
}
_COLOURS = {"prefix": "#4c78a8", "moved": "#54a24b", "recurring": "#eeca3b", "new": "#b8bcc2"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of a recording, or of one session of it."""

    requests: int
    chars: int
    shares: dict[str, float]
    """Of all characters, by what serves them: ``prefix``, ``moved``, ``recurring``, ``new``."""

    @classmethod
    def of(cls, reuses: Sequence[PromptReuse]) -> Diagnosis:
        total = sum(each.total for each in reuses)
        sums = {kind: sum(getattr(each, kind) for each in reuses) for kind in _KINDS}
        return cls(len(reuses), total, {kind: part / max(1, total) for kind, part in sums.items()})

    @property
    def served(self) -> float:
        """Share that this package would not compute."""
        return self.shares["prefix"] + self.shares["moved"] + (1 - _RECOMPUTED) * self.shares["recurring"]


@dataclass(frozen=True, slots=True)
class Report:
    """All that the command says."""

    whole: Diagnosis
    sessions: dict[str, Diagnosis]
    causes: list[Cause]
    without: float | None
    """Share that an exact prefix cache would serve without the words or lines of the costliest cause; None without such
    lines."""
    without_word: bool
    """Whether the word alone is meant, not its line."""
    tokens_per_second: float | None
    unreadable: int
    chars_per_token: float = CHARS_PER_TOKEN

    @classmethod
    def of(
        cls,
        prompts: Sequence[RecordedPrompt],
        reuses: Sequence[PromptReuse],
        *,
        tokens_per_second: float | None,
        unreadable: int,
        chars_per_token: float = CHARS_PER_TOKEN,
    ) -> Report:
        sessions = defaultdict[str, list[PromptReuse]](list)
        for each in reuses:
            sessions[each.session].append(each)
        kinds = causes(reuses)
        line = kinds[0].beginning.strip() if kinds else ""
        without, without_word = None, False
        if line:
            of_word, of_line = (
                prefix_share(without_lines(prompts, kinds[0].beginning, word_only=each)) for each in (True, False)
            )
            without, without_word = max(of_word, of_line), of_word >= _AS_GOOD * of_line
        whole = Diagnosis.of(reuses)
        of_sessions = {name: Diagnosis.of(of_session) for name, of_session in sorted(sessions.items())}
        rest = (without, without_word, tokens_per_second, unreadable, chars_per_token)
        return cls(whole, of_sessions, kinds, *rest)

    def tokens(self, chars: float) -> int:
        """How many tokens so many characters are."""
        return round(chars / self.chars_per_token)

    def seconds(self, share: float) -> float | None:
        """Of prefill for a share of all tokens; None if the speed is not known."""
        speed = self.tokens_per_second
        return None if speed is None else share * self.tokens(self.whole.chars) / speed

    def verdict(self) -> str:
        """What to do, in one paragraph."""
        shares, added = self.whole.shares, self.whole.served - self.whole.shares["prefix"]
        if added < _WORTH:
            rest = f" The rest is new ({shares['new']:.0%})." if shares["new"] > _WORTH else ""
            return (
                f"You do not need us: an exact prefix cache, which every server has, serves {shares['prefix']:.1%}, "
                f"and this package would add {added:.1%}.{rest}"
            )
        would = f"This package would serve {self.whole.served:.1%}{self._saved(added)}."
        if self.without is not None and self.without >= _ENOUGH * self.whole.served:
            what = "word behind" if self.without_word else "line that begins with"
            return (
                f"You do not need us: take the {what} {self.causes[0].beginning.strip()[-_SHOWN:]!r} out of your "
                f"prompts, or put it last. An exact prefix cache then serves {self.without:.1%}, not "
                f"{shares['prefix']:.1%}. If you cannot: t{would[1:]}"
            )
        more = "" if self.without is None else f" Without what breaks it most, it would serve {self.without:.1%}."
        return f"An exact prefix cache serves {shares['prefix']:.1%}.{more} {would}"

    def _saved(self, share: float) -> str:
        seconds = self.seconds(share / max(1, self.whole.requests))
        return "" if seconds is None else f", and save {seconds:.1f} s of prefill a request"

    def tables(self, most: int = 8) -> dict[str, Rows]:
        """By title: sessions, and the ``most`` costliest causes."""
        sessions = [
            [
                name,
                f"{each.requests:,}",
                f"{self.tokens(each.chars):,}",
                *(f"{each.shares[kind]:.1%}" for kind in _KINDS),
                f"{each.served:.1%}",
            ]
            for name, each in {**self.sessions, "all": self.whole}.items()
        ]
        breaks = [
            [
                cause.part,
                f"{_short(cause.beginning, end=True)}({_short(cause.example.was)} / {_short(cause.example.now)})",
                f"{cause.count:,}",
                f"{self.tokens(cause.lost):,}",
            ]
            for cause in self.causes[:most]
        ]
        counted = f"Tokens of prompts, at {self.chars_per_token:.1f} characters each"
        tables: dict[str, Rows] = {
            counted: (["session", "requests", "tokens", *_KINDS, "served here"], sessions),
            "Where prefixes break": (["part", *TEXTS, "requests", "tokens lost"], breaks),
        }
        return {title: table for title, table in tables.items() if table[1]}

    @staticmethod
    def meanings() -> list[str]:
        """What the kinds of tokens are, a line each."""
        return [f"{kind}: {meaning}." for kind, meaning in _MEANINGS.items()]

    def to_dict(self) -> dict[str, Any]:
        whole = asdict(self)
        names = {"part": "part", "beginning": "line_begins", "count": "requests"}
        whole["causes"] = [
            {
                **{name: getattr(cause, own) for own, name in names.items()},
                "lost_tokens": self.tokens(cause.lost),
                "was": cause.example.was,
                "now": cause.example.now,
                "place": cause.example.place,
            }
            for cause in self.causes
        ]
        for name, each in {**self.sessions, "": self.whole}.items():
            own = whole["sessions"][name] if name else whole["whole"]
            own.update(served=each.served, tokens=self.tokens(each.chars))
        seconds = {kind: self.seconds(share) for kind, share in self.whole.shares.items()}
        return {**whole, "seconds_of_prefill": seconds, "verdict": self.verdict()}


def chars_per_token(texts: Iterable[str], tokenize: Callable[[str], Sequence[int]]) -> float:
    """How many characters of the first million are a token of a tokenizer."""
    chars = tokens = 0
    for text in texts:
        part = text[: _MOST_COUNTED - chars]
        chars, tokens = chars + len(part), tokens + len(tokenize(part))
        if chars == _MOST_COUNTED:
            break
    return chars / tokens if tokens else CHARS_PER_TOKEN


def _short(text: str, *, end: bool = False) -> str:
    text = text.replace("\n", " ")
    if len(text) <= _SHOWN:
        return text
    return f"…{text[-_SHOWN:]}" if end else f"{text[:_SHOWN]}…"


def to_html(report: Report, reuses: Sequence[PromptReuse]) -> str:
    """One page without scripts or foreign parts: the verdict, a figure, sessions and causes."""
    return report_page(
        "What caches would serve",
        f"<p>{escape(report.verdict())}</p>",
        _figure(report, reuses),
        *(text_table(title, "", table, TEXTS) for title, table in report.tables(30).items()),
    )


def _figure(report: Report, reuses: Sequence[PromptReuse]) -> str:
    """Tokens of each request, or of several neighbours, stacked by what serves them."""
    size = -(-len(reuses) // _MOST_BARS)
    groups = [reuses[first : first + size] for first in range(0, len(reuses), size)]
    means = [{kind: sum(getattr(r, kind) for r in group) / len(group) for kind in _KINDS} for group in groups]
    highest = max((sum(mean.values()) for mean in means), default=0) or 1
    width = 960 / len(means)
    bars = []
    for number, mean in enumerate(means):
        top = 240.0
        for kind in _KINDS:
            height = 240 * mean[kind] / highest
            top -= height
            bars.append(
                f'<rect x="{number * width:.2f}" y="{top:.2f}" width="{max(0.5, 0.9 * width):.2f}" '
                f'height="{height:.2f}" fill="{_COLOURS[kind]}"/>'
            )
    legend = "".join(
        f'<dt><svg width="12" height="12"><rect width="12" height="12" fill="{_COLOURS[kind]}"/></svg> {kind} '
        f"{report.whole.shares[kind]:.1%}</dt><dd>{_MEANINGS[kind]}</dd>"
        for kind in _KINDS
    )
    each = "a request" if size == 1 else f"{size} requests, their mean"
    return (
        '<svg viewBox="0 0 960 240" preserveAspectRatio="none" role="img" aria-label="Tokens of each request" '
        f'width="100%" height="240">{"".join(bars)}</svg>'
        f"<p>A bar is {each}, in their order; the highest has {report.tokens(highest):,} tokens.</p><dl>{legend}</dl>"
    )
