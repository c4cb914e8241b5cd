"""The working folder of a fine-tuning run: what was made so far, each file with the digest of the settings it is of.

A file of other settings, or one that cannot be read, is as good as none: what it held is made again.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..paths import atomic_path
from .features import LastLayer
from .tuning import Trainee, TrainingState, Tuned

__all__ = ["load", "load_state", "load_trainee", "save", "save_state", "save_trainee"]


def save(tensors: dict[str, torch.Tensor], header: dict[str, str], path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)


def load(path: Path, digest: str) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """None unless the file is there and belongs to these settings; what cannot be read is made again."""
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("digest") != digest:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        return None


def save_trainee(trainee: Trainee, path: Path, digest: str) -> None:
    last = trainee.last
    tensors = {"fixed": trainee.fixed, "queries": last.queries, "keys": last.keys, "evidence": trainee.evidence}
    if last.tables is not None:
        tensors |= {"cos": last.tables[0], "sin": last.tables[1]}
    numbers = {"lengths": trainee.lengths, "num_prefix": last.num_prefix, "scaling": last.scaling}
    save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)


def load_trainee(path: Path, digest: str) -> Trainee | None:
    loaded = load(path, digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    tables = (tensors["cos"], tensors["sin"]) if "cos" in tensors else None
    last = LastLayer(tensors["queries"], tensors["keys"], tables, numbers["num_prefix"], numbers["scaling"])
    return Trainee(tuple(numbers["lengths"]), tensors["fixed"], last, tensors["evidence"])


def save_state(state: TrainingState, folder: Path, digest: str) -> None:
    tensors = {f"parameters.{name}": tensor for name, tensor in state.parameters.items()}
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
    save({name: tensor.detach().clone() for name, tensor in tensors.items()}, header, folder / "state.safetensors")


def load_state(folder: Path, digest: str, tuned: Tuned) -> TrainingState | None:
    loaded = load(folder / "state.safetensors", digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            moments.setdefault(int(number), {})[key] = tensor
    parts = [{name: tensors[f"{kind}.{name}"] for name in tuned.state_dict()} for kind in ("parameters", "best")]
    optimizer = {"state": moments, "param_groups": numbers["groups"]}
    return TrainingState(numbers["epoch"], parts[0], optimizer, parts[1], numbers["best_epoch"], numbers["history"])
