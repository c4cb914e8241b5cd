"""One controller: predicts the time to the first token and chooses the ratio by it (``recompute_ratio="auto"``).

A profile says how long this machine takes with these models: a line for plain prefill, one for the recompute of a fused
prefill, one for everything before it, and one for reading from each medium of the store. ``cacheclip profile`` measures
it once, or :meth:`~cacheclip_rag.engine.CacheClipEngine.profile_machine`. It is adjusted to what answers take, because
other load comes and goes.

KV is read while models compute: first the auxiliary's, while it scores, then the primary's, while it recomputes. So the
longer of reading and computing counts. Where each chunk is read from is asked before each decision: what is in memory
takes no time, and what is in the system's page cache takes what the other lines hold already, which were measured so.
What is read from a medium that was not measured is learned from answers.

Only ratios of the plan's own method are compared, because a certificate covers one method. At ratio 0, the auxiliary's
KV is not read and nothing is scored: that is direct reuse, except with methods whose first layers compute all tokens.
So a certificate that calls ratio 0 faithful makes direct reuse one of the choices.

Source of the idea to choose the ratio by measured lines: CacheBlend (arXiv:2405.16444, its loading controller).
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cacheclip_rag import ConfigurationError, FusionStats, Plan
from cacheclip_rag.measuring import KVSources, Prediction, known_kv
from cacheclip_rag.plugins import cache_home, json_digest, write_json
from cacheclip_rag.runtime import KVRun, KVSource
from cacheclip_rag.store import PAGE_CACHE

logger = logging.getLogger(__name__)

_FORMAT = 2
_WORTH = 0.9
"""Reuse must take at most this share of plain prefill's time: a smaller gain is not worth an approximate answer."""
_STEPS = 20
"""Ratios that are tried, from 0 to 1."""
_NEW = 0.25
"""Weight of the last answer in the adjustment to the machine's load."""
_REMEMBERED = 0.95
"""How much of the adjustment of reading, and of what comes before the recompute, is left after a plain prefill, as an
exponent. Else a store that was slow once would never be tried again."""
_MOST = 16.0
"""Largest adjustment, up or down."""


class PayloadRead(NamedTuple):
    """One payload that a plan reads."""

    text: str
    is_primary: bool
    medium: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Seconds that a plan's KV takes to be read, as it was measured for the tiers that hold it."""

    medium: str = ""
    """Where most of them are spent, as :meth:`~cacheclip_rag.store.Backend.medium` calls it. Empty: reading is not
    predicted, because all is in memory, or nothing was measured."""
    auxiliary_s: float = 0.0
    """Before the primary's KV."""
    primary_s: float = 0.0
    beside: str = ""
    """What goes on while the KV is read, layer by layer or chunk by chunk: ``recompute`` (all that is computed),
    ``scoring`` (by the auxiliary, while the primary's is read), or nothing."""
    reads: tuple[PayloadRead, ...] = field(default=(), repr=False)
    """What is read, in prompt order, as far as its medium was measured."""

    @property
    def seconds(self) -> float:
        return self.auxiliary_s + self.primary_s


NOTHING_TO_READ = ReadTime()


@dataclass(frozen=True, slots=True)
class TimedPrediction(Prediction):
    """A prediction with what it was made of."""

    known_tokens: int
    """Leading tokens of the prompt in the prefix cache, when it was predicted."""
    reading: ReadTime = NOTHING_TO_READ
    """Of the chunks, if they are reused."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds as a line: a constant, and seconds for each unit of two quantities."""

    constant: float
    first: float
    second: float

    def seconds(self, first: float, second: float) -> float:
        return self.constant + self.first * first + self.second * second


@dataclass(frozen=True, slots=True)
class Work:
    """What one prompt asks for."""

    tokens: int
    """Of the prompt."""
    known: int = 0
    """Leading tokens that plain prefill would not compute: the prefix cache has them."""
    exact: int = 0
    """Tokens that a fused prefill need not compute at any ratio: exact start and exact chunks."""
    stale: int = 0
    """Tokens of reused chunks of which the ratio decides how many are computed."""
    chunks: int = 0
    """Different texts that are reused, whole or in part: each is read and scored once."""

    def plain(self) -> tuple[float, float]:
        """Rows of plain prefill, and pairs of a row and a key that it sees."""
        rows = self.tokens - self.known
        return rows, rows * (self.tokens + self.known) / 2

    def fused(self, ratio: float) -> tuple[float, float]:
        """Rows of the recompute, and pairs of a row and a key."""
        rows = max(1.0, self.tokens - self.exact - self.stale * (1 - ratio))
        return rows, rows * self.tokens

    @classmethod
    def of(cls, plan: Plan, known: int) -> Work:
        """The work of a plan that reuses chunks. Where the ``known`` leading tokens of the prefix cache end inside a
        reused chunk, plain prefill goes on from there, and a fused prefill takes the whole chunk from the store."""
        of_plan = known_kv(plan.layout, plan.reused, [KVRun(KVSource.CACHED, 0, known)])
        exact = of_plan.count(KVSource.PREFIX, KVSource.CACHED, KVSource.OWN_CONTEXT)
        chunks = len({span.whole for span in plan.reused})
        return cls(plan.layout.num_tokens, known, exact, of_plan.count(KVSource.STORED), chunks)


