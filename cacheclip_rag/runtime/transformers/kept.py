"""What a first load finds out about a model, kept in files for later ones. Everything that it depends on is in a file's
name."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from ...base.keys import json_digest
from ...base.paths import cache_home, write_json
from ...base.version import __version__
from .quantised_weights import SCHEMES

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_KERNELS = frozenset({"kernels", "causal_conv1d", "flash-linear-attention", "fla-core", "mamba_ssm"})
"""Packages whose kernels transformers takes."""


def kept_file(folder: str, *identity: object) -> Path:
    """In a folder of ``$CACHECLIP_HOME``."""
    versions = __version__, _sources(), transformers.__version__, torch.__version__, _installed()
    return cache_home() / folder / f"{hashlib.sha256(repr((*identity, versions)).encode()).hexdigest()}.json"


def device_name(device: torch.device) -> tuple[str, str]:
    """What results may depend on: where a device is, and which GPU it is."""
    return str(device), torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _installed() -> dict[str, str | None]:
    """Versions of these, and of what quantised weights need; None: it is not there."""
    packages = _KERNELS.union(*(scheme.packages for scheme in SCHEMES.values()))
    versions: dict[str, str | None] = dict.fromkeys(sorted(packages))
    for package in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@functools.cache
def _sources() -> str:
    """Digest of this folder's modules."""
    return json_digest([file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))])


def kept(file: Path, read: Callable[[Any], _T], make: Callable[[], _T], write: Callable[[_T], Any]) -> _T:
    """What the file says, by ``read``; if there is none, or it is damaged, what ``make`` returns, which is kept."""
    try:
        return read(json.loads(file.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        made = make()
    try:
        write_json(file, write(made))
    except OSError as error:
        logger.debug("%s is not kept: %s", file, error)
    return made
