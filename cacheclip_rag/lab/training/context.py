"""Training of a chunk context: the KV behind which chunks are encoded, so that full prefill's answers follow from them.

Source: SemPIC (arXiv:2607.28069) and KV Packet (arXiv:2604.13226) train parameters that act only while chunks are
encoded. Departure: here they are the KV of the neutral passages' tokens, so that ingestion runs the unmodified model
behind another stored prefix. The model that reads, answers and decodes is unchanged, and so is its full prefill.

Loss: KL from full prefill along right answers, the first token counting half, plus a small loss of hidden states. An
error of KV is no part of it: most of it depends on the other chunks and cannot be mended; KV can only be made to read
better.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...chunks.context import CONTEXTS
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...guards.fidelity import kl_divergence
from ...prompt.layout import lay_out
from ...runtime.transformers.model import ModelRuntime
from ..evaluation.questions import ask
from ..evaluation.records import Passage, Record
from ..models import transformers_model
from .folder import digest_of, load, resumable, save
from .gradients import LayerKV, Part, Rows, encode_chunks, read_prompt
from .reading import Reading, Readings

__all__ = ["ContextSettings", "Learned", "TaughtPrompt", "train_context"]

logger = logging.getLogger(__name__)

_ANSWER_TOKENS = 14
_SYSTEM_PROMPTS = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.",
    "You are a helpful assistant. Use the context to answer.",
    "",
)
"""The learned KV follows the shared prefix, and must not depend on its words."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Settings of a training."""

    steps: int = 160
    batch: int = 4
    """Prompts per step."""
    learning_rate: float = 1e-2
    """Of Adam, in standard deviations of each layer's keys and values; falls by a cosine."""
    warmup: int = 5
    average: float = 0.97
    """Decay of the moving average of the parameters, which is what is kept."""
    hidden_weight: float = 0.02
    correction: float = 0.5
    held_out: int = 12
    """Prompts that decide whether the learned context is kept."""
    check_every: int = 40
    """Steps between checks."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TaughtPrompt:
    """A prompt with its teacher's logits and hidden states."""

    chunks: tuple[torch.Tensor, ...]
    """Token ids of each chunk."""
    starts: tuple[int, ...]
    ids: torch.Tensor
    """``(num_tokens,)``: the common part, up to the last chunk's end."""
    num_prefix: int
    prefix: Sequence[LayerKV]
    endings: tuple[torch.Tensor, ...]
    answers: torch.Tensor
    """Rows of the endings whose logits are compared, counted over all endings."""
    first: torch.Tensor
    """``(num_answers,)`` bool: whether a row gives the first token of an answer."""
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    """Of every second layer."""


class Teacher:
    """Makes prompts and reads them by full prefill."""

    def __init__(self, config: EngineConfig) -> None:
        self.engines = [
            CacheClipEngine(
                config, store=None, max_bytes=None, auxiliary=None, method="full", system_prompt=prompt, heads="none"
            )
            for prompt in _SYSTEM_PROMPTS
        ]
        self.runtime: ModelRuntime = transformers_model(self.engines[0].primary)
        for parameter in self.runtime.model.parameters():
            parameter.requires_grad_(False)

    def context(self) -> torch.Tensor:
        """KV of the passages' tokens right after the first system prompt: where training begins."""
        parts = self.engines[0].parts
        num_prefix = len(parts.prefix_caches.prefix_ids)
        return parts.primary(CONTEXTS["passages"]).prefix[:, :, :, num_prefix:].clone()

    @torch.no_grad()
    def read(self, reading: Reading, number: int) -> TaughtPrompt:
        """The prompt of a reading, with full prefill's logits and hidden states."""
        engine, runtime = self.engines[number % len(self.engines)], self.runtime
        caches = engine.parts.prefix_caches
        endings: list[torch.Tensor] = []
        answers: list[torch.Tensor] = []
        first: list[torch.Tensor] = []
        row = 0
        chunks = tuple(Passage("", chunk) for chunk in reading.chunks)
        for question, answer in reading.questions:
            asked = ask(engine, Record("", "", question, (answer,), chunks, {}))
            layout = lay_out(asked.segments, caches.tokenize_segment, caches.prefix_ids)
            end = layout.chunks[-1].stop
            closing = layout.ids[end:]
            along = list(runtime.tokenize(answer.strip()).ids)[:_ANSWER_TOKENS]
            if len(along) < _ANSWER_TOKENS:
                along += sorted(runtime.eos_ids)[:1]
            ending = torch.cat((closing, torch.tensor(along[:-1], dtype=torch.int64)))
            endings.append(ending)
            answers.append(torch.arange(row + len(closing) - 1, row + len(ending)))
            is_first = torch.zeros(len(answers[-1]), dtype=torch.bool)
            is_first[0] = True
            first.append(is_first)
            row += len(ending)
        ids, num_prefix = layout.ids[:end], layout.num_prefix
        prefix = [(kv[0], kv[1]) for kv in caches.prefix[:, :, :, :num_prefix]]
        rows = Rows(torch.arange(num_prefix, end), endings, end - num_prefix + torch.cat(answers))
        base = [tuple(_padded(each, end) for each in kv) for kv in prefix]
        logits, hidden = read_prompt(runtime, ids, base, rows)  # type: ignore[arg-type]
        return TaughtPrompt(
            tuple(torch.tensor(span.tokens.ids) for span in layout.chunks),
            tuple(span.start for span in layout.chunks),
            ids,
            num_prefix,
            prefix,
            tuple(endings),
            torch.cat(answers),
            torch.cat(first),
            logits,
            tuple(hidden[1::2]),
        )


