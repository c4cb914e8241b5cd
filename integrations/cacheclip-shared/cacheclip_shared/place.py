"""Where a shared store is: its URL, and clients for it that do not wait for long.

Credentials, region and endpoint come from the environment, as other tools of the cloud read them
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from cacheclip_rag import CacheClipError, ConfigurationError, MissingExtraError, StoreError
from cacheclip_rag.plugins import cache_home, is_panic, shown_url, split_hot
from cacheclip_rag.store import FRAME_VERSION

LAYOUT = 1
"""Increase this number when names of objects or columns of the table change meaning."""
_CONNECT_S, _SILENT_S = 0.3, 0.4
"""Longest wait for a connection, and for the next bytes of an answer. A request is tried twice."""
_REQUEST_S = 30.0
"""Longest request of which bytes go on arriving, and longest upload."""


def need(module: str, extra: str = "shared") -> ModuleType:
    """A module of an extra. Raises MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{module.partition('.')[0]} (for stores in object storage)", extra) from error


def said(error: BaseException) -> str:
    """What a client's error says, in one line: storage's own words, if it gave any."""
    text = " ".join(_COLOURS.sub("", str(error)).partition("Debug source")[0].split())
    found = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text)
    return (f"{found[1]}: {found[2]}" if found else text)[:300].rstrip(".")


@contextmanager
def failing_as(what: str, advice: str = "", kind: type[StoreError] = StoreError) -> Iterator[None]:
    """Whatever fails raises StoreError. Damage of a tenant's data makes the libraries that read it raise anything, and
    those in Rust panic."""
    try:
        yield
    except CacheClipError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise kind(f"{what}: {said(error) or type(error).__name__}.{advice}") from error


@dataclass(frozen=True)
class SharedPlace:
    """A folder in object storage: ``s3://BUCKET/PREFIX``, ``gs://``, ``az://``, or ``file://`` for a folder that
    machines share. Behind ``?hot=`` stands the URL of a hot tier."""

    url: str
    hot: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        url, hot = split_hot(self.url)
        _, _, rest = url.partition("://")
        is_place = rest and (rest[0] == "/") == url.startswith("file://") and {*url}.isdisjoint("?#")
        if not is_place or "@" in rest.partition("/")[0]:
            raise ConfigurationError(
                "expected the URL of a store, such as s3://bucket/prefix, without ?, # and credentials, got "
                f"{shown_url(self.url)!r}."
            )
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "hot", hot or self.hot)

    @cached_property
    def objects(self) -> Any:
        """The client. Made without a request."""
        return self._client(_SILENT_S)

    @cached_property
    def patient(self) -> Any:
        """The client for what no answer waits for. Of a write, no byte of an answer comes before all is sent."""
        return self._client(_REQUEST_S)

    def _client(self, silent_s: float) -> Any:
        backoff = {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(milliseconds=50), "base": 2}
        limits: dict[str, Any] = {
            "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=3), "backoff": backoff}
        }
        if self.is_folder:
            limits = {"mkdir": True}
        else:
            client: dict[str, Any] = {
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "read_timeout": timedelta(seconds=silent_s),
                "timeout": timedelta(seconds=_REQUEST_S),
            }
            limits["client_options"] = client | ({"allow_http": True} if _is_plain_http() else {})
        store = need("obstore.store")
        try:
            return store.from_url(self.url, **limits)
        except Exception as error:  # of the client's own kinds
            raise StoreError(
                f"expected the URL of a store, such as s3://bucket/prefix, got {self.url!r}: {said(error)}."
            ) from error

    @property
    def is_folder(self) -> bool:
        return self.url.startswith("file://")

    def address(self, *names: str) -> str:
        """The URL of something in it, for the Delta table."""
        if self.is_folder:
            return str(Path(unquote(urlsplit(self.url).path)).joinpath(*names))
        return "/".join((self.url.rstrip("/"), *names))

    def check_files(self, name: str) -> None:
        """Raise OSError if a file, or one in a folder of this name, is a pipe, a socket or a device, which nobody may
        ever write to. What is not there is no error."""
        if not self.is_folder:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            path = Path(self.address(*name.split("/")))
            for each in path.iterdir() if path.is_dir() else [path]:
                if each.exists() and not (each.is_file() or each.is_dir()):
                    raise OSError(f"{each.name} is a pipe, socket or device (os error 6)")

    @property
    def delta_options(self) -> dict[str, str]:
        """What the Delta table needs beside the environment. Its requests are larger than those for payloads, and
        nobody's answer waits for them."""
        if self.is_folder:
            return {}
        limits = {"connect_timeout": f"{_CONNECT_S}s", "timeout": "10s", "max_retries": "1"}
        return {**limits, "aws_conditional_put": "etag", **({"allow_http": "true"} if _is_plain_http() else {})}

    @property
    def replica(self) -> Path:
        """Folder of this machine's copy of the catalog."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        name = hashlib.sha256(f"{LAYOUT} {endpoint} {self.url}".encode()).hexdigest()[:32]
        return cache_home() / "replicas" / name


def tenant_folder(namespace: str) -> str:
    """A tenant's folder: policies of a bucket can name it, and nothing of another tenant is in it."""
    return f"tenants/{hashlib.sha256(namespace.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def object_name(namespace: str, key: str, codec: str) -> str:
    return f"{key_folder(namespace, key)}/{codec}{_ENDING}"


def key_folder(namespace: str, key: str) -> str:
    """The folder of a key's objects: storage lists folders, not beginnings of names."""
    return f"{tenant_folder(namespace)}/kv/{key[:2]}/{key}"


def key_and_codec(name: str, *, any_version: bool = False) -> tuple[str, str] | None:
    """What the name of an object says; None if it is no payload, or, unless ``any_version``, of another frame
    version."""
    *_, key, last = ("", *name.split("/"))
    found = _PAYLOAD.fullmatch(last)
    return (key, found[1]) if found and (any_version or last.endswith(_ENDING)) else None


_ENDING = f".f{FRAME_VERSION}.kv"
_PAYLOAD = re.compile(r"(.+)\.f\d+\.kv")
_COLOURS = re.compile(r"\x1b\[\d+m↳?")


def _is_plain_http() -> bool:
    return os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
