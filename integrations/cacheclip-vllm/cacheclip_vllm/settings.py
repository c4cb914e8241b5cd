"""Options on their way from ``cacheclip serve`` to the middleware in vLLM's process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cacheclip_serve import Access, read_tenants

from cacheclip_rag import ConfigurationError, EngineConfig

from .parameters import SEAL_VARIABLE
from .served import Served

SETTINGS_VARIABLE = "CACHECLIP_VLLM_SERVER"
"""Environment variable with the settings as JSON. Only this user can read the environment of a process, while all can
read its command line."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the middleware needs to know."""

    config: EngineConfig
    """Settings; its namespace is that of the server's own tenant, its method a name."""
    name: str
    """Served name of the model."""
    address: str = ""
    """``http://host:port``, for the message that the server is ready."""
    api_key: str | None = field(default=None, repr=False)
    tenants: Path | None = None
    """File of tenants' keys (:func:`~cacheclip_serve.access.read_tenants`)."""
    seal: str = field(default="", repr=False)
    """Key of the plans' seals, which the connector knows too."""
    body_bytes: int = 2**23
    """Largest body of a request."""
    calls_tools: bool = True
    """Whether vLLM was told how to read calls of tools in answers."""
    shows_metrics: bool = False
    """Whether vLLM's own ``metrics`` of a request stay in its response."""
    served: Served = field(default_factory=Served)
    """How vLLM runs the primary."""
    json_to: int | None = None
    """File descriptor to which a JSON object is written when the server is ready; None: a line on stderr."""
    aliases: tuple[str, ...] = ()
    """Other names by which requests may ask for the model."""
    drops_tools: bool = False
    """Whether tools that need not be called are left out if the server cannot call any."""
    embedding: str | None = None
    """Embedding model of ``/v1/embeddings``; None: there is none."""
    is_untried: bool = False
    """Whether this vLLM was never tried, so that a tiny answer is compared at start."""
    inspects: bool = False
    """Whether it has a page of the last answers."""

    @property
    def planner_config(self) -> EngineConfig:
        """Settings of the planners: what the server itself does after an answer (``finish="idle"``) is none of them."""
        return replace(self.config, finish="none") if self.config.finish == "idle" else self.config

    @property
    def prompt_bytes(self) -> int:
        """Memory of vLLM's workers for KV of prompts, which later ones move. On a GPU none is: to copy all that is
        computed out of it would hold up every prompt."""
        config = self.config
        moves = config.moved == "on" and not config.require_certificate and config.device.startswith("cpu")
        return config.prefix_cache_bytes if moves else 0

    def completes(self, finish: str | None) -> bool:
        """Whether the exact KV of a conversation is computed after its answer. ``finish``: what its request says."""
        return (finish or self.config.finish) == "idle"

    @property
    def access(self) -> Access:
        """Keys and tenants. Raises ConfigurationError: the file cannot be read, or a key cannot be one."""
        return Access(self.config.namespace, self.api_key, read_tenants(self.tenants) if self.tenants else {})

    def to_environment(self) -> dict[str, str]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "seal"}
        values |= {"config": asdict(self.config), "served": asdict(self.served)}
        values["tenants"] = None if self.tenants is None else str(self.tenants)
        return {SETTINGS_VARIABLE: json.dumps(values), SEAL_VARIABLE: self.seal}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> ServerSettings:
        """The settings of this process. Raises ConfigurationError: the process was not started by ``cacheclip
        serve``."""
        environment = os.environ if environment is None else environment
        try:
            values: dict[str, Any] = json.loads(environment[SETTINGS_VARIABLE])
            values |= {"config": EngineConfig(**values["config"]), "seal": environment[SEAL_VARIABLE]}
            values["served"] = Served(**values["served"])
            values["aliases"] = tuple(values["aliases"])
            values["tenants"] = None if values["tenants"] is None else Path(values["tenants"])
            return cls(**values)
        except (ConfigurationError, KeyError, ValueError, TypeError) as error:
            raise ConfigurationError(
                "this middleware has no settings. Start vLLM by: cacheclip serve --backend vllm --store DIR"
            ) from error
