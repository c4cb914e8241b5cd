"""A prompt's fusion as numbers and names, for another process that has the model and the store.

A :class:`~cacheclip_rag.plan.plan.Plan` says which chunks are reused. A :class:`FusionPlan` also says which tokens are
computed, so that nothing is left to decide where the plan is carried out. It holds no tensors and no text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..base.checks import is_whole_number
from ..base.errors import ConfigurationError
from ..base.keys import json_digest

FORMAT_VERSION = 1
"""Increase this number when fields change meaning. Plans of other versions are refused."""

Interval = tuple[int, int]
"""First position, and the position after the last one."""

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Neighbouring tokens of one entry of the store, and where they stand in the prompt."""

    start: int
    """Position of the first token."""
    key: str
    """Key of the entry."""
    first: int
    """Number of the first token in the entry."""
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """How the KV of a prompt's first tokens is made: from the store, by computing some rows, and by a correction.

    Raises:
        ConfigurationError: fields contradict each other.
    """

    token_ids: tuple[int, ...]
    """The whole prompt."""
    pieces: tuple[StoredPiece, ...]
    """Stored KV, in order of positions, without overlap."""
    computed: tuple[Interval, ...]
    """Positions that are computed, as runs of neighbours in order, up to the end of the last piece. Every position up
    to there is in a piece or in a run; one that is in both is computed again."""
    chunks: tuple[Interval, ...] = ()
    """Chunks whose other tokens are corrected by the mean change of their computed ones; each is a whole piece."""
    correction: float = 0.0
    """Share of the mean change that is added (:mod:`cacheclip_rag.methods.recompute`)."""
    model: str = ""
    """Fingerprint of the model, dtype included."""
    rope_pin: str = ""
    """Its rotary embedding, as in the keys of the store."""
    namespace: str = "default"
    """Tenant whose entries the pieces are."""
    codec: str = "float32"
    """Entries of a coarser codec must not be used."""
    moved: tuple[Interval, ...] = ()
    """Where pieces are no entries of the store, but KV of earlier prompts that the other process itself keeps."""

    @classmethod
    def computing(
        cls, token_ids: Sequence[int], num_tokens: int, *, model: str, rope_pin: str, namespace: str
    ) -> FusionPlan:
        """A plan that computes the first ``num_tokens`` of a prompt and reads no entry: its answer is plain
        prefill's."""
        piece = StoredPiece(0, "0" * 64, 0, num_tokens)
        computed = ((0, num_tokens),)
        return cls(tuple(token_ids), (piece,), computed, model=model, rope_pin=rope_pin, namespace=namespace)

    def __post_init__(self) -> None:
        end = self.end
        _check(self.token_ids and all(map(is_whole_number, self.token_ids)), "token_ids must be one number or more")
        _check(0 < end <= len(self.token_ids), "the pieces must end within the prompt")
        for piece in self.pieces:
            _check(_KEY.fullmatch(piece.key) is not None, f"a key must be 64 hexadecimal digits, got {piece.key!r}")
            _check(piece.num_tokens > 0 <= piece.first, "a piece must have a token or more")
        of_pieces = [(piece.start, piece.stop) for piece in self.pieces]
        named = {"pieces": of_pieces, "computed": self.computed, "chunks": self.chunks, "moved": self.moved}
        for name, intervals in named.items():
            numbers = [number for interval in intervals for number in interval]
            _check(all(is_whole_number(number) for number in numbers), f"{name} must hold whole numbers")
            _check(all(0 <= start < stop <= end for start, stop in intervals), f"{name} must lie before position {end}")
            _check(all(a[1] <= b[0] for a, b in pairwise(intervals)), f"{name} must be in order, without overlap")
        _check(_covers(of_pieces, self.computed, end), "some position is neither stored nor computed")
        _check(set(self.chunks) <= set(of_pieces), "a corrected chunk must be a piece")
        _check(0.0 <= self.correction <= 1.0, f"correction must be 0 to 1, got {self.correction!r}")

    @property
    def end(self) -> int:
        """Position after the last piece. What follows is ordinary prefill."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def used_pieces(self) -> list[StoredPiece]:
        """The pieces of which something is written, or is compared with what is computed."""
        if self.correction:
            return [*self.pieces]
        whole = (any(a <= piece.start and piece.stop <= b for a, b in self.computed) for piece in self.pieces)
        return [piece for piece, is_computed in zip(self.pieces, whole, strict=True) if not is_computed]

    @property
    def moved_keys(self) -> set[str]:
        """Keys of the pieces that are KV of earlier prompts."""
        return {each.key for each in self.pieces if any(a <= each.start < b for a, b in self.moved)}

    @property
    def num_ready(self) -> int:
        """Leading tokens whose KV the plan makes. The prompt's last token is always left to ordinary prefill: its
        logits give the first new token."""
        return min(self.end, len(self.token_ids) - 1)

    @property
    def num_exact(self) -> int:
        """Leading tokens whose KV is plain prefill's: those before the first piece."""
        return self.pieces[0].start

    @property
    def num_rows(self) -> int:
        """Tokens that are computed after exact KV of those before the first piece."""
        made = sum(max(0, stop - max(start, self.num_exact)) for start, stop in self.computed)
        return made + len(self.token_ids) - self.num_ready

    def first_stale(self, start: int = 0) -> int | None:
        """The first position from ``start`` on whose KV is an entry's as it was stored; None if there is none."""
        for piece in self.pieces:
            at = max(start, piece.start)
            for begin, end in self.computed:
                if begin <= at < end:
                    at = end
            if at < piece.stop:
                return at
        return None

    @property
    def digest(self) -> str:
        """Identifies the KV that the plan makes: 32 hexadecimal digits."""
        return json_digest(self.to_dict())[:32]

    @property
    def lineage(self) -> str:
        """Identifies prompts whose KV is the same where their first tokens are, because the same tokens of the same
        entries are computed: 32 hexadecimal digits."""
        return json_digest({name: value for name, value in self.to_dict().items() if name != "token_ids"})[:32]

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "token_ids": list(self.token_ids),
            "pieces": [[piece.start, piece.key, piece.first, piece.num_tokens] for piece in self.pieces],
            "computed": [list(run) for run in self.computed],
            "chunks": [list(chunk) for chunk in self.chunks],
            "correction": self.correction,
            "model": self.model,
            "rope_pin": self.rope_pin,
            "namespace": self.namespace,
            "codec": self.codec,
            "moved": [list(run) for run in self.moved],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FusionPlan:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigurationError: another version, a missing or unknown field, or values that contradict each other.
        """
        version = values.get("version") if isinstance(values, Mapping) else None
        _check(version == FORMAT_VERSION, f"its version is {version!r}, this one reads {FORMAT_VERSION}")
        try:
            fields = {name: value for name, value in values.items() if name != "version"}
            fields["token_ids"] = tuple(fields["token_ids"])
            fields["pieces"] = tuple(StoredPiece(*piece) for piece in fields["pieces"])
            for name in ("computed", "chunks", "moved"):
                fields[name] = tuple((start, stop) for start, stop in fields[name])
            for name in ("model", "rope_pin", "namespace", "codec"):
                _check(isinstance(fields.get(name), str), f"{name} must be a string")
            return cls(**fields)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"the fusion plan cannot be read: {error}. Make it with this version.") from error


def runs_of(positions: Sequence[int]) -> tuple[Interval, ...]:
    """Strictly increasing positions as runs of neighbours."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1][1] = position + 1
        else:
            runs.append([position, position + 1])
    return tuple((start, stop) for start, stop in runs)


def _covers(pieces: Sequence[Interval], computed: Sequence[Interval], end: int) -> bool:
    covered = 0
    for start, stop in sorted((*pieces, *computed)):
        if start > covered:
            return False
        covered = max(covered, stop)
    return covered >= end


def _check(is_right: object, what: str) -> None:
    if not is_right:
        raise ConfigurationError(f"the fusion plan cannot be read: {what}. Make it with this version.")
