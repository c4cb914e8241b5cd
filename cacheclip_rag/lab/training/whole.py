"""Fine-tuning of a whole auxiliary model: every weight up to the last layer in use, with the loss of the head set.

What the primary said, every epoch and every outcome are kept in a working folder as they come, so that an interrupted
run goes on where it was. Until the training is done, the state in it takes about four times the model in float32 (for a
moment twice that, while one epoch's replaces the last's).

For those who have an accelerator and a bigger auxiliary: two CPU cores train a head set in minutes, and this in hours.
The result is another model, with another fingerprint: chunk caches of the old one are not taken for its own.
"""

from __future__ import annotations

import contextvars
import copy
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...checks import check_whole_number
from ...chunks.caches import ChunkCaches
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...errors import ConfigurationError
from ...models.load import load_model
from ...paths import cache_home
from ...runtime.transformers.model import ModelRuntime, transformers_model
from ...selection.auxiliary import without_sinks
from ...selection.heads import HEADS_FILE, HeadSet, weights_digest
from ...selection.scoring import Question
from .calibrate import calibrate, capped_mean, downstream, open_engine
from .families import Sample, synthetic_samples
from .features import marked
from .folder import Kept, digest_of, engine_inputs, forget_state, resumable, train_kept
from .given import data_of
from .targets import targets_of
from .tuning import TuningSettings, check_trainable, learning_and_held_out, loss_of, spaced

__all__ = ["WholeFigures", "WholeFineTuning", "WholeSample", "WholeTuned", "check_folders", "finetune_whole"]

