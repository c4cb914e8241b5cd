"""What a request to vLLM carries, and whether its KV can be made. Everything here happens before a token is scheduled.

A request names its plan in vLLM's ``kv_transfer_params``, under ``cacheclip``::

    {"cacheclip": {"plan": {…}}}            FusionPlan.to_dict(): vLLM's workers recompute
    {"cacheclip": {"keep": {…}}}            under what its KV is kept if vLLM computes it plainly (:mod:`.kept`)

A server with clients of its own seals them: ``{"plan": {…}, "seal": "…"}`` holds a digest made with a secret key, which
server and connector have from the environment. So no client can send plans past the server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cacheclip_rag import ConfigurationError
from cacheclip_rag.planning import FusionPlan, PlannedPrompt, PlanningRuntime
from cacheclip_rag.plugins import check_namespace, is_url, is_whole_number
from cacheclip_rag.store import StoreReader

from .kept import Keep
from .passes import passes

PARAMETER = "cacheclip"
"""Name in ``kv_transfer_params``."""
SEAL_VARIABLE = "CACHECLIP_VLLM_SEAL"
"""Environment variable with the key of seals."""
NAMESPACES_VARIABLE = "CACHECLIP_VLLM_NAMESPACES"
"""Environment variable with the connector's tenants, a JSON list, where its settings name none: all users of a machine
can read the settings, which are on a command line."""
STORE_VARIABLE = "CACHECLIP_VLLM_STORE"
"""Environment variable with the store, where its URL has a password: vLLM's log has the settings, too."""
EXACT = "vLLM's own prefix cache holds so much of the prompt that plain prefill computes less"
"""The connector's reason for plain prefill of requests whose plan computes more."""
UNREADABLE = "its KV could not be read or computed; vLLM's log says why"
"""The connector's reason for requests whose load failed. A payload of the store may be damaged."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the connector: ``kv_connector_extra_config``."""

    store: Path | str | None = field(default=None, repr=False)
    """Folder or URL of the store, for plans; None refuses them."""
    namespaces: frozenset[str] = frozenset({"default"})
    """Tenants whose entries may be read. Of several, the plan names one, so that plans should be sealed."""
    exchange: Path | None = None
    """Folder through which the KV of chunks goes that vLLM computes (:mod:`.captures`)."""
    sealed: bool = False
    """Whether plans without a seal are refused."""
    reader: str = ""
    """``module:function`` that makes what workers read a tenant's entries with, as :class:`StoreReader` does, of
    ``store`` (whatever text it is then) and the tenant's name; empty: a reader of a folder or a URL."""
    prompt_bytes: int = 0
    """Bytes of all workers' memory for KV of prompts that later prompts move (:mod:`.kept`)."""

    def open_reader(self, namespace: str, codec: str | None = None, heads: slice | None = None) -> StoreReader:
        """What reads a tenant's entries, in the worker; of a shared store, those of this codec. ``heads`` as for
        :class:`StoreReader`. Raises ValueError: the function cannot be found."""
        assert self.store is not None, "the scheduler checked the request"
        if not self.reader:
            return StoreReader(self.store, namespace, codec, heads=heads)
        found: StoreReader = resolve_name(self.reader)(str(self.store), namespace)
        return found

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """A store and tenants that are not given are those of the environment, by default none and ``default``. Raises
        ConfigurationError: an unknown setting or a wrong value."""
        if "store" not in given and (hidden := os.environ.get(STORE_VARIABLE)):
            given = {**given, "store": hidden}
        known = ("store", "namespaces", "exchange", "sealed", "reader", "prompt_bytes")
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigurationError(
                f"unknown setting {', '.join(unknown)} in kv_connector_extra_config. Known: {', '.join(known)}."
            )
        if not given.get("store") and not given.get("exchange"):
            raise ConfigurationError("kv_connector_extra_config needs store (for plans), exchange (to ingest) or both.")
        store, exchange = (Path(given[name]) if given.get(name) else None for name in ("store", "exchange"))
        if is_url(given.get("store")):
            store = given["store"]
        namespaces = given["namespaces"] if "namespaces" in given else _namespaces_of_environment()
        reader = str(given.get("reader") or "")
        if reader:
            try:
                store = given["store"]
                resolve_name(reader)
            except (KeyError, ValueError, ImportError, AttributeError) as error:
                raise ConfigurationError(
                    f"reader must be module:function beside a store, got {reader!r} ({error!r})."
                ) from error
        prompt_bytes = given.get("prompt_bytes", 0)
        if not is_whole_number(prompt_bytes) or prompt_bytes < 0:
            raise ConfigurationError(f"prompt_bytes must be 0 or more bytes, got {prompt_bytes!r}.")
        return cls(
            store, _checked_namespaces(namespaces), exchange, bool(given.get("sealed", False)), reader, prompt_bytes
        )


