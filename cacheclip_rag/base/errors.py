"""Errors of the library, in one tree.

    CacheClipError
    ├── ConfigurationError                  a setting is unknown or out of range
    ├── MissingExtraError (ImportError)     an optional part is not installed; the message holds the pip line
    ├── ModelError
    │   ├── UnknownModelError               the name is no folder, packaged name or hub id
    │   ├── UnsupportedModelError           the architecture or its rotary embedding cannot be reused exactly
    │   ├── CertificateError                a certificate is required, and none covers this engine
    │   ├── EncodingError                   the KV of some chunks could not be computed; that of others is there
    │   ├── DownloadError                   no network, interrupted transfer, no space; no partial file is kept
    │   └── DigestMismatchError             downloaded bytes have another digest than expected
    ├── PromptTooLongError                  the prompt does not fit the model's context
    ├── StoreError                          the chunk-cache store cannot be opened or written
    ├── ServerError                         a cacheclip server cannot be reached, or cannot answer
    └── DocumentError                       a document cannot be ingested (empty, binary, wrong encoding)

A message says what was expected, what was found, and what to do next. None is a ValueError or a TypeError: LlamaIndex's
refining synthesizers catch these as a model's unusable answer, and go on without the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .urls import without_secrets


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust (tokenizers, safetensors, llguidance) failed: its error is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, of the processor or of a device: torch's errors are of no kind, or of a kind of its
    own."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


_LONGEST_LINE = 300
"""Characters."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of a library says, for a message of ours: without its full stop, and of a long
    one its first whole sentences, or words."""
    line = next(iter(str(error).splitlines()), "no details")
    if len(line) > _LONGEST_LINE:
        cut = line[:_LONGEST_LINE]
        sentences, stop, _ = cut.rpartition(". ")
        line = sentences if stop else (cut.rpartition(" ")[0] or cut) + " …"
    return line.rstrip(". ")


class CacheClipError(Exception):
    """Base of all errors of this library. No message shows the password of a URL."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(each) if isinstance(each, str) else each for each in args))


class ConfigurationError(CacheClipError):
    """A setting is unknown or out of range."""


_FOLDERS = {
    "care": "cacheclip-care",
    "hot": "cacheclip-shared[hot]",
    "ingest": "cacheclip-ingest",
    "lab": "cacheclip-lab",
    "langchain": "langchain-cacheclip",
    "llama-cpp": "cacheclip-llamacpp",
    "llama-index": "llama-index-llms-cacheclip",
    "office": "cacheclip-ingest[office]",
    "pdf": "cacheclip-ingest[pdf]",
    "ray": "cacheclip-ingest[ray]",
    "serve": "cacheclip-serve",
    "shared": "cacheclip-shared",
    "vllm": "cacheclip-vllm[vllm]",
}
"""Distributions of the repository's ``integrations/``, by the extra that names them."""
_CLONE = Path(__file__).parents[2] / "integrations/all.txt"
"""Beside this package, if it runs in a clone of the repository."""


class MissingExtraError(CacheClipError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        how = f"pip install 'cacheclip-rag[{extra}]'"
        if _CLONE.is_file():
            here = f"./integrations/{_FOLDERS[extra]}" if extra in _FOLDERS else f".[{extra}]"
            how = f"pip install -e '{here}' in your clone of the repository, or {how} once the package is published"
        super().__init__(f"{what} is not installed. Install it: {how}")


class ModelError(CacheClipError):
    """A model cannot be found, fetched or used."""


class UnknownModelError(ModelError):
    """The given name is no local folder, packaged name or hub id."""


class UnsupportedModelError(ModelError):
    """The model's architecture or rotary embedding does not allow exact reuse of KV."""


class CertificateError(ModelError):
    """``require_certificate`` is set, and no certificate covers these models or its verdict is "not faithful"."""


class EncodingError(ModelError):
    """The KV of some chunks could not be computed. That of the others is there."""

    def __init__(self, message: str, encoded: Sequence[Any]) -> None:
        """``encoded``: what was to be returned, with None for each chunk that failed."""
        super().__init__(message)
        self.encoded = encoded


class DownloadError(ModelError):
    """Weights could not be fetched. Complete parts are kept for the next attempt."""


class DigestMismatchError(ModelError):
    """Downloaded bytes have another digest than expected. They were deleted."""


class PromptTooLongError(CacheClipError):
    """The prompt has more tokens than the model's context."""


class StoreError(CacheClipError):
    """The chunk-cache store cannot be opened or written."""


class ServerError(CacheClipError):
    """A server (``cacheclip serve``) cannot be reached, has no room, refuses the API key, or failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """``status``: HTTP status; None without a response."""
        super().__init__(message)
        self.status = status


class DocumentError(CacheClipError):
    """A document cannot be ingested."""
