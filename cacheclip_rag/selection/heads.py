"""One head set: the heads of an auxiliary model that find evidence, and their weights.

A head set takes a few kilobytes, belongs to one auxiliary model, and does not depend on the primary's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..base.errors import ConfigurationError, ModelError
from ..base.keys import json_digest, weights_digest
from ..base.paths import cache_home, expanded
from ..base.tensor_files import READ_ERRORS, read_tensors, write_tensors

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
HEADS_FILE = "cacheclip-heads.st"
"""File name of a head set in its model's folder. It does not end in ``.safetensors``, as the model's weights do."""
_SHIPPED = Path(__file__).parent / "shipped"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NAMES_SHOWN = 5
_PROBE = "The keeper of the lighthouse writes every unusual observation into an old notebook, and waits for morning."
"""Text whose token ids tell one tokenizer from another. It has no digits, line breaks or special tokens, which the
tokenizer of a converted GGUF file may split otherwise than the original."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadSet:
    """Scores tokens by ``sum_h weight_h * mean_q softmax(logits_h,q)``, with one softmax over all chunks."""

    auxiliary_sha256: str
    """SHA-256 of the auxiliary's weights, independent of the compute dtype."""
    heads: tuple[tuple[int, int], ...]
    """``(layer, head)``, in increasing order."""
    weights: torch.Tensor
    """``(num_heads,)`` float32, 0 or more, sum 1."""
    sinks: int = 0
    """First tokens of each chunk that score 0. They were also left out when the heads were chosen."""
    about: dict[str, Any] = field(default_factory=dict)
    """How the head set was made: command, data, seed, figures. Not part of the digest."""

    def __post_init__(self) -> None:
        assert self.heads and list(self.heads) == sorted(set(self.heads)), (
            "heads must be in increasing order, each once"
        )
        assert self.weights.shape == (len(self.heads),), "each head needs one weight"

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self.heads}))

    def by_layer(self, of_heads: torch.Tensor) -> dict[int, torch.Tensor]:
        """``(num_heads,)`` numbers in the order of :attr:`heads`, those of each layer apart, in the same memory."""
        counts = [sum(of == layer for of, _ in self.heads) for layer in self.layers]
        return dict(zip(self.layers, of_heads.split(counts), strict=True))

    def check(self, auxiliary: Any, name: str = "") -> None:
        """Raise ModelError unless the head set, called ``name`` in the message, was made for this ModelRuntime."""
        called = f"the head set {name!r}" if name else "the head set"
        if weights_digest(auxiliary.fingerprint) != self.auxiliary_sha256:
            raise ModelError(
                f"{called} was made for an auxiliary model with digest {self.auxiliary_sha256[:12]}, but "
                f"{auxiliary.name!r} has {weights_digest(auxiliary.fingerprint)[:12]}. Make a head set with 'cacheclip "
                "finetune', or let the method name none (heads='none' of its scorer)."
            )
        num_heads = auxiliary.model.config.num_attention_heads
        numbers = [head for _, head in self.heads]
        fits = self.layers[0] >= 0 and self.layers[-1] < auxiliary.num_layers
        fits = fits and min(numbers) >= 0 and max(numbers) < num_heads
        if not fits:
            raise ModelError(f"{called} names heads that model {auxiliary.name!r} does not have. Make it again.")
        if not bool(self.weights.isfinite().all()) or bool((self.weights < 0).any()):
            raise ModelError(f"{called} holds invalid weights. Make it again.")

    def digest(self) -> str:
        """SHA-256 of everything that affects scores."""
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, self.auxiliary_sha256, self.heads, self.sinks]).encode())
        digest.update(b"weights")
        digest.update(self.weights.float().contiguous().numpy().tobytes())
        return digest.hexdigest()

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write one safetensors file atomically."""
        header = {
            "format": str(FORMAT_VERSION),
            "auxiliary_sha256": self.auxiliary_sha256,
            "heads": json.dumps(self.heads),
            "sinks": str(self.sinks),
            "about": json.dumps(self.about, sort_keys=True),
            "sha256": self.digest(),
        }
        write_tensors(path, {"weights": self.weights.float().contiguous()}, header)

    @classmethod
    def load(cls, path: Path) -> HeadSet:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: the file is missing, damaged, of another version, or not a head set.
        """
        try:
            tensors, header = read_tensors(path, version=FORMAT_VERSION)
            heads = tuple((int(layer), int(head)) for layer, head in json.loads(header["heads"]))
            if set(tensors) != {"weights"}:
                raise ValueError("it holds low-rank updates, which earlier versions trained")
            sinks, about = int(header["sinks"]), json.loads(header["about"])
            heads_read = cls(header["auxiliary_sha256"], heads, tensors["weights"], sinks, about)
            if heads_read.digest() != header["sha256"]:
                raise ValueError("it is damaged: its digest does not match")
            return heads_read
        except FileNotFoundError:
            raise ModelError(f"no head set at {path}. Make one with 'cacheclip finetune'.") from None
        except READ_ERRORS as error:
            raise ModelError(
                f"the head set {path} cannot be read: {error}. Make one with 'cacheclip finetune'."
            ) from error


