"""Documents in object storage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from cacheclip_rag import ConfigurationError, DocumentError, MissingExtraError

from .documents import Reader, document_text, text_read_by
from .text import DocumentText

if TYPE_CHECKING:
    from cacheclip_shared.objects import Objects


def find_objects(url: str) -> Iterator[tuple[str, str, int]]:
    """URL, version and bytes of the objects in a folder, and of one that has this URL itself.

    Raises:
        OSError: not all of them could be listed.
    """
    bucket, name = _bucket(url)
    for each in chain(bucket.objects_of(name), bucket.object_at(name)):
        yield f"{bucket.place.url}/{each['path']}", str(each["e_tag"] or each["last_modified"]), each["size"]


def read_object(url: str, reader: Reader | None = None) -> DocumentText:
    """Text of an object, as of :func:`~cacheclip_ingest.documents.read_document`. ``reader`` gets a file in its
    place."""
    bucket, name = _bucket(url)
    path = Path(url)
    try:
        data = bucket.fetch(name)
        if reader is None:
            return document_text(path, data)
        with TemporaryDirectory() as folder:
            path = Path(folder, path.name)
            path.write_bytes(data)
            return text_read_by(reader, path)
    except OSError as error:
        raise DocumentError(f"{url} cannot be read: {error}") from error
    except DocumentError as error:
        error.args = (str(error).replace(str(path), url),)  # a path has one slash where a URL has two
        raise


def _bucket(url: str) -> tuple[Objects, str]:
    """The bucket of a URL, and the name in it, which may hold what means something in URLs."""
    try:
        from cacheclip_shared.objects import Objects
        from cacheclip_shared.place import SharedPlace
    except ImportError as error:
        raise MissingExtraError("cacheclip-shared (for documents in object storage)", "shared") from error

    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    if scheme == "file":
        raise ConfigurationError(f"expected a folder without file://, got {url!r}.")
    objects = Objects(SharedPlace(f"{scheme}://{bucket}"))
    objects.is_patient = True
    return objects, name.rstrip("/")
