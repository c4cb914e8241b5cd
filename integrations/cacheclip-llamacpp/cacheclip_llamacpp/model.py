"""The runtime of GGUF files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cacheclip_rag import ModelError
from cacheclip_rag.plugins import PlacedKV, fuse_in_order
from cacheclip_rag.runtime import (
    ChatText,
    Grammars,
    SchemaConstraint,
    TokenizedText,
    check_encodable,
    check_process,
    known_reasoning,
)

from .context import KV_TYPE, Cells, Context
from .late_correction import LateCorrection, Runs
from .library import library_version
from .rotary import Rotation, are_alike, measured_positions, measured_rotations
from .tokenizer import GgufTokenizer
from .vocabulary import Vocabulary
from .weights import GgufWeights
from .written import UnknownLayoutError, WrittenKV

if TYPE_CHECKING:
    from cacheclip_rag.runtime import KVMatch, KVPart, PhaseClock

logger = logging.getLogger(__name__)

_CALL_TOKENS, _LONG_CALL_TOKENS, _LONG = 16, 64, 2048
"""Tokens that make a call worth its price, in prompts of up to 2,048 tokens and in longer ones: there, llama.cpp's
attention on a CPU takes nearly twice as long for each token of a smaller call."""
_TOGETHER = 8
"""Fewest answers whose next tokens are computed in one call on a CPU. A token of a 4-bit 0.5B takes 22 ms alone, 38
with another one, 26 with five others, 17 in eight and 11 in sixteen."""
_SEPARATOR_TOKENS = 2
"""Most tokens between chunks that later ones of a call need not see."""
_BLOCK = 16
"""Tokens of KV that is written out together, for the bytes of one."""


class LlamaState:
    """A prompt, and its answer so far."""

    def __init__(self, cells: Cells, token_bytes: int) -> None:
        self.cells, self.token_bytes = cells, token_bytes

    def get_seq_length(self) -> int:
        return self.cells.length

    def blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Of each block its number of tokens, and what llama.cpp writes of them."""
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            data = self.cells.context.dump(self.cells, begin, end)
            yield end - begin, torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def write_blocks(self, part: KVPart) -> None:
        at, first = part.run.start, part.skip
        for size, data in part.blocks:
            count = min(size - first, part.run.stop - at)
            is_read = self.cells.context.load(data, size, self.cells, first=first, count=count, at=at)
            assert is_read, "llama.cpp reads what it has written"
            at, first = at + count, 0


