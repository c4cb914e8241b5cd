"""Who may ask: API keys, and the tenants that each of them may use."""

from __future__ import annotations

import hmac
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import check_namespace

from .errors import RequestError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")

API_KEY = "x-api-key"
"""Header in which Anthropic's clients send their key."""
_LEAST_KEY = 8
"""Fewest characters of a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is."""

    tenants: tuple[str, ...]
    """Tenants that the key may use; the first is used if the request names none."""
    may_choose: bool
    """Whether a request may name its tenant."""
    sees_metrics: bool

    def check_metrics(self) -> None:
        if not self.sees_metrics:
            raise RequestError(
                "metrics are over all tenants: they need the server's own API key (--api-key).",
                status=403,
                kind="permission_error",
            )

    def tenant(self, wanted: str | None) -> str:
        """The tenant of a request that asks for ``wanted``. Raises RequestError: the key may not use it. It does not
        say which tenants there are."""
        if wanted is None:
            return self.tenants[0]
        if not self.may_choose:
            raise RequestError(
                "only a request with a tenant's API key may name a tenant (--tenants FILE).",
                status=403,
                kind="permission_error",
                param="cacheclip.tenant",
            )
        if wanted not in self.tenants:
            raise RequestError(
                "this API key may not use that tenant.", status=403, kind="permission_error", param="cacheclip.tenant"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class Access:
    """The keys of a server. Without any, everybody may ask."""

    tenant: str
    """The server's own tenant, for requests without a key of a tenant."""
    api_key: str | None = field(default=None, repr=False)
    """The server's own key. It sees the metrics."""
    tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Keys of tenants, each with the tenants that it may use."""

    def __post_init__(self) -> None:
        for key in filter(None, (self.api_key, *self.tenants)):
            if len(key) < _LEAST_KEY or not key.isascii() or any(each.isspace() for each in key):
                raise ConfigurationError(
                    f"an API key must have {_LEAST_KEY} or more ASCII characters and no spaces, got a key of "
                    f"{len(key)} characters that has not. Make one: "
                    "python -c 'import secrets; print(secrets.token_urlsafe())'"
                )
        if self.api_key is not None and self.api_key in self.tenants:
            raise ConfigurationError("the server's own API key is also the key of a tenant. Give each its own.")

    @property
    def is_open(self) -> bool:
        return self.api_key is None and not self.tenants

    def identify(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Whose request it is, by its header ``Authorization: Bearer KEY``, or without one by ``x-api-key: KEY``.

        Every key is compared, each in constant time, so that the time tells nothing. Raises RequestError: no known
        key."""
        if self.is_open:
            return Caller((self.tenant,), may_choose=False, sees_metrics=True)
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip().encode()
        known = scheme.lower() == "bearer" and bool(key)
        found: Caller | None = None
        if self.api_key is not None and hmac.compare_digest(self.api_key.encode(), key):
            found = Caller((self.tenant,), may_choose=False, sees_metrics=True)
        for each, tenants in self.tenants.items():
            if hmac.compare_digest(each.encode(), key):
                found = Caller(tenants, may_choose=True, sees_metrics=False)
        if not known or found is None:
            raise RequestError(
                "a known API key is needed, as the header 'Authorization: Bearer KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def check_origins(origins: Sequence[str], access: Access) -> None:
    """Raise ConfigurationError unless these are origins of web pages, such as ``https://chat.example.org``, or ``*``
    for all of them, which needs a key: any page that is open in a browser here could ask otherwise."""
    for origin in origins:
        if origin == "*" and access.is_open:
            raise ConfigurationError(
                "--allow-origin '*' lets every web page ask, and no API key is set. Name the page's origin, or set "
                "--api-key or --tenants."
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"an origin must be scheme, host and port such as https://chat.example.org or http://localhost:3000, "
                f"without a path, got {origin[:200]!r}."
            )


def read_tenants(file: Path) -> dict[str, tuple[str, ...]]:
    """Keys of tenants from a JSON or TOML file: API keys, each with the name of its tenant or a list of names.

    >>> # "sk-north-7f3a" = "north"
    >>> # "sk-both-91bc" = ["north", "south"]

    Raises:
        ConfigurationError: the file cannot be read, or is malformed. It does not show keys.
    """
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        place = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigurationError(f"{file} is malformed{place}: expected API keys, each with a tenant.") from None
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(f"{file} must hold API keys, each with a tenant, got {type(found).__name__}.")
    tenants: dict[str, tuple[str, ...]] = {}
    for number, (key, value) in enumerate(found.items(), 1):
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names:
            raise ConfigurationError(f"{file}: entry {number} must name a tenant, or a list of tenants.")
        for name in names:
            check_namespace(name)
        tenants[key] = tuple(names)
    return tenants
