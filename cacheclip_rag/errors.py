"""Every error that users of the library meet, in one tree.

    CacheClipError
    ├── ConfigurationError (ValueError)     a setting is unknown or out of range
    ├── MissingExtraError (ImportError)     an optional part is not installed; the message holds the pip line
    ├── ModelError
    │   ├── UnknownModelError               no folder, packaged name or hub id answers to that name
    │   ├── UnsupportedModelError           the architecture or its rotary embedding cannot be reused exactly
    │   ├── CertificateError                a certificate is required and there is none that covers this engine
    │   ├── DownloadError                   no network, interrupted transfer, no space: nothing half-done is kept
    │   └── DigestMismatchError             bytes arrived that are not the expected ones
    ├── PromptTooLongError (ValueError)     the prompt does not fit the model's context
    ├── StoreError                          the chunk-cache store cannot be opened or written
    └── DocumentError (ValueError)          a document cannot be ingested (empty, binary, wrong encoding)

A message says what was expected, what was found, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "CacheClipError",
    "CertificateError",
    "ConfigurationError",
    "DigestMismatchError",
    "DocumentError",
    "DownloadError",
    "MissingExtraError",
    "ModelError",
    "PromptTooLongError",
    "StoreError",
    "UnknownModelError",
    "UnsupportedModelError",
]


class CacheClipError(Exception):
    """Root of the tree: catch this to catch everything the library raises on purpose."""


class ConfigurationError(CacheClipError, ValueError):
    """A setting is unknown or out of range."""


class MissingExtraError(CacheClipError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed. Install it with: pip install 'cacheclip-rag[{extra}]'")


class ModelError(CacheClipError):
    """A model cannot be found, fetched or used."""


class UnknownModelError(ModelError):
    """No local folder, packaged name or hub id answers to the given name."""


class UnsupportedModelError(ModelError):
    """The model's architecture or rotary embedding is not one whose KV can be reused exactly."""


class CertificateError(ModelError):
    """``require_certificate`` is set and no certificate covers these models, or theirs says "not faithful"."""


class DownloadError(ModelError):
    """Weights could not be fetched; what was complete is kept and the next try goes on from there."""


class DigestMismatchError(ModelError):
    """Downloaded bytes are not the expected ones; they have been deleted."""


class PromptTooLongError(CacheClipError, ValueError):
    """The prompt has more tokens than the model's context."""


class StoreError(CacheClipError):
    """The chunk-cache store cannot be opened or written."""


class DocumentError(CacheClipError, ValueError):
    """A document cannot be ingested."""
