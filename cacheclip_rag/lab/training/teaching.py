"""What a chunk context learns from: prompts read by full prefill, and how far a read over chunk KV is from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ...chunks.context import CONTEXTS
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...errors import ConfigurationError
from ...guards.fidelity import kl_divergence
from ...prompt.layout import lay_out
from ...runtime.transformers.model import ModelRuntime
from ..evaluation.questions import INSTRUCTION, ask
from ..evaluation.records import Record, RecordChunk
from ..models import transformers_model
from .gradients import LayerKV, Part, Rows, encode_chunks, read_prompt
from .reading import Reading

__all__ = ["TaughtPrompt", "Teacher", "choose_some", "distances"]

_ANSWER_TOKENS = 14
_SYSTEM_PROMPTS = (INSTRUCTION, "You are a helpful assistant. Use the context to answer.", "")
"""The learned KV follows the shared prefix, and must not depend on its words."""
_CHOSEN_SPAN = 8
"""Neighbouring tokens that are chosen together."""


@dataclass(frozen=True, slots=True)
class TaughtPrompt:
    """A prompt with its teacher's logits and hidden states. Tensors of ids and slots are on the CPU."""

    number: int
    """Number of the prompt, which decides the system prompt."""
    chunks: tuple[torch.Tensor, ...]
    """Token ids of each chunk as it is stored."""
    parts: tuple[slice, ...]
    """The tokens of each chunk that stand in the prompt."""
    starts: tuple[int, ...]
    """First slot of each part."""
    ids: torch.Tensor
    """``(num_tokens,)``: the common part, up to the last chunk's end."""
    num_prefix: int
    """Tokens of the shared prefix."""
    prefix: Sequence[LayerKV]
    """Per layer the shared prefix's KV."""
    endings: tuple[torch.Tensor, ...]
    """Per question the ids after the common part: the rest of the prompt and the answer, without its last token."""
    answers: torch.Tensor
    """Rows of the endings whose logits are compared, counted over all endings."""
    first: torch.Tensor
    """``(num_answers,)`` bool: whether a row gives the first token of an answer."""
    logits: torch.Tensor
    """``(num_answers, vocab_size)``"""
    hidden: tuple[torch.Tensor, ...]
    """``(num_ending_rows, hidden_size)`` of every second layer."""

    @property
    def spans(self) -> list[torch.Tensor]:
        """Slots of each chunk."""
        return [
            torch.arange(start, start + part.stop - part.start)
            for start, part in zip(self.starts, self.parts, strict=True)
        ]

    @property
    def kept(self) -> torch.Tensor:
        """Which tokens of all chunks, one after the other, stand in the prompt."""
        before = accumulate((len(chunk) for chunk in self.chunks), initial=0)
        parts = zip(before, self.parts, strict=False)
        return torch.cat([torch.arange(begin + part.start, begin + part.stop) for begin, part in parts])


class Teacher:
    """Makes prompts and reads them by full prefill. Prompts take turns in using several system prompts.

    Raises:
        ConfigurationError: the model's KV cannot be reused, or its layers are on several devices.
    """

    def __init__(self, config: EngineConfig) -> None:
        options: dict[str, Any] = {"store": None, "max_bytes": None, "auxiliary": None, "heads": "none"}
        options |= {"method": "full", "chunk_context": "passages", "shadow_rate": 0.0, "fallback": "error"}
        self._engines = [CacheClipEngine(config, **options, system_prompt=prompt) for prompt in _SYSTEM_PROMPTS]
        self.runtime: ModelRuntime = transformers_model(self._engines[0].primary)
        if len(set(self.runtime.layer_devices)) > 1:
            raise ConfigurationError(
                f"a context is trained on one device, and the layers of {self.runtime.name!r} are on several. Name "
                "one, such as --device cuda."
            )
        for parameter in self.runtime.model.parameters():
            parameter.requires_grad_(False)

    def passages(self, number: int) -> torch.Tensor:
        """KV of the neutral passages right after the shared prefix of prompt ``number``."""
        parts = self._engine(number).parts
        start = len(parts.prefix_caches.prefix_ids)
        return parts.primary(CONTEXTS["passages"]).prefix[:, :, :, start:].clone().to(self.runtime.device)

    @torch.no_grad()
    def read(self, reading: Reading, number: int) -> TaughtPrompt:
        """A reading as a prompt, with full prefill's logits and hidden states."""
        caches, runtime = self._engine(number).parts.prefix_caches, self.runtime
        endings: list[torch.Tensor] = []
        answers: list[torch.Tensor] = []
        row = 0
        for question, answer in reading.questions:
            asked = ask(self._engine(number), _as_record(reading.chunks, question, answer))
            layout = lay_out(asked.segments, runtime, caches.tokenize, caches.prefix_ids)
            end = layout.chunks[-1].stop
            ending, first = self._ending(layout.ids[end:], answer)
            endings.append(ending)
            answers.append(torch.arange(row + first, row + len(ending)))
            row += len(ending)
        ids, num_prefix, compared = layout.ids[:end], layout.num_prefix, torch.cat(answers)
        prefix = [(kv[0], kv[1]) for kv in caches.prefix[:, :, :, :num_prefix].to(runtime.device)]
        rows = Rows(torch.arange(num_prefix, end), endings, end - num_prefix + compared)
        logits, hidden = read_prompt(runtime, ids, [_padded_pair(kv, end) for kv in prefix], rows)
        return TaughtPrompt(
            number,
            tuple(torch.tensor(caches.tokenize(span.whole).ids) for span in layout.chunks),
            tuple(slice(span.first, span.first + len(span.tokens)) for span in layout.chunks),
            tuple(span.start for span in layout.chunks),
            ids,
            num_prefix,
            prefix,
            tuple(endings),
            compared,
            torch.cat([torch.arange(len(of_answer)) == 0 for of_answer in answers]),
            logits,
            tuple(hidden[1::2]),
        )

    def _engine(self, number: int) -> CacheClipEngine:
        return self._engines[number % len(self._engines)]

    def _ending(self, closing: torch.Tensor, answer: str) -> tuple[torch.Tensor, int]:
        """Ids after the common part, and the row that gives the answer's first token."""
        along = list(self.runtime.tokenize(answer.strip()).ids)[:_ANSWER_TOKENS]
        if len(along) < _ANSWER_TOKENS:
            along += sorted(self.runtime.eos_ids)[:1]
        return torch.cat((closing, torch.tensor(along[:-1], dtype=torch.int64))), len(closing) - 1