@dataclass(frozen=True, slots=True)
class Profile:
    """Lines of one machine, one pair of models and one method."""

    identity: Mapping[str, Any]
    """What it was measured with; another identity needs another profile."""
    plain: Cost
    """Of plain prefill and the look-up before it: rows, pairs of a row and a key."""
    fused: Cost
    """Of the recompute of a fused prefill: rows, pairs of a row and a key."""
    before: Cost
    """Of everything before the recompute: chunk tokens, chunks."""
    media: Mapping[str, Cost] = field(default_factory=dict)
    """Of reading, by medium: entries, bytes."""

    def plain_s(self, work: Work) -> float:
        return self.plain.seconds(*work.plain())

    def fused_s(self, work: Work, ratio: float) -> tuple[float, float]:
        """Seconds before the recompute, and of it."""
        return self.before.seconds(work.stale, work.chunks), self.fused.seconds(*work.fused(ratio))

    def reading(self, plan: Plan, kv_sources: KVSources, known: int) -> ReadTime:
        """What reading a plan's chunks takes, from where they are now, after ``known`` leading tokens of the prefix
        cache. Reads no payload. All layers of the auxiliary count, although a head set may need fewer."""
        if not self.media.keys() - {PAGE_CACHE}:
            return NOTHING_TO_READ
        primary, scorer = kv_sources.primary, kv_sources.auxiliary
        unread = [span for span in plan.reused if span.stop > known]
        scored = dict.fromkeys(span.whole for span in unread if not plan.known.is_exact(span))
        found = {True: primary.reads_of(dict.fromkeys(span.whole for span in unread))}
        if scorer is not None:
            found[False] = scorer.caches.reads_of(scored)
        reads = [
            PayloadRead(text, is_primary, *read)
            for is_primary, of_model in found.items()
            for text, read in of_model.items()
            if read[0] in self.media
        ]
        beside = "recompute" if primary.store.reads_parts else "scoring"
        return self.reading_of(reads, beside)

    def reading_of(self, reads: Sequence[PayloadRead], beside: str) -> ReadTime:
        """What these reads take. Entries of one medium are read together."""
        seconds: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for is_primary, medium in {(read.is_primary, read.medium) for read in reads}:
            sizes = [read.num_bytes for read in reads if (read.is_primary, read.medium) == (is_primary, medium)]
            seconds[is_primary][medium] = self.media[medium].seconds(len(sizes), sum(sizes))
        by_medium = {read.medium: sum(each.get(read.medium, 0.0) for each in seconds.values()) for read in reads}
        medium = max(by_medium, key=lambda name: by_medium[name], default=PAGE_CACHE)
        if medium == PAGE_CACHE:  # the lines hold it already
            return NOTHING_TO_READ
        return ReadTime(medium, sum(seconds[False].values()), sum(seconds[True].values()), beside, tuple(reads))

    @property
    def path(self) -> Path:
        return _path_of(self.identity)

    def save(self) -> Path:
        """Write the profile to the cache folder, where engines look.

        Raises:
            ConfigurationError: the folder cannot be written.
        """
        content = {"format": _FORMAT, **asdict(self)}
        try:
            write_json(self.path, content)
        except OSError as error:
            raise ConfigurationError(
                f"the profile cannot be written to {self.path.parent} ({error}), so that other engines do not find it. "
                "Make that folder writable, or set CACHECLIP_HOME to a writable folder."
            ) from error
        return self.path


def find_profile(identity: Mapping[str, Any]) -> Profile | None:
    """The profile that was saved for this identity; None if there is none, or (with a warning) if it is damaged or of
    another version of this package."""
    path = _path_of(identity)
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"it has format {content['format']}, and this version of cacheclip-rag reads {_FORMAT}")
        plain, fused, before = (_line(content[name]) for name in ("plain", "fused", "before"))
        media = {str(name): _line(line) for name, line in content["media"].items()}
        found = Profile(content["identity"], plain, fused, before, media)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the profile %s cannot be read and is not used (%s). Run cacheclip profile.", path, error)
        return None
    return found if found.identity == dict(identity) else None