_ATTENTION = "cacheclip_training"
_seen: contextvars.ContextVar[dict[int, tuple[torch.Tensor, torch.Tensor, float]] | None] = contextvars.ContextVar(
    "queries_and_keys", default=None
)


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Stock attention; queries and keys of layers that are asked for are kept on the way."""
    wanted = _seen.get()
    if wanted is not None and module.layer_idx in wanted:
        wanted[module.layer_idx] = (query, key, float(kwargs.get("scaling") or query.shape[-1] ** -0.5))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class WholeSample:
    """Token ids of a sample, and what should be found in its chunks."""

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    evidence: torch.Tensor
    """``(num_tokens,)`` bool, over all chunks side by side."""
    target: torch.Tensor | None = None
    """``(num_tokens,)``, sum 1, or None."""

    @classmethod
    def of(cls, caches: ChunkCaches, sample: Sample, target: torch.Tensor | None = None) -> WholeSample:
        tokens = [caches.tokenize(chunk) for chunk in sample.chunks]
        question = Question.of(caches.runtime, sample.question).ids
        chunks = tuple(each.ids for each in tokens)
        return cls(tuple(caches.prefix_ids), chunks, question, marked(tokens, sample.evidence), target)

    @property
    def lengths(self) -> list[int]:
        return [len(chunk) for chunk in self.chunks]


class WholeTuned(torch.nn.Module):
    """A copy of the auxiliary model whose head set scores, differentiable in every weight."""

    def __init__(self, auxiliary: ModelRuntime, heads: HeadSet, settings: TuningSettings) -> None:
        super().__init__()
        AttentionInterface.register(_ATTENTION, _attention)
        self.heads, self.settings, self.target_scale = heads, settings, 1.0
        assert not heads.is_updated, "training begins with heads as they come"
        self.model = copy.deepcopy(auxiliary.model).float()
        self.model.set_attn_implementation(_ATTENTION)
        self.model.config.use_cache = False
        self.mix = torch.nn.Parameter(heads.weights.clamp(min=1e-4).log())
        layers, last = self.model.base_model.layers, heads.layers[-1]
        self._above = list(layers[last + 1 :])  # in a list, they are no part of what is run, trained or moved
        self.model.base_model.layers = layers[: last + 1]
        self.model.requires_grad_(False)
        self.model.base_model.layers.requires_grad_(True)
        self.model.get_input_embeddings().requires_grad_(True)

    def forward(self, sample: WholeSample) -> torch.Tensor:
        """``(num_tokens,)``: the score of every token, sum 1."""
        rows = [[*sample.prefix, *chunk, *sample.question] for chunk in sample.chunks]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.mix.device)
        wanted: dict[int, Any] = dict.fromkeys(self.heads.layers)
        token = _seen.set(wanted)
        try:
            # padding comes last, where nothing before it can see it
            self.model.base_model(input_ids=ids)
        finally:
            _seen.reset(token)
        maps = []
        for layer in self.heads.layers:
            query, key, scaling = wanted[layer]
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            own = [head for of, head in self.heads.heads if of == layer]
            logits = []
            for number, length in enumerate(sample.lengths):
                start = len(sample.prefix)
                stop = start + length
                asked = query[number, own, stop : stop + len(sample.question)]
                found = asked @ key[number, own, start:stop].transpose(-1, -2) * scaling
                logits.append(without_sinks(found, self.settings.sinks))
            maps.append(torch.cat(logits, dim=-1).softmax(-1).mean(1))
        scores: torch.Tensor = self.mix.softmax(0) @ torch.cat(maps)
        return scores

    def loss(self, sample: WholeSample) -> torch.Tensor:
        target = None if sample.target is None else sample.target.to(self.mix.device)
        return loss_of(
            self(sample), sample.evidence.to(self.mix.device), target, self.settings.target_weight, self.target_scale
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters for the optimizer."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": learning, "weight_decay": self.settings.weight_decay}]

    def save(self, folder: Path, tokenizer: Any) -> None:
        """The model, with the layers above as they were, and its tokenizer, as transformers writes them."""
        whole = copy.deepcopy(self.model).cpu()
        whole.base_model.layers.extend(copy.deepcopy(self._above))
        whole.config.use_cache = True
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def head_set(self, auxiliary_sha256: str, about: dict[str, Any]) -> HeadSet:
        """The heads with the weights learned, for the saved model."""
        weights = self.mix.detach().softmax(0).cpu().clone()
        return replace(
            self.heads, auxiliary_sha256=auxiliary_sha256, weights=weights, sinks=self.settings.sinks, about=about
        )


@dataclass(frozen=True, slots=True)
class WholeFigures:
    """A model on held-out samples: those that say when to stop, of the families trained on."""

    name: str
    held_out_found: float
    """Share of what is wanted, as in the history."""
    held_out_loss: float
    first_token_kl: tuple[float, ...] = ()
    """Per prompt asked of the primary, nats."""
    answer_kl: tuple[float, ...] = ()

    @property
    def kl(self) -> float | None:
        """Mean KL along the answer, no prompt counting more than a nat; None where the primary was not asked."""
        return capped_mean(self.answer_kl) if self.answer_kl else None


@dataclass(frozen=True, slots=True)
class WholeFineTuning:
    """What fine-tuning of a whole model found."""

    heads: HeadSet
    """For the model that was saved, and in its folder too, where engines look for it; else those it began with."""
    folder: Path | None
    """That model: name it as the auxiliary. None where training gained nothing, and no model was saved."""
    figures: tuple[WholeFigures, ...]
    """Before, and where training gained something after."""
    history: tuple[dict[str, float], ...]
    """Per epoch loss and held-out figures; epoch 0 is before training."""
    seconds: float
    about: dict[str, Any]
    work: Path
    """Where an interrupted run would have gone on from; may be deleted."""

    @property
    def is_tuned(self) -> bool:
        """Whether the trained model finds more in held-out samples."""
        return self.folder is not None

    @property
    def is_nearer(self) -> bool | None:
        """Whether it brings the primary's answers nearer to full prefill; None where the primary was not asked."""
        before, after = self.figures[0].kl, self.figures[-1].kl
        return None if not self.is_tuned or before is None or after is None else after < before


