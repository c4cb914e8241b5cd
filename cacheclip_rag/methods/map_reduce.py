"""Map-reduce and map-rerank: each chunk is put to the model in its own prompt, and one answer is made of the answers.

Source: LangChain's map-reduce and map-rerank documents chains (``load_summarize_chain``, ``load_qa_chain``), baselines
for methods that let the model read all chunks together. No token of one chunk sees another chunk. With chunk context
``prefix``, a chunk right after the shared prefix is exact as stored. With ``passages``, the default, it is not: these
prompts are prefilled after the prefix that the prefix cache holds, and their chunks are not stored a second time.
Departures: each prompt is the user's prompt with one chunk left in it (text between chunks is dropped), not a separate
template per step; see also :class:`MapRerank`. The effective ratio is the share of chunk tokens computed over all these
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..prompt.segments import Fresh, Segment
from ..types import Answer, Event
from .composition import Composition
from .full import Full

__all__ = ["MapReduce", "MapRerank"]


@dataclass(frozen=True, slots=True)
class MapReduce(Full):
    """Answers each chunk's prompt greedily, then answers a last prompt in which these answers replace the chunks.

    The prompt with all its chunks may be longer than the model's context.
    """

    name: str = field(default="map_reduce", kw_only=True)

    reuses_chunks: ClassVar[bool] = True
    composes: ClassVar[bool] = True

    map_tokens: int = 64
    """Most tokens of one intermediate answer."""

    def __post_init__(self) -> None:
        super(MapReduce, self).__post_init__()
        check_whole_number("map_tokens", self.map_tokens, least=1, of="tokens")

    def compose(self, parts: Composition) -> Iterator[Event]:
        greedy = replace(parts.params, max_tokens=self.map_tokens, temperature=0.0)
        answers = [parts.answer(parts.around(chunk), greedy) for chunk in parts.chunks]
        lines = [" ".join(answer.text.split()) for answer in answers]
        yield from parts.stream(parts.around([Fresh("\n".join(filter(None, lines)))]), self.name)


@dataclass(frozen=True, slots=True)
class MapRerank(Full):
    """The answer from one chunk with the highest mean log-probability of its tokens; empty answers come last.

    LangChain asks the model to write a score after its answer. Small models cannot, so log-probability replaces it.
    """

    name: str = field(default="map_rerank", kw_only=True)

    reuses_chunks: ClassVar[bool] = True
    composes: ClassVar[bool] = True

    def compose(self, parts: Composition) -> Iterator[Event]:
        rated = [_rated(parts, parts.around(chunk)) for chunk in parts.chunks]
        best, _ = max(rated, key=lambda pair: (bool(pair[0].text.strip()), pair[1]))
        yield Event(best.text)
        yield Event("", parts.closing(best, self.name, parts.clock.elapsed()))


def _rated(parts: Composition, segments: Sequence[Segment]) -> tuple[Answer, float]:
    """An answer and the mean log-probability of its tokens."""
    found: list[float] = []

    def observe(logits: torch.Tensor, token: int) -> None:
        found.append(float(logits.float().log_softmax(-1)[token]))

    answer = parts.answer(segments, parts.params, observe)
    return answer, fmean(found)