def _line(numbers: Mapping[str, Any]) -> Cost:
    """A line of a file. Raises ValueError, TypeError or AttributeError if it is none."""
    line = Cost(**{key: float(number) for key, number in numbers.items()})
    if not all(math.isfinite(number) and number >= 0 for number in (line.constant, line.first, line.second)):
        raise ValueError("a time that is no time")
    return line


def _path_of(identity: Mapping[str, Any]) -> Path:
    return cache_home() / "profiles" / f"{json_digest(identity)}.json"


class Controller:
    """Chooses ratios by one profile, adjusted to what the last answers took. Safe to share between threads."""

    def __init__(self, profile: Profile, may_be: Callable[[float], bool] | None = None) -> None:
        """``may_be``: whether a ratio may be chosen; None: those of the method's own ratio and above."""
        self.profile, self._may_be = profile, may_be
        self._lock = threading.Lock()
        self._compute = self._before = 1.0
        """What the last answers took, as multiples of the profile's seconds."""
        self._of_size: dict[int, float] = {}
        """What computing took for prompts of a size (the bits of their number of tokens), as multiples of what it took
        in general. A line that was measured with small prompts is too high or too low for large ones."""
        self._unscored = 1.0
        """What comes before the recompute at ratio 0, as a multiple of what it is predicted to take with scoring."""
        self._reading: dict[str, float] = {}
        """What reading took, as multiples of the profile's seconds, by medium."""
        self._left_s = 0.0
        """For each chunk token, seconds for which a store that was not measured is still read when the recompute
        begins: the least that the recompute takes, whatever its ratio."""

    def decide(
        self, plan: Plan, known: int, max_ttft_s: float | None = None, reading: ReadTime = NOTHING_TO_READ
    ) -> Plan:
        """The plan at the ratio that is chosen for it, or with the reason why it is plain prefill; ``known`` leading
        tokens of the prompt are in the prefix cache.

        Without ``max_ttft_s``, that is the least ratio that may be chosen. With it, the plan is plain prefill if that
        is soon enough, else it gets the largest ratio that is. Where reading the store takes longer than the recompute
        beside it, some chunks are computed in full while the others are read, as many as make the first token soonest,
        and the ratio is raised as long as that costs no time. Without a limit, and where no ratio keeps to it, the plan
        is plain prefill if reuse would save less than a tenth of its time."""
        work = Work.of(plan, known)
        plain_s = self._computing(work) * self.profile.plain_s(work)
        ratio, *larger = self._ratios(plan)
        shares = [(plan, work, reading), *self._shares(plan, known, reading, ratio)]

        def fused_s(ratio: float, share: tuple[Plan, Work, ReadTime]) -> float:
            return self._fused_s(share[1], ratio, _at(ratio, plan, share[2]))

        def soonest(ratio: float) -> tuple[Plan, Work, ReadTime]:
            return min(shares, key=lambda share: fused_s(ratio, share))

        if max_ttft_s is not None:
            ratio = next((each for each in reversed(larger) if fused_s(each, soonest(each)) <= max_ttft_s), ratio)
        share = soonest(ratio)
        seconds = fused_s(ratio, share)
        ratio = max([ratio, *(each for each in larger if fused_s(each, share) <= seconds)])
        if max_ttft_s is not None and plain_s <= max_ttft_s:
            why = f"plain prefill is predicted to take {plain_s:.2f} s, and {max_ttft_s:.2f} s are allowed"
        elif seconds > _WORTH * plain_s and (max_ttft_s is None or seconds > max_ttft_s):
            why = f"plain prefill is predicted to take {plain_s:.2f} s, and reuse {seconds:.2f} s"
        else:
            method = plan.method.at(ratio) if plan.method.has_ratio else plan.method
            reading = _at(ratio, plan, share[2])
            return replace(share[0], method=method, prediction=TimedPrediction(seconds, plain_s, known, reading))
        return replace(plan, bypass=why, prediction=TimedPrediction(plain_s, plain_s, known))

    def observe(self, plan: Plan, stats: FusionStats) -> None:
        """Adjust to what the answer of a plan of :meth:`decide` took."""
        assert isinstance(plan.prediction, TimedPrediction), "a plan that was decided has a prediction"
        work, compute_s = Work.of(plan, plan.prediction.known_tokens), stats.phases_s["recompute"]
        before_s = sum(stats.phases_s.values()) - max(compute_s, stats.left_to_read_s)
        reading = plan.prediction.reading
        with self._lock:
            if plan.bypass is not None:
                self._before **= _REMEMBERED
                self._unscored **= _REMEMBERED
                self._left_s *= _REMEMBERED
                self._reading = {medium: factor**_REMEMBERED for medium, factor in self._reading.items()}
                self._learn_computing(work, sum(stats.phases_s.values()), self.profile.plain_s(work))
            elif stats.chunk_tokens == plan.chunk_tokens and not stats.gated:  # else some could not be read
                ratio = plan.method.nominal_ratio
                before, expected = self.profile.fused_s(work, ratio)
                self._learn_computing(work, compute_s, expected)
                predicted_s = self._before_s(before, ratio)
                delayed_s, _ = self._with_reading(predicted_s, reading)
                if delayed_s > predicted_s:
                    pass  # it says more about reading
                elif plan.method.has_ratio and ratio == 0:
                    self._unscored = _adjusted(self._unscored, before_s, self._before * before)
                else:
                    self._before = _adjusted(self._before, before_s, before)
                if reading.medium:
                    factor = self._reading.get(reading.medium, 1.0)
                    self._reading[reading.medium] = _adjusted(factor, stats.reading_s, reading.seconds)
                elif work.stale:
                    self._left_s += _NEW * (stats.left_to_read_s / work.stale - self._left_s)

    def _shares(self, plan: Plan, known: int, reading: ReadTime, ratio: float) -> Iterator[tuple[Plan, Work, ReadTime]]:
        """Plans that compute more and more of the chunks in full instead of reading them, the first ones first: behind
        others that are exact, a chunk is exact too. None where nobody waits for reading."""
        work = Work.of(plan, known)
        if self._fused_s(work, ratio, _at(ratio, plan, reading)) <= self._fused_s(work, ratio):
            return
        texts = [*dict.fromkeys(read.text for read in reading.reads if read.medium != PAGE_CACHE)]
        for count in sorted({round(len(texts) * step / _STEPS) for step in range(_STEPS + 1)} - {0}):
            computed = {*texts[:count]}
            share = plan.computing(computed)
            if share.reused:
                reads = [read for read in reading.reads if read.text not in computed]
                yield share, Work.of(share, known), self.profile.reading_of(reads, reading.beside)

    def _ratios(self, plan: Plan) -> list[float]:
        """Ratios that may be chosen, at least one, in order. 1.0 is always one of them: it is exact."""
        own = plan.method.nominal_ratio
        if not plan.method.has_ratio:
            return [own]
        steps = sorted({own, *(step / _STEPS for step in range(_STEPS + 1))})
        return [each for each in steps if each == 1.0 or (each >= own if self._may_be is None else self._may_be(each))]

    def _fused_s(self, work: Work, ratio: float, reading: ReadTime = NOTHING_TO_READ) -> float:
        before_s, compute_s = self.profile.fused_s(work, ratio)
        before_s, left_s = self._with_reading(self._before_s(before_s, ratio), reading)
        return before_s + max(self._computing(work) * compute_s, left_s, self._left_s * work.stale)

    def _computing(self, work: Work) -> float:
        """What computing takes, as a multiple of the profile's seconds."""
        return self._compute * self._of_size.get(work.tokens.bit_length(), 1.0)

    def _learn_computing(self, work: Work, took_s: float, expected_s: float) -> None:
        """One half of the adjustment counts for all prompts, because it may be other load, and one half for those of
        this size. What several sizes have in common so becomes that of all."""
        size, before = work.tokens.bit_length(), self._computing(work)
        half = math.sqrt(_adjusted(before, took_s, expected_s) / before)
        self._compute *= half
        self._of_size[size] = self._of_size.get(size, 1.0) * half

    def _before_s(self, before_s: float, ratio: float) -> float:
        """Seconds until the recompute begins, if reading takes no time; ``before_s``: by the profile, with scoring."""
        return self._before * before_s * (self._unscored if ratio == 0 else 1.0)

    def _with_reading(self, before_s: float, reading: ReadTime) -> tuple[float, float]:
        """Seconds until the recompute begins (``before_s`` if reading takes no time), and those for which the store is
        then still read."""
        factor = self._reading.get(reading.medium, 1.0)
        auxiliary_s, primary_s = factor * reading.auxiliary_s, factor * reading.primary_s
        match reading.beside:
            case "recompute":
                begins_s = max(before_s, auxiliary_s)
                return begins_s, max(0.0, auxiliary_s + primary_s - begins_s)
            case "scoring":
                return auxiliary_s + max(before_s, primary_s), 0.0
        return before_s + auxiliary_s + primary_s, 0.0


def _at(ratio: float, plan: Plan, reading: ReadTime) -> ReadTime:
    """What is read at a ratio: nothing of the auxiliary at 0."""
    return reading if ratio > 0 or not plan.method.has_ratio else replace(reading, auxiliary_s=0.0)


def _adjusted(factor: float, took_s: float, expected_s: float) -> float:
    """The adjustment after one more answer, a geometric mean, so that one slow answer changes little."""
    if took_s <= 0 or expected_s <= 0:
        return factor
    last = min(max(took_s / expected_s, 1 / _MOST), _MOST)
    return float(factor ** (1 - _NEW) * last**_NEW)
