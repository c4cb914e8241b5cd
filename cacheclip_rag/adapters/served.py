"""Settings of a language model that runs here, or in a server (``cacheclip serve``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SecretStr

from ..base.errors import ConfigurationError
from ..base.urls import shown_url
from .remote import RemoteEngine
from .settings import SHOWN, ModelFields, Tokenizer

if TYPE_CHECKING:
    from ..answering.options import CallOptions
    from ..engine import CacheClipEngine
    from ..fusion.answer import Answer

logger = logging.getLogger(__name__)

_LOCAL = ("auxiliary", "store", "dtype", "device", "engine_kwargs")
"""Settings that only the process with the model can follow."""


class ServedFields(ModelFields):
    """With ``base_url``, a server answers and no model runs here. ``primary`` is then the served name, ``namespace``
    the tenant, and ``method``, ``recompute_ratio``, ``max_ttft_s`` and ``finish`` are sent if they are not at their
    defaults, so that else the server's settings hold. Documents are sent as candidates with each call. A cancelled call
    ends at the next piece of text, or sign of life of the server (every ten seconds)."""

    base_url: Annotated[str | None, SHOWN] = None
    """Address of a server, such as ``http://127.0.0.1:8000/v1``; None: the model runs here."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """API key for the server; default the environment's ``CACHECLIP_API_KEY``. Ignored without ``base_url``."""
    timeout: float | None = None
    """Longest wait in seconds for the next piece of a server's answer; None: 600. Ignored without ``base_url``."""

    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, here or in the server, such as ``{"enable_thinking": False}``."""

    @property
    def engine(self) -> CacheClipEngine:
        """The engine in use, if the model runs here. Raises ConfigurationError: ``base_url`` is set."""
        if self.base_url is not None:
            raise ConfigurationError(
                f"the model runs in the server at {shown_url(self.base_url)}, so there is no engine here. What "
                "needs one (to precompute, release, warm up, profile or count tokens) runs on the server's machine."
            )
        return super().engine

    @property
    def model_name(self) -> str:
        """The primary's name; with ``base_url``, the served name, which is known after the first answer."""
        remote = self._remote()
        return self.primary if remote is None else remote.name

    @property
    def tokenizer(self) -> Tokenizer:
        """As without a server. Raises ConfigurationError: ``base_url`` is set."""
        if self.base_url is not None:
            raise ConfigurationError(
                f"the model runs in the server at {shown_url(self.base_url)}, so its tokenizer is not known here. "
                "Use the same model's: transformers.AutoTokenizer.from_pretrained(NAME)."
            )
        return super().tokenizer

    def _remote(self) -> RemoteEngine | None:
        if self.base_url is None:
            return None
        key = self.api_key.get_secret_value() if self.api_key else os.environ.get("CACHECLIP_API_KEY")
        return RemoteEngine(
            self.base_url,
            key,
            model=self.primary if self._is_set("primary") else None,
            tenant=self.namespace if self._is_set("namespace") else None,
            system_prompt=self._shared_system_prompt(),
            timeout_s=self.timeout,
        )

    def _answering(self) -> CacheClipEngine | RemoteEngine:
        return self._remote() or self.engine

    def _stored_tokens(self, answer: Answer) -> int:
        """Tokens of missing chunks that are stored after the answer."""
        if self.base_url is not None:
            return answer.stats.missed_tokens
        return answer.stats.missed_tokens if self._engine_config().on_miss == "store" else 0

    def _check(self) -> None:
        super()._check()
        if self.base_url is None:
            if unused := [name for name in ("api_key", "timeout") if getattr(self, name) is not None]:
                logger.warning("without base_url, the model runs here: %s has no effect.", " and ".join(unused))
            return
        here = [name for name in _LOCAL if self._is_set(name)]
        if here:
            raise ConfigurationError(
                f"{', '.join(here)} cannot be combined with base_url: the server at {shown_url(self.base_url)} has its "
                "own. Leave them out, or give them to cacheclip serve."
            )
        if not isinstance(self.method, str):
            raise ConfigurationError("method must be a preset's name with base_url, because a server takes names only.")
        self._remote()

    def _call_options(self, options_of_call: Mapping[str, Any]) -> CallOptions:
        if self.chat_template_kwargs:
            options_of_call = {"chat_template_kwargs": self.chat_template_kwargs, **options_of_call}
        options = super()._call_options(options_of_call)
        if self.base_url is None:
            return options
        # at their defaults, the server's settings hold
        unset = [name for name in ("method", "finish") if options_of_call.get(name) is None and not self._is_set(name)]
        nothing: dict[str, Any] = dict.fromkeys(unset)
        return replace(options, **nothing)

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))