def check_folders(folder: Path, work: Path | None) -> None:
    """Raise ConfigurationError unless a trained model may go to ``folder``, while working files lie in ``work``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} holds something already. Give a new folder for the trained model.")
    if work is not None and folder.resolve() in (work.resolve(), *work.resolve().parents):
        raise ConfigurationError(
            f"working files in {work} would lie where the trained model goes ({folder}). Name another folder for them."
        )


def finetune_whole(
    config: EngineConfig,
    folder: Path,
    settings: TuningSettings,
    *,
    heads: HeadSet | None = None,
    num_samples: int = 120,
    num_targets: int = 24,
    num_prompts: int = 6,
    given: Sequence[Sample] = (),
    given_from: Sequence[str] = (),
    work: Path | None = None,
) -> WholeFineTuning:
    """Train every weight of ``config.auxiliary`` up to the last layer in use, and save the model in ``folder`` if it
    finds more in held-out samples than before.

    Args:
        heads: to begin with; default what calibration finds.
        num_samples: synthetic ones; given ones come on top. A fifth is held out.
        num_targets: of all, those for which the primary is asked what it attends to and holds stale.
        num_prompts: of those held out, for the primary, before and after.
        given_from: names of the files that the given ones come from, for the report.
        work: where targets, the state of training and outcomes are kept; default a folder by these settings in
            ``$CACHECLIP_HOME/training``.

    Raises:
        ConfigurationError: no auxiliary model, fewer than no prompts, too few samples, a folder that holds something.
        ModelError: models that cannot be used so.
        Interrupted: the user stopped it; it goes on from the working folder.
    """
    check_folders(folder, work)
    if num_samples + len(given) < 10:
        raise ConfigurationError(f"fine-tuning needs at least 10 samples, got {num_samples + len(given)}.")
    check_whole_number("num_prompts", num_prompts, of="prompts")
    started = time.perf_counter()
    engine = open_engine(config)
    runtime, caches = transformers_model(engine.auxiliary), engine.parts.auxiliary_caches
    samples = [*synthetic_samples("train", num_samples, seed=settings.seed), *given]
    inputs = {
        **engine_inputs(engine),
        "scope": "model",
        "began_with": heads.digest() if heads else None,
        "settings": asdict(settings),
        "targets": num_targets,
        "samples_sha256": digest_of([each.as_read() for each in samples]),
    }
    kept = Kept(work or cache_home() / "training" / digest_of(inputs)[:16], engine_inputs(engine))
    with resumable(kept.folder):
        heads = heads or calibrate(config, given=given, seed=settings.seed, folder=kept.folder).heads
        check_trainable(runtime, heads)
        targets = targets_of(engine, samples, spaced(range(len(samples)), num_targets), kept)
        prepared = [WholeSample.of(caches, sample, targets.get(number)) for number, sample in enumerate(samples)]
        _, held_out = learning_and_held_out(len(samples))
        prompts = [samples[number] for number in spaced(held_out, num_prompts)]
        kl_before = _kl(engine, prompts, heads, kept)
        tuned = WholeTuned(runtime, heads, settings).to(runtime.device)
        digest = digest_of({**inputs, "began_with": heads.digest()})
        state = train_kept(tuned, prepared, kept.folder, digest, title="training the whole model")
        about = {
            "command": "finetune --scope model",
            "auxiliary": Path(str(config.auxiliary)).name,
            "primary": Path(config.primary).name,
            "began_with": heads.digest(),
            "settings": asdict(settings),
            "seed": settings.seed,
            "samples": num_samples,
            "given": len(given),
            "targets": num_targets,
            "prompts": len(prompts),
            **data_of(len(given), given_from),
        }
        figures = [_figures("before", state.history[0], kl_before)]
        if state.best_epoch:
            with _all_or_nothing(folder) as temporary:
                tuned.save(temporary, runtime.tokenizer)
                saved = load_model(str(temporary), dtype=config.dtype, device=config.auxiliary_device or config.device)
                heads = tuned.head_set(weights_digest(saved.fingerprint), about)
                heads.save(temporary / HEADS_FILE)
                del tuned, saved
                after = open_engine(replace(config, auxiliary=str(temporary)))
                kl_after = _kl(after, prompts, heads, Kept(kept.folder, engine_inputs(after)))
            figures.append(_figures("after", state.history[state.best_epoch], kl_after))
    forget_state(kept.folder, digest)
    return WholeFineTuning(
        heads,
        folder if state.best_epoch else None,
        tuple(figures),
        tuple(state.history),
        time.perf_counter() - started,
        about,
        kept.folder,
    )


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder to write to; once everything is done it is ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        yield Path(temporary)
        Path(temporary).chmod(0o755)
        os.replace(temporary, folder)
        Path(temporary).mkdir()  # for its own removal


def _kl(engine: CacheClipEngine, prompts: Sequence[Sample], heads: HeadSet, kept: Kept) -> list[tuple[float, float]]:
    """Of the first token and along the answer, for each prompt."""
    [outcomes] = downstream(engine, prompts, [heads], kept=kept)
    return outcomes


def _figures(name: str, epoch: dict[str, float], outcomes: Sequence[tuple[float, float]]) -> WholeFigures:
    first, along = (tuple(each) for each in zip(*outcomes, strict=True)) if outcomes else ((), ())
    return WholeFigures(name, epoch["held_out_found"], epoch["held_out_loss"], first, along)
