"""Cuts a fusion plan into forward passes that an engine has room for.

Passes are carried out in order of positions. Each makes the KV of an interval of the prompt. Together they give what
one pass gives, because a row at position p sees keys at positions up to p only. But all computed tokens of a corrected
chunk must be in one pass: in every layer their mean change moves the chunk's other tokens before any row attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cacheclip_rag import ConfigurationError
from cacheclip_rag.planning import FusionPlan, Interval


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, and the interval of the prompt whose KV it makes."""

    start: int
    """First position that is written."""
    stop: int
    """Position after the last one."""
    runs: tuple[Interval, ...]
    """Positions that are computed. Those before ``start`` (and from the plan's ``num_ready`` on) are computed for the
    correction only. Empty: stored KV is written, and nothing is computed."""
    chunks: tuple[Interval, ...]
    """Chunks that are corrected in this pass, whole."""

    @property
    def begin(self) -> int:
        """First position of which stored KV is needed."""
        return min((self.start, *(start for start, _ in self.chunks)))

    @property
    def end(self) -> int:
        """Position after the last one of which stored KV is needed."""
        return max((self.stop, *(stop for _, stop in self.chunks)))


@dataclass(slots=True)
class _Atom:
    """Rows that must be in one pass."""

    begin: int
    """No pass before may make KV from here on."""
    runs: list[Interval]
    chunk: Interval | None = None


def passes(plan: FusionPlan, start: int, *, max_runs: int, max_rows: int) -> list[Pass]:
    """The passes, of so many runs of neighbouring rows and so many rows at most, that make the KV of positions
    ``start`` to ``plan.num_ready - 1``. KV of earlier positions is there, made by the same plan. Raises
    ConfigurationError if the rows of one corrected chunk exceed a limit."""
    found: list[Pass] = []
    runs: list[Interval] = []
    chunks: list[Interval] = []
    rows = 0

    def close(stop: int) -> None:
        begin = found[-1].stop if found else start
        if stop > begin:
            found.append(Pass(begin, stop, tuple(runs), tuple(chunks)))
        runs.clear()
        chunks.clear()

    for atom in _atoms(plan, start, max_rows):
        _check(atom, max_runs, max_rows)
        more = _rows(atom.runs)
        continues = bool(runs) and runs[-1][1] == atom.runs[0][0]
        if runs and (len(runs) + len(atom.runs) - continues > max_runs or rows + more > max_rows):
            close(atom.begin)
            rows, continues = 0, False
        if continues:
            runs.append((runs.pop()[0], atom.runs[0][1]))
        runs.extend(atom.runs[continues:])
        chunks.extend([atom.chunk] if atom.chunk is not None else [])
        rows += more
    close(plan.num_ready)
    return found


def computed_rows(plan: FusionPlan, start: int, *, max_runs: int, max_rows: int) -> int:
    """Rows that are computed up to the first token of the answer, by the :func:`passes` and by ordinary prefill after
    them."""
    made = passes(plan, start, max_runs=max_runs, max_rows=max_rows) if start < plan.num_ready else []
    return sum(_rows(each.runs) for each in made) + len(plan.token_ids) - max(start, plan.num_ready)


def _atoms(plan: FusionPlan, start: int, max_rows: int) -> Iterator[_Atom]:
    """What :func:`passes` puts together, in order of positions."""
    runs = _Cutter(plan.computed)
    for begin, end in plan.chunks if plan.correction else ():
        if end <= start:
            continue
        yield from _single(runs.until(begin), start, plan.num_ready, max_rows)
        own = runs.until(end)
        if own and any(stop > start for _, stop in _gaps(own, begin, end)):
            yield _Atom(begin, own, (begin, end))
        else:  # nothing of what is written is corrected
            yield from _single(own, start, plan.num_ready, max_rows)
    yield from _single(runs.until(plan.end), start, plan.num_ready, max_rows)


def _single(runs: Sequence[Interval], start: int, stop: int, max_rows: int) -> Iterator[_Atom]:
    """Runs that may be cut anywhere."""
    for first, last in runs:
        begin, end = max(first, start), min(last, stop)
        for cut in range(begin, end, max_rows):
            yield _Atom(cut, [(cut, min(end, cut + max_rows))])


class _Cutter:
    """Takes runs off the front of a list, cutting them where asked."""

    def __init__(self, runs: Sequence[Interval]) -> None:
        self._runs = [*reversed(runs)]

    def until(self, stop: int) -> list[Interval]:
        """The runs before position ``stop``, taken off."""
        taken: list[Interval] = []
        while self._runs and self._runs[-1][0] < stop:
            first, last = self._runs.pop()
            taken.append((first, min(last, stop)))
            if last > stop:
                self._runs.append((stop, last))
        return taken


def _gaps(runs: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Positions of an interval that no run covers."""
    edges = [begin, *(edge for run in runs for edge in run), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _rows(runs: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in runs)


def _check(atom: _Atom, max_runs: int, max_rows: int) -> None:
    count, rows = len(atom.runs), _rows(atom.runs)
    if count > max_runs or rows > max_rows:
        raise ConfigurationError(
            f"a chunk has {rows} tokens to compute in {count} runs, and a pass has room for {max_rows} tokens in "
            f"{max_runs} runs. Raise vLLM's max_num_seqs or max_num_batched_tokens, or use a lower recompute ratio."
        )