def _as_record(chunks: Sequence[str], question: str, answer: str) -> Record:
    return Record("", "", question, (answer,), tuple(RecordChunk("", chunk) for chunk in chunks), {})


def _padded(kv: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((kv, kv.new_zeros(kv.shape[0], length - kv.shape[1], kv.shape[2])), dim=1)


def _padded_pair(kv: LayerKV, length: int) -> LayerKV:
    return _padded(kv[0], length), _padded(kv[1], length)


def distances(
    runtime: ModelRuntime, prompt: TaughtPrompt, context: torch.Tensor, chosen: torch.Tensor, correction: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far a read is from full prefill if its chunks are encoded after ``context``.

    Args:
        context: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.
        chosen: ``(num_tokens,)`` bool: chunk tokens that are computed again.
        correction: share of the mean change that the other tokens get.

    Returns:
        KL in nats, ``(num_answers,)``; the relative error of hidden states; and whether the likeliest token is full
        prefill's, ``(num_answers,)`` bool.
    """
    encoded = encode_chunks(runtime, prompt.chunks, _joined(prompt.prefix, context.to(runtime.dtype)))
    end, spans = len(prompt.ids), prompt.spans
    slots = torch.cat(spans)
    on_device, kept = slots.to(runtime.device), prompt.kept.to(runtime.device)
    base = [
        (
            keys.index_copy(1, on_device, of_chunks[0].index_select(1, kept)),
            values.index_copy(1, on_device, of_chunks[1].index_select(1, kept)),
        )
        for (keys, values), of_chunks in zip((_padded_pair(kv, end) for kv in prompt.prefix), encoded, strict=True)
    ]
    computed = chosen.clone()
    computed[prompt.num_prefix :] = True
    computed[slots] = chosen[slots]
    context_rows = computed.nonzero().flatten()
    rows = Rows(context_rows, prompt.endings, len(context_rows) + prompt.answers)
    parts = _parts(spans, chosen, context_rows) if correction else []
    logits, hidden = read_prompt(runtime, prompt.ids, base, rows, parts, correction)
    errors = [
        (state.float() - taught.float()).square().sum() / taught.float().square().sum()
        for state, taught in zip(hidden[1::2], prompt.hidden, strict=True)
    ]
    same = logits.argmax(-1) == prompt.logits.argmax(-1)
    return kl_divergence(prompt.logits, logits), torch.stack(errors).mean(), same


def _joined(prefix: Sequence[LayerKV], context: torch.Tensor) -> list[LayerKV]:
    return [
        (torch.cat((keys, of_context[0]), dim=1), torch.cat((values, of_context[1]), dim=1))
        for (keys, values), of_context in zip(prefix, context, strict=True)
    ]


def _parts(spans: Sequence[torch.Tensor], chosen: torch.Tensor, context_rows: torch.Tensor) -> list[Part]:
    """The chunks of which some tokens are computed again and some are not."""
    halves = [(span[chosen[span]], span[~chosen[span]]) for span in spans]
    return [
        Part(again, torch.searchsorted(context_rows, again), stale)
        for again, stale in halves
        if len(again) and len(stale)
    ]


def choose_some(prompt: TaughtPrompt, ratio: float, rng: random.Random) -> torch.Tensor:
    """Chunk tokens as the engine's default method would choose them, but without an auxiliary model: half of the budget
    for the starts of chunks, half for random spans. ``(num_tokens,)`` bool."""
    chosen = torch.zeros(len(prompt.ids), dtype=torch.bool)
    spans = prompt.spans
    budget = round(ratio * sum(map(len, spans)))
    if not budget:
        return chosen
    starts = max(1, budget // (2 * len(spans)))
    for span in spans:
        chosen[span[:starts]] = True
    while int(chosen.sum()) < budget:
        span = spans[rng.randrange(len(spans))]
        at = rng.randrange(len(span))
        chosen[span[at : at + _CHOSEN_SPAN]] = True
    return chosen