def _padded(kv: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((kv, kv.new_zeros(kv.shape[0], length - kv.shape[1], kv.shape[2])), dim=1)


class Learned(torch.nn.Module):
    """The context's KV as parameters: a change in units of each layer's standard deviation."""

    def __init__(self, begin: torch.Tensor) -> None:
        """``begin``: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE."""
        super().__init__()
        self.begin = begin.float()
        centred = self.begin - self.begin.mean(3, keepdim=True)
        self.unit = centred.std(dim=(2, 3, 4), keepdim=True)
        self.change = torch.nn.Parameter(torch.zeros_like(self.begin))

    def kv(self, change: torch.Tensor | None = None) -> torch.Tensor:
        return self.begin + self.unit * (self.change if change is None else change)


def distances(
    runtime: ModelRuntime,
    prompt: TaughtPrompt,
    context: torch.Tensor,
    chosen: torch.Tensor,
    correction: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL ``(num_answers,)`` and the relative error of hidden states, for chunks encoded behind ``context``.

    Args:
        chosen: ``(num_tokens,)`` bool: chunk tokens that are computed again.
    """
    own = context.to(runtime.dtype)
    before = [
        (torch.cat((keys, of_context[0]), dim=1), torch.cat((values, of_context[1]), dim=1))
        for (keys, values), of_context in zip(prompt.prefix, own, strict=True)
    ]
    encoded = encode_chunks(runtime, prompt.chunks, before)
    end = len(prompt.ids)
    spans = [
        torch.arange(start, start + len(chunk)) for start, chunk in zip(prompt.starts, prompt.chunks, strict=True)
    ]
    slots = torch.cat(spans)
    base = []
    for of_prefix, of_chunks in zip(prompt.prefix, encoded, strict=True):
        pair = [
            _padded(kv, end).index_copy(1, slots, stored) for kv, stored in zip(of_prefix, of_chunks, strict=True)
        ]
        base.append((pair[0], pair[1]))
    computed = chosen.clone()
    computed[prompt.num_prefix :] |= True
    computed[slots] = chosen[slots]
    context_rows = computed.nonzero().flatten()
    parts = []
    for span in spans:
        of_chosen, of_stale = span[chosen[span]], span[~chosen[span]]
        if correction and len(of_chosen) and len(of_stale):
            parts.append(Part(of_chosen, torch.searchsorted(context_rows, of_chosen), of_stale))
    rows = Rows(context_rows, prompt.endings, len(context_rows) + prompt.answers)
    logits, hidden = read_prompt(runtime, prompt.ids, base, rows, parts, correction)
    errors = [
        (state.float() - taught.float()).square().sum() / taught.float().square().sum()
        for state, taught in zip(hidden[1::2], prompt.hidden, strict=True)
    ]
    return kl_divergence(prompt.logits, logits), torch.stack(errors).mean()


def choose_some(prompt: TaughtPrompt, ratio: float, rng: random.Random) -> torch.Tensor:
    """Chunk tokens as the engine's default method would choose them, but without an auxiliary model: half of the
    budget for the starts of chunks, half for random spans of eight tokens."""
    chosen = torch.zeros(len(prompt.ids), dtype=torch.bool)
    total = sum(map(len, prompt.chunks))
    budget = round(ratio * total)
    if not budget:
        return chosen
    starts = max(1, budget // (2 * len(prompt.chunks)))
    for start, chunk in zip(prompt.starts, prompt.chunks, strict=True):
        chosen[start : start + min(starts, len(chunk))] = True
    while int(chosen.sum()) < budget:
        number = rng.randrange(len(prompt.chunks))
        start, chunk = prompt.starts[number], prompt.chunks[number]
        at = rng.randrange(len(chunk))
        chosen[start + at : start + min(at + 8, len(chunk))] = True
    return chosen


def _loss(kl: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Half for the first tokens of answers, half for all."""
    return 0.5 * kl[first].mean() + 0.5 * kl.mean()


@dataclass(slots=True)
class _State:
    step: int
    change: torch.Tensor
    mean: torch.Tensor
    optimizer: torch.optim.Adam
    history: list[dict[str, Any]]


def train_context(
    config: EngineConfig,
    settings: ContextSettings,
    *,
    data: Sequence[str | Path] = (),
    folder: Path,
    minutes: float | None = None,
) -> Any:
    """Train; continues from ``folder``."""
    teacher = Teacher(config)
    runtime = teacher.runtime
    readings = Readings(runtime, data, seed=settings.seed)
    begin = teacher.context()
    learned = Learned(begin)
    optimizer = torch.optim.Adam([learned.change], lr=settings.learning_rate, betas=(0.9, 0.98))
    about = {
        "primary_sha256": runtime.fingerprint,
        "settings": asdict(settings),
        "data": [Path(path).name for path in data],
        "begin": CONTEXTS["passages"].sha256,
    }
    digest = digest_of(about)
    path = folder / f"context-{digest[:20]}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    mean = torch.zeros_like(learned.change)
    step, history = 0, []
    loaded = load(path, digest)
    if loaded is not None:
        tensors, header = loaded
        learned.change.data.copy_(tensors["change"])
        mean = tensors["mean"]
        numbers = json.loads(header["numbers"])
        step, history = numbers["step"], numbers["history"]
        optimizer.zero_grad()
        learned.change.grad = torch.zeros_like(learned.change)
        optimizer.step()  # makes the state that is loaded
        learned.change.data.copy_(tensors["change"])
        state = optimizer.state[learned.change]
        state["exp_avg"].copy_(tensors["exp_avg"])
        state["exp_avg_sq"].copy_(tensors["exp_avg_sq"])
        state["step"] = torch.tensor(float(numbers["step"]))
    held_out = [teacher.read(readings[-1 - n], n) for n in range(settings.held_out)]

    @torch.no_grad()
    def check(change: torch.Tensor) -> dict[str, Any]:
        context = learned.kv(change)
        found: dict[str, Any] = {}
        for ratio in (0.0, 0.2):
            means, firsts = [], []
            for number, prompt in enumerate(held_out):
                chosen = choose_some(prompt, ratio, random.Random(number))
                kl, _ = distances(runtime, prompt, context, chosen, settings.correction)
                means.append(float(kl.mean()))
                firsts.append(float(kl[prompt.first].mean()))
            found[f"kl@{ratio}"] = [round(x, 5) for x in means]
            found[f"first@{ratio}"] = [round(x, 5) for x in firsts]
        return found

    def keep() -> None:
        state = optimizer.state[learned.change]
        numbers = {"step": step, "history": history}
        tensors = {
            "change": learned.change.detach(),
            "mean": mean,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "kv": learned.kv(_unbiased(mean, step, settings.average)).detach(),
        }
        save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)

    def say(found: dict[str, Any]) -> None:
        history.append({"step": step, **found})
        logger.info("step %d: %s", step, {k: round(sum(v) / len(v), 4) for k, v in found.items()})

    started = time.perf_counter()
    with resumable(folder):
        if not step:
            say(check(torch.zeros_like(mean)))
        while step < settings.steps:
            if minutes is not None and time.perf_counter() - started > 60 * minutes:
                break
            rate = min(1.0, (step + 1) / settings.warmup) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            optimizer.zero_grad()
            losses = []
            for number in range(step * settings.batch, (step + 1) * settings.batch):
                rng = random.Random(f"{settings.seed}/{number}/tokens")
                prompt = teacher.read(readings[number], number)
                ratio = 0.0 if rng.random() < 0.5 else rng.uniform(0.05, 0.3)
                kl, error = distances(
                    runtime, prompt, learned.kv(), choose_some(prompt, ratio, rng), settings.correction
                )
                loss = _loss(kl, prompt.first) + settings.hidden_weight * error
                (loss / settings.batch).backward()
                losses.append((ratio, float(kl.mean()), float(kl[prompt.first].mean()), float(error)))
            norm = torch.nn.utils.clip_grad_norm_([learned.change], 1.0)
            optimizer.step()
            mean = settings.average * mean + (1 - settings.average) * learned.change.detach()
            step += 1
            logger.info("step %d, %.0f s, norm %.3f: %s", step, time.perf_counter() - started, norm,
                        [tuple(round(x, 3) for x in each) for each in losses])
            if step % settings.check_every == 0 or step == settings.steps:
                say(check(_unbiased(mean, step, settings.average)))
            if step % 5 == 0 or step == settings.steps:
                keep()
    return path


def _unbiased(mean: torch.Tensor, step: int, decay: float) -> torch.Tensor:
    """A moving average that began at 0, corrected as in Adam."""
    return mean / (1 - decay**step) if step else mean
