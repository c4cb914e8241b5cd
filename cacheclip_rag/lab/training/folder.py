"""The working folder of a calibration or fine-tuning. Each file holds a result and the digest of its inputs.

A file with other inputs, or an unreadable file, is ignored, and its result is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ... import __version__
from ...chunks.caches import ChunkCaches
from ...chunks.context import context_name
from ...engine import CacheClipEngine
from ...progress import progress_bar
from ...tensor_files import read_tensors, write_tensors
from .families import Sample
from .features import LastLayer, Seen, look
from .tuning import Learner, Trainee, TrainingState, learning_and_held_out, train

__all__ = [
    "Interrupted",
    "Kept",
    "digest_of",
    "engine_inputs",
    "load",
    "load_state",
    "load_trainee",
    "resumable",
    "save",
    "save_state",
    "save_trainee",
    "train_kept",
]

_FORMAT = 3
"""Version of the files; part of every digest."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a job that can continue from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the work so far is saved in {folder}")
        self.folder = folder


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Turn KeyboardInterrupt into :class:`Interrupted`, for a job that saves its results in ``folder``."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(folder) from stop


def digest_of(about: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps([_FORMAT, about], sort_keys=True).encode()).hexdigest()


def engine_inputs(engine: CacheClipEngine) -> dict[str, Any]:
    """Everything of an engine on which its models' outputs depend, without names and folders of models."""
    config, auxiliary, context = engine.config, engine.parts.auxiliary_caches, engine.parts.context()
    return {
        "primary_sha256": engine.primary.fingerprint,
        "primary_tokenizer_sha256": engine.primary.tokenizer_sha256,
        "auxiliary_sha256": auxiliary.runtime.fingerprint,
        "auxiliary_tokenizer_sha256": auxiliary.runtime.tokenizer_sha256,
        "prefix_ids": list(auxiliary.prefix_ids),
        "system_prompt": config.system_prompt,
        "chunk_context": context_name(context),
        "codecs": [config.codec, config.auxiliary_codec],
        "device": [config.device, config.auxiliary_device],
        "cacheclip_rag": __version__,
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """Saved results of one engine's models. Each file is named after the digest of its inputs, so that all runs with
    this folder can use it."""

    folder: Path
    inputs: dict[str, Any]
    """:func:`engine_inputs`."""

    def outcome(self, about: Any) -> tuple[float, ...] | None:
        """Saved figures for ``about``; None if there are none."""
        path, digest = self._path_of("outcome", about)
        loaded = load(path, digest)
        return None if loaded is None else tuple(loaded[0]["figures"].tolist())

    def keep_outcome(self, about: Any, figures: Sequence[float]) -> None:
        path, digest = self._path_of("outcome", about)
        save({"figures": torch.tensor(figures, dtype=torch.float64)}, {"digest": digest}, path)

    def tensors(self, kind: str, about: Any, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Saved tensors for ``about``, or new ones from ``make``."""
        path, digest = self._path_of(kind, about)
        loaded = load(path, digest)
        if loaded is not None:
            return loaded[0]
        made = make()
        save(made, {"digest": digest}, path)
        return made

    def text(self, kind: str, about: Any, make: Callable[[], str]) -> str:
        """A saved text for ``about``, or a new one from ``make``."""
        path, digest = self._path_of(kind, about)
        loaded = load(path, digest)
        if loaded is not None:
            return loaded[1]["text"]
        made = make()
        save({}, {"digest": digest, "text": made}, path)
        return made

    def look(
        self, caches: ChunkCaches, sample: Sample, layers: Sequence[int], *, sinks: int = 0, keep: int | None = None
    ) -> Seen:
        """The saved result of :func:`~cacheclip_rag.lab.training.features.look`, or a new one."""
        path, digest = self._path_of("look", {"sample": sample.as_read(), "look": [list(layers), sinks, keep]})
        loaded = load(path, digest)
        if loaded is not None:
            return _seen(*loaded)
        seen = look(caches, sample, layers, sinks=sinks, keep=keep)
        numbers: dict[str, Any] = {"lengths": seen.lengths, "layers": seen.layers}
        tensors = {"scores": seen.scores, "evidence": seen.evidence, "values": seen.values}
        if seen.last is not None:
            numbers |= _numbers_of(seen.last)
            tensors |= _tensors_of(seen.last)
        save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)
        return seen

    def _path_of(self, kind: str, about: Any) -> tuple[Path, str]:
        digest = digest_of({"inputs": self.inputs, "about": about})
        return self.folder / f"{kind}-{digest[:20]}.safetensors", digest


def _seen(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> Seen:
    numbers = json.loads(header["numbers"])
    last = _last_of(tensors, numbers) if "queries" in tensors else None
    lengths, layers = tuple(numbers["lengths"]), tuple(numbers["layers"])
    return Seen(lengths, tensors["scores"], tensors["evidence"], tensors["values"], layers, last)


def _tensors_of(last: LastLayer) -> dict[str, torch.Tensor]:
    found = {"queries": last.queries, "keys": last.keys}
    return found if last.tables is None else found | {"cos": last.tables[0], "sin": last.tables[1]}


def _numbers_of(last: LastLayer) -> dict[str, float]:
    return {"num_prefix": last.num_prefix, "scaling": last.scaling}


def _last_of(tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> LastLayer:
    tables = (tensors["cos"], tensors["sin"]) if "cos" in tensors else None
    return LastLayer(tensors["queries"], tensors["keys"], tables, numbers["num_prefix"], numbers["scaling"])


def save(tensors: dict[str, torch.Tensor], header: dict[str, str], path: Path) -> None:
    """Write one safetensors file atomically."""
    write_tensors(path, tensors, header)


def load(path: Path, digest: str) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """Tensors and header of a file; None if it is missing, unreadable, or has another digest."""
    try:
        tensors, header = read_tensors(path)
    except (OSError, SafetensorError):
        return None
    return (tensors, header) if header.get("digest") == digest else None


def save_trainee(trainee: Trainee, path: Path, digest: str) -> None:
    tensors = {"fixed": trainee.fixed, "evidence": trainee.evidence, **_tensors_of(trainee.last)}
    numbers = {"lengths": trainee.lengths, **_numbers_of(trainee.last)}
    save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)


def load_trainee(path: Path, digest: str) -> Trainee | None:
    loaded = load(path, digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    return Trainee(tuple(numbers["lengths"]), tensors["fixed"], _last_of(tensors, numbers), tensors["evidence"])


def save_state(state: TrainingState, folder: Path, digest: str) -> None:
    tensors = {f"parameters.{name}": tensor for name, tensor in state.parameters.items()}
    if state.best_epoch != state.epoch:  # otherwise the current parameters are the best
        tensors |= {f"best.{name}": tensor for name, tensor in state.best.items()}
    for number, moments in state.optimizer["state"].items():
        tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in moments.items()}
    header = {
        "digest": digest,
        "numbers": json.dumps(
            {
                "epoch": state.epoch,
                "best_epoch": state.best_epoch,
                "history": state.history,
                "groups": state.optimizer["param_groups"],
            }
        ),
    }
    # copies on the CPU: safetensors refuses tensors that share memory, and an accelerator may have no room
    on_cpu = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    save(on_cpu, header, _state_path(folder, digest))


def load_state(folder: Path, digest: str, learner: Learner) -> TrainingState | None:
    loaded = load(_state_path(folder, digest), digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            moments.setdefault(int(number), {})[key] = tensor
    best_kind = "parameters" if numbers["best_epoch"] == numbers["epoch"] else "best"
    parameters, best = (
        {name: tensors[f"{kind}.{name}"] for name in learner.state_dict()} for kind in ("parameters", best_kind)
    )
    optimizer = {"state": moments, "param_groups": numbers["groups"]}
    return TrainingState(numbers["epoch"], parameters, optimizer, best, numbers["best_epoch"], numbers["history"])


def train_kept(learner: Learner, samples: Sequence[Any], folder: Path, digest: str, *, title: str) -> TrainingState:
    """:func:`~cacheclip_rag.lab.training.tuning.train` with a fifth of the samples held out. It continues from the
    folder's state, and saves every epoch."""
    learning, held_out = learning_and_held_out(len(samples))
    epochs = learner.settings.epochs
    with progress_bar(title, epochs, "epochs") as advance:

        def after_epoch(state: TrainingState) -> None:
            save_state(state, folder, digest)
            advance(state.epoch)

        return train(
            learner,
            [samples[number] for number in learning],
            [samples[number] for number in held_out],
            state=load_state(folder, digest, learner),
            after_epoch=after_epoch,
        )


def _state_path(folder: Path, digest: str) -> Path:
    """One file per training, because several may share the folder."""
    return folder / f"state-{digest[:20]}.safetensors"