def find_head_set(auxiliary: Any, primary_fingerprint: str) -> HeadSet | None:
    """The first of these that exists: the head set that ``cacheclip finetune`` wrote for this pair of models;
    :data:`HEADS_FILE` in the auxiliary's folder; the head set that this package ships for models like the auxiliary;
    none.

    Args:
        auxiliary: runtime of the auxiliary model.

    Raises:
        ModelError: the file cannot be read, or was made for another auxiliary model.
    """
    sha256 = weights_digest(auxiliary.fingerprint)
    of_pair = head_set_path(sha256, weights_digest(primary_fingerprint))
    own = expanded(auxiliary.name)
    for path in (of_pair, *([own / HEADS_FILE] if (own / "config.json").is_file() else [])):
        if path.is_file():
            heads = HeadSet.load(path)
            heads.check(auxiliary)
            return heads
    return shipped_set(auxiliary)


def check_head_set_name(heads: str) -> None:
    """Raise ConfigurationError unless ``heads`` is a valid name of a head set, or a path with a slash."""
    if not isinstance(heads, str) or ("/" not in heads and not _NAME.fullmatch(heads)):
        raise ConfigurationError(
            "heads must be auto, none, a name of letters, digits, '-', '_' and '.' that does not begin with '-' or "
            f"'.', or a file with a slash in its path (./{HEADS_FILE}), got {heads!r}."
        )


def load_named(heads: str) -> HeadSet:
    """The head set that a method names: a path if ``heads`` holds a slash, else a file in ``$CACHECLIP_HOME/heads``.
    The caller checks it against the auxiliary model (:meth:`HeadSet.check`). Raises ConfigurationError: ``heads`` is
    neither a valid name nor a path; ModelError: the head set is missing or cannot be read."""
    check_head_set_name(heads)
    if "/" in heads:
        return HeadSet.load(expanded(heads))
    folder = cache_home() / "heads"
    path = folder / f"{heads}.safetensors"
    if not path.is_file():
        names = sorted(each.stem for each in folder.glob("*.safetensors") if _NAME.fullmatch(each.stem))
        shown = ", ".join(names[:_NAMES_SHOWN]) + (
            f" and {more} more" if (more := len(names) - _NAMES_SHOWN) > 0 else ""
        )
        raise ModelError(
            f"no head set named {heads!r}: expected {path}, and {folder} holds {shown or 'none'}. Make it with "
            f"'cacheclip finetune --out {path}', or name a file with a slash in its path."
        )
    return HeadSet.load(path)


def head_set_path(auxiliary_sha256: str, primary_sha256: str) -> Path:
    return cache_home() / "heads" / f"{auxiliary_sha256[:16]}-{primary_sha256[:16]}.safetensors"


def shipped_set(auxiliary: Any) -> HeadSet | None:
    """The head set that this package ships for models of the auxiliary's architecture, sizes and tokenizer, whatever
    their weights; None if there is none. With other weights than those it was made from, it is bound to the
    auxiliary's, and the first use is logged. Raises ModelError: the file cannot be read."""
    path = _SHIPPED / f"{model_digest(auxiliary)[:16]}.safetensors"
    if not path.is_file():
        return None
    heads, sha256 = HeadSet.load(path), weights_digest(auxiliary.fingerprint)
    if heads.auxiliary_sha256 != sha256:
        _log_other_weights(auxiliary.name, str(heads.about.get("weights", heads.auxiliary_sha256[:12])))
        heads = replace(heads, auxiliary_sha256=sha256)
    heads.check(auxiliary)
    return heads


def model_digest(runtime: Any) -> str:
    """SHA-256 of a model's architecture, sizes, rotary base and tokenizer: the same for a checkpoint, its fine-tuned or
    quantised versions, and a conversion of its GGUF file. The tokenizer counts by the token ids of a fixed text."""
    config = runtime.model.config
    rope_theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    identity = {
        "model_type": config.model_type,
        "num_layers": runtime.num_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": runtime.num_kv_heads,
        "head_dim": runtime.head_dim,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        # the first SmolLM differs from SmolLM2 in nothing else
        "rope_theta": None if rope_theta is None else float(rope_theta),
        "probe_ids": list(runtime.tokenize(_PROBE).ids),
    }
    return json_digest(identity)


@cache
def _log_other_weights(name: str, made_from: str) -> None:
    """Once per model and process."""
    logger.info(
        "the head set of auxiliary model %r was made from %s weights; used with other weights of the same architecture",
        name,
        made_from,
    )