class LlamaRuntime(ChatText):
    """One GGUF file in llama.cpp.

    Stored KV is what llama.cpp writes of a sequence, with zeros up to a whole number of bytes a token: ``(1, 2, 1,
    num_tokens, num_bytes)`` uint8. Tokens are computed in the order of the prompt, because llama.cpp takes no others.
    That changes nothing: no token depends on a later one.
    """

    can_score = False
    can_extend = True
    can_move = True
    can_constrain = True
    reads_kv = False
    kv_codec = "opaque"
    rope_pin = "gguf"

    def __init__(
        self,
        weights: GgufWeights,
        *,
        digest: str,
        name: str,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """
        Args:
            digest: SHA-256 of the file.
            free_bytes: memory for KV that is free now; None if that is not known.

        Raises:
            UnsupportedModelError: the model's KV cannot be reused.
        """
        weights.check_supported()
        self.name = name
        self._weights, self._process = weights, os.getpid()
        self._on_gpu = weights.on_gpu
        self._vocabulary = Vocabulary(weights)
        self.tokenizer = GgufTokenizer(weights, self._vocabulary)
        version = library_version()
        self.backend = f"llama.cpp {version}"
        # with flash attention, as all contexts are
        self.fingerprint = f"{digest}:llama.cpp-{version}:flash:{KV_TYPE}"
        self.tokenizer_sha256 = hashlib.sha256(f"gguf {digest}".encode()).hexdigest()
        self.context_tokens = self.reuse_tokens = weights.context_tokens
        self.eos_ids = self._vocabulary.eos_ids
        self.control_ids = self._vocabulary.control_ids
        self.opening = self._vocabulary.opening
        self.marks_reasoning, self.reasoning_ends = known_reasoning(weights.template, self._vocabulary.markers)
        self.num_layers = int(weights.meta("{}.block_count") or 1)
        heads = int(weights.meta("{}.attention.head_count") or 1)
        self.num_kv_heads = int(weights.meta("{}.attention.head_count_kv") or heads)
        self.head_dim = int(
            weights.meta("{}.attention.key_length") or int(weights.meta("{}.embedding_length") or heads) // heads
        )
        self.dtype, self.device = torch.float16, torch.device("cpu")
        self._context = Context(weights, free_bytes)
        self.vocab_size = self._context.vocab_size
        one, two = (len(self._encoded([0] * count, None)) for count in (1, 2))
        self._bytes_per_token, self._bytes_per_run = two - one, 2 * one - two
        self._context.bytes_per_token = self._bytes_per_token
        self.rotations = self._measured_rotations()
        """None: KV that is not recomputed is not corrected."""

    # -- text ---------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        check_encodable(text)
        return self._vocabulary.tokenize(text, control=control)

    def decode_ids(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    def decode_calls(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, keep=self._vocabulary.markers)

    def constrain(self, json_schema: str) -> SchemaConstraint:
        return self._grammars.constraint(json_schema)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.eos_ids, self.name)

    # -- KV -----------------------------------------------------------------------------------------------------

    def kv_shape(self, num_tokens: int) -> tuple[int, ...]:
        return 1, 2, 1, num_tokens, -(-self._kv_bytes(num_tokens) // max(1, 2 * num_tokens))

    def _kv_bytes(self, num_tokens: int) -> int:
        """Bytes that llama.cpp writes of so many tokens."""
        window = self._weights.window or max(1, num_tokens)
        return -(-num_tokens // window) * self._bytes_per_run + num_tokens * self._bytes_per_token

    def _state(self, room: int) -> LlamaState:
        check_process(self.name, self._process)
        return LlamaState(self._context.new(room), self._kv_bytes(_BLOCK) // _BLOCK + 1)

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        return self.encode_many([ids], context)[0]

    def encode_many(self, chunks: Sequence[Sequence[int]], context: torch.Tensor | None = None) -> list[torch.Tensor]:
        before = None
        if context is not None and (length := context.shape[3]):
            before = self._context.new(length)
            is_read = self._context.load(context.flatten(), length, before, first=0, count=length, at=0)
            assert is_read, "llama.cpp reads the KV before the chunks, which it has written itself"
        found = []
        for ids in chunks:
            data = self._encoded(ids, before)
            shape = self.kv_shape(len(ids))
            kv = torch.zeros(shape, dtype=torch.uint8)
            kv.view(-1)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            found.append(kv)
        return found

    def _encoded(self, ids: Sequence[int], before: Cells | None) -> bytes:
        check_process(self.name, self._process)
        start = before.length if before is not None else 0
        cells = self._context.new(start + len(ids))
        if before is not None:
            self._context.copy(before, cells, 0, start)
        self._context.decode(cells, ids, logits_of=0)
        return self._context.dump(cells, start, start + len(ids))

    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[LlamaState, torch.Tensor]:
        state = self._state(max(capacity, len(ids)))
        logits = self._context.decode(state.cells, ids.tolist())
        assert logits is not None, "a prompt has a last token"
        return state, logits[0]

    def begin(self, match: KVMatch, capacity: int) -> LlamaState:
        state = self._state(max(capacity, match.num_tokens))
        match.write_to(state)
        return state

    def extend(
        self, state: Any, ids: torch.Tensor, start: int, *, head: bool = True, logits_to_keep: int = 1
    ) -> torch.Tensor | None:
        assert start == state.cells.length, f"token {start} cannot follow {state.cells.length} tokens"
        logits = self._context.decode(state.cells, ids.tolist(), logits_of=logits_to_keep if head else 0)
        return logits if logits is None or logits_to_keep > 1 else logits[0]

    def cut(self, state: Any, num_tokens: int) -> None:
        self._context.cut(state.cells, num_tokens)

    def drop_freed_kv(self) -> None:
        super().drop_freed_kv()
        self._context.drop_freed()

    def decode_step(self, state: Any, token_id: int) -> torch.Tensor:
        check_process(self.name, self._process)
        logits = self._context.decode(state.cells, [token_id])
        assert logits is not None, "one token was computed"
        return logits[0]

    def decode_steps(self, states: Sequence[Any], token_ids: Sequence[int]) -> list[torch.Tensor]:
        check_process(self.name, self._process)
        parts = [(state.cells, [token]) for state, token in zip(states, token_ids, strict=True)]
        size = len(parts) if len(parts) >= _TOGETHER or self._on_gpu else 1
        found = list[torch.Tensor]()
        try:
            for begin in range(0, len(parts), size):
                found += self._context.decode_many(parts[begin : begin + size], logits_of=1)
        except ModelError:
            for cells, _ in parts[: len(found)]:
                self._context.cut(cells, cells.length - 1)
            raise
        return [logits[0] for logits in found]

    # -- fusion -------------------------------------------------------------------------------------------------

    def fuse(self, plan: Any, kv_sources: Any, *, capacity: int, clock: PhaseClock, **options: Any) -> Any:
        check_process(self.name, self._process)
        return fuse_in_order(self, plan, kv_sources, capacity=capacity, clock=clock, **options)

    def place(self, match: KVMatch, used: Runs, pieces: Iterable[PlacedKV]) -> tuple[Cells, list[PlacedKV]]:
        """Cells with KV at its positions in a prompt, and the pieces that llama.cpp could not read.

        Args:
            used: positions that take the KV of ``match``.
        """
        pieces = list(pieces)
        num_matched = sum(run.stop - run.start for run in match.runs)
        before = self._state(num_matched + _BLOCK + sum(piece.num_tokens for piece in pieces))
        held, unread = before.cells, []
        held.runs = []  # what is there, as it comes: another answer may have the context grow at any time
        if used:
            match.write_to(before)
            held.runs = [*used]
            self._context.keep(held, used)
        for piece in pieces:
            if not self._context.load(
                piece.data, piece.num_tokens, held, first=piece.first, count=piece.count, at=piece.at
            ):
                unread.append(piece)
        held.runs.sort()
        return held, unread

    def late_correction(self, held: Cells, spans: Runs, runs: Runs, weight: float) -> LateCorrection:
        return LateCorrection(self.written, self.rotations or [], held, spans, runs, weight)

    def written(self, cells: Cells, start: int, stop: int) -> WrittenKV:
        """The KV of positions ``[start, stop)``."""
        return WrittenKV(self._context.dump(cells, start, stop), start, stop)

    def _measured_rotations(self) -> list[Rotation] | None:
        """How the keys of all layers are rotated; None, with a warning, if this version of llama.cpp writes or rotates
        KV otherwise than those that were tried. Raises UnsupportedModelError: keys that it moves are not those that it
        computes there."""
        positions = measured_positions(self.reuse_tokens)
        ids = [self.vocab_size // 3, self.vocab_size * 2 // 3]
        data = self._context.alone([(position, token) for position in positions for token in ids])
        written, last = iter(data), positions[-1]
        try:
            found = [[WrittenKV(next(written), at, at + 1) for _ in ids] for at in positions]
            moved = WrittenKV(self._context.moved(data[0], last), last, last + 1)
        except UnknownLayoutError as error:
            logger.warning("KV of %s is not corrected: llama.cpp writes it in an unknown way (%s)", self.name, error)
            return None
        if not are_alike(moved, found[-1][0]):
            self._weights.refuse("llama.cpp moves its keys otherwise than it computes them")
        rotations = measured_rotations(
            found,
            positions,
            rotary_dim=int(self._weights.meta("{}.rope.dimension_count") or self.head_dim),
            head_dim=self.head_dim,
            in_pairs=self._weights.rotates_pairs,
        )
        if rotations is None:
            logger.warning("KV of %s is not corrected: how llama.cpp rotates its keys is not known", self.name)
        return rotations

    def compute_in_order(
        self,
        ids: Sequence[int],
        held: Cells,
        runs: Iterable[tuple[int, int]],
        capacity: int,
        *,
        before_last: Callable[[Cells], None] | None = None,
    ) -> tuple[LlamaState, torch.Tensor]:
        state = self._state(max(capacity, len(ids)))
        *earlier, last = runs
        groups = grouped(earlier, held.runs or (), most=1 + self._context.spare())
        for group in groups:
            self._context.compute_apart(state.cells, held, ids, group)
        if before_last is not None:
            before_last(state.cells)
        logits = self._context.compute_apart(state.cells, held, ids, [last], logits_of=1)
        assert logits is not None and state.cells.length == len(ids), "the prompt's last token is computed"
        return state, logits[0]


def grouped(
    runs: Iterable[tuple[int, int]], stored: Iterable[tuple[int, int]], *, most: int
) -> list[list[tuple[int, int]]]:
    """Runs that are computed in one call, in which they see each other as stored.

    Args:
        runs: neighbouring positions, ascending.
        stored: positions that have stored KV. What has none, and is more than a separator, is computed before all that
            comes after it.
        most: runs of a call.
    """
    runs = [*runs]
    edges = np.array([edge for pair in stored for edge in pair], np.int64)
    stretches = [list[tuple[int, int]]()]
    for start, stop in runs:
        stretches[-1].append((start, stop))
        new = np.searchsorted(edges, np.arange(start, stop), side="right") % 2 == 0
        if new.sum() > _SEPARATOR_TOKENS:
            stretches.append([])
    calls = _long_calls if runs and runs[-1][1] > _LONG else _calls
    return [group for stretch in stretches for group in calls(stretch, most)]


def _calls(runs: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Only short neighbours share a call."""
    group, rows = list[tuple[int, int]](), 0
    for start, stop in runs:
        group.append((start, stop))
        rows += stop - start
        if rows >= _CALL_TOKENS or len(group) == most:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _long_calls(runs: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """All calls but the first have 64 tokens or a multiple of it: two more would take a third longer. The first takes
    what is left, because a token of a small call costs least near the prompt's beginning."""
    rows = sum(stop - start for start, stop in runs)
    group, room = list[tuple[int, int]](), rows % _LONG_CALL_TOKENS or _LONG_CALL_TOKENS
    for start, stop in runs:
        while start < stop:
            if not group:  # a long run sees itself
                room += max(0, stop - start - room) // _LONG_CALL_TOKENS * _LONG_CALL_TOKENS
            group.append((start, start := min(stop, start + room)))
            room -= group[-1][1] - group[-1][0]
            if not room or len(group) == most:
                yield group
                group, room = [], _LONG_CALL_TOKENS
    if group:
        yield group
