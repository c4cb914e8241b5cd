"""An HTTP server with OpenAI's API over an engine: ``cacheclip serve``.

A request passes the files in this order: ``app.py`` (paths, time limit, streams), ``access.py`` (keys and tenants),
``schema.py`` with ``field.py`` (what a body may hold), ``queue.py``, a backend (``backend.py``; ``transformers.py``
answers with cacheclip-rag's engine), ``replies.py`` (what goes back). ``server.py`` starts and stops it.
:mod:`cacheclip_vllm` has vLLM's own server answer instead, and is built on the names below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .access import Access, Caller, check_origins, read_tenants
    from .app import Limits
    from .backend import ModelCard, ServedQuestion, ServingBackend
    from .bodies import Bodies, check_host
    from .bounds import check_counts
    from .connections import KEEP_S, timed
    from .counters import Counters, exposition
    from .errors import RequestError, error_body, error_of, unsupported
    from .field import CacheClipField
    from .hidden import names_of, renamed
    from .queue import Queue, QueueFull
    from .replies import as_json, server_sent
    from .schema import ChatBody, parse_field, read_json, without_nothing
    from .server import Server, address_of, check_reachable, served_name
    from .transformers import TransformersBackend

__all__ = [
    "KEEP_S",
    "Access",
    "Bodies",
    "CacheClipField",
    "Caller",
    "ChatBody",
    "Counters",
    "Limits",
    "ModelCard",
    "Queue",
    "QueueFull",
    "RequestError",
    "ServedQuestion",
    "Server",
    "ServingBackend",
    "TransformersBackend",
    "address_of",
    "as_json",
    "check_counts",
    "check_host",
    "check_origins",
    "check_reachable",
    "error_body",
    "error_of",
    "exposition",
    "names_of",
    "parse_field",
    "read_json",
    "read_tenants",
    "renamed",
    "served_name",
    "server_sent",
    "timed",
    "unsupported",
    "without_nothing",
]

_HOMES = {
    "KEEP_S": "connections",
    "Access": "access",
    "Bodies": "bodies",
    "CacheClipField": "field",
    "Caller": "access",
    "ChatBody": "schema",
    "Counters": "counters",
    "Limits": "app",
    "ModelCard": "backend",
    "Queue": "queue",
    "QueueFull": "queue",
    "RequestError": "errors",
    "ServedQuestion": "backend",
    "Server": "server",
    "ServingBackend": "backend",
    "TransformersBackend": "transformers",
    "address_of": "server",
    "as_json": "replies",
    "check_counts": "bounds",
    "check_host": "bodies",
    "check_origins": "access",
    "check_reachable": "server",
    "error_body": "errors",
    "error_of": "errors",
    "exposition": "counters",
    "names_of": "hidden",
    "parse_field": "schema",
    "read_json": "schema",
    "read_tenants": "access",
    "renamed": "hidden",
    "served_name": "server",
    "server_sent": "replies",
    "timed": "connections",
    "unsupported": "errors",
    "without_nothing": "schema",
}
__getattr__ = late_names(__name__, _HOMES)