def _namespaces_of_environment() -> object:
    try:
        return json.loads(os.environ.get(NAMESPACES_VARIABLE) or '["default"]')
    except ValueError as error:
        raise ConfigurationError(f"{NAMESPACES_VARIABLE} must hold a JSON list of names: {error}.") from error


def _checked_namespaces(given: object) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"namespaces must be a list of names, got {given!r}.")
    names = list(given)
    if not names:
        raise ConfigurationError("namespaces must hold a name or more.")
    for name in names:
        check_namespace(name)
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Ready:
    """A request whose first tokens' KV can be made."""

    num_ready: int
    """Tokens whose KV is made; at least one token of the prompt is left to vLLM."""
    plan: FusionPlan | None = None
    context: str | None = None
    """Without a plan, the file that holds the KV (:mod:`.captures`)."""
    keep: Keep | None = None

    @classmethod
    def of(
        cls,
        given: object,
        token_ids: Sequence[int],
        settings: Settings,
        runtime: PlanningRuntime,
        *,
        max_runs: int,
        max_rows: int,
    ) -> Ready:
        """Read what a request carries (the value under :data:`PARAMETER`) with a prompt as vLLM has it. ``max_runs``,
        ``max_rows``: room of a pass (:func:`~cacheclip_vllm.passes.passes`). Raises ConfigurationError, ValueError
        or OSError, which say why its KV cannot be made."""
        keep = read_keep(given, settings)
        assert isinstance(given, Mapping), "it was read"
        plan = FusionPlan.from_dict(given["plan"])
        if settings.store is None:
            raise ConfigurationError("the request has a plan, and the connector has no store")
        if plan.namespace not in settings.namespaces:
            raise ConfigurationError("the plan is for another tenant than the connector's")
        if plan.rope_pin != runtime.rope_pin:
            raise ConfigurationError("the plan is for another rotary embedding")
        _check(plan.token_ids, plan.model, token_ids, runtime)
        passes(plan, 0, max_runs=max_runs, max_rows=max_rows)
        return cls(plan.num_ready, plan, keep=keep)


def read_keep(given: object, settings: Settings) -> Keep | None:
    """Under what a request's KV may be kept; None: not at all. Raises ConfigurationError: the request was not planned
    here."""
    named = set(given) - {"seal"} if isinstance(given, Mapping) else set()
    if not isinstance(given, Mapping) or not named or not named <= {"plan", "keep"}:
        raise ConfigurationError(f"a request gives a plan under {PARAMETER!r}")
    if settings.sealed:
        _check_seal(given)
    keep = Keep.of(given["keep"]) if "keep" in given else None
    return keep if keep is not None and keep.namespace in settings.namespaces else None


def request_parameters(
    plan: FusionPlan | None = None, *, keep: Keep | None = None, key: str | None = None
) -> dict[str, Any]:
    """A request's ``kv_transfer_params``. ``key``: seal them with it."""
    carried: dict[str, Any] = {} if plan is None else {"plan": plan.to_dict()}
    if keep is not None:
        carried["keep"] = asdict(keep)
    return {PARAMETER: carried if key is None else {**carried, "seal": _seal(carried, key)}}


def carried_with(planned: PlannedPrompt, namespace: str, *, key: str | None = None) -> dict[str, Any]:
    """What a planned prompt's request carries; nothing if it has no plan and is not kept."""
    keep = None if planned.kept_about is None else Keep(namespace, planned.kept_about)
    if planned.fusion is None and keep is None:
        return {}
    return request_parameters(planned.fusion, keep=keep, key=key)


def _seal(carried: Mapping[str, Any], key: str) -> str:
    text = json.dumps(carried, sort_keys=True, default=repr)
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def _check_seal(given: Mapping[str, Any]) -> None:
    key = os.environ.get(SEAL_VARIABLE)
    if not key:
        raise ConfigurationError(f"the connector takes sealed requests only, and {SEAL_VARIABLE} is not set")
    carried = {name: value for name, value in given.items() if name != "seal"}
    if not hmac.compare_digest(_seal(carried, key).encode(), str(given.get("seal")).encode()):
        raise ConfigurationError("the request was not planned by this server")


def _check(ids: Sequence[int], model: str, token_ids: Sequence[int], runtime: PlanningRuntime) -> None:
    if model != runtime.fingerprint:
        raise ConfigurationError("it was made for other weights, another config or another dtype")
    if list(ids) != list(token_ids):
        raise ConfigurationError("it was made for other token ids: give vLLM the prompt's token ids, not its text")
    if runtime.pinned_rope:
        raise ConfigurationError("the model's rotary frequencies depend on the length, and vLLM's differ")
