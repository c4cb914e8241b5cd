"""An HTTP server with OpenAI's and Anthropic's APIs over an engine: ``cacheclip serve``.

A request passes the files in this order: ``app.py`` (paths, time limit, streams), ``access.py`` (keys and tenants),
``responses_api.py`` or ``messages_api.py`` (other requests as chats), ``schema.py`` with ``field.py`` (what a body may
hold), ``queue.py``, a backend (``backend.py``; ``transformers.py`` answers with cacheclip-rag's engine),
``replies.py`` and ``parts.py`` (what goes back), ``sending.py``. ``server.py`` starts and stops it, ``learning.py``
stores what recurs in requests, ``inspection.py`` keeps the last answers for pages (``pages.py``).
:mod:`cacheclip_vllm` has vLLM's own server answer instead, and is built on the names below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .access import Access as Access, Caller as Caller, check_origins as check_origins, read_tenants as read_tenants
    from .app import Limits as Limits
    from .backend import ModelCard as ModelCard, ServedQuestion as ServedQuestion, ServingBackend as ServingBackend
    from .background import in_background as in_background
    from .bodies import Bodies as Bodies, check_host as check_host
    from .bounds import check_counts as check_counts
    from .connections import KEEP_S as KEEP_S, timed as timed
    from .counters import Counters as Counters, exposition as exposition
    from .embeddings import EMBEDDINGS as EMBEDDINGS, EmbeddingService as EmbeddingService
    from .errors import (
        RequestError as RequestError,
        error_body as error_body,
        error_of as error_of,
        unsupported as unsupported,
    )
    from .field import CacheClipField as CacheClipField
    from .hidden import names_of as names_of, renamed as renamed
    from .inspection import (
        AnswerPages as AnswerPages,
        InspectedAnswer as InspectedAnswer,
        Inspection as Inspection,
    )
    from .learning import LearnedTexts as LearnedTexts
    from .messages_api import MessagesReply as MessagesReply
    from .pages import answer_page as answer_page, page_writer as page_writer
    from .queue import Queue as Queue, QueueFull as QueueFull
    from .reading import read_json as read_json
    from .replies import as_json as as_json, server_sent as server_sent
    from .schema import (
        ChatBody as ChatBody,
        parse_field as parse_field,
        without_nothing as without_nothing,
    )
    from .server import (
        Server as Server,
        address_of as address_of,
        check_reachable as check_reachable,
        served_name as served_name,
    )
    from .transformers import TransformersBackend as TransformersBackend
    from .translating import drop_optional_tools as drop_optional_tools


__getattr__, __all__ = late_names(
    __name__,
    {
        "access": "Access Caller check_origins read_tenants",
        "pages": "answer_page page_writer",
        "app": "Limits",
        "backend": "ModelCard ServedQuestion ServingBackend",
        "background": "in_background",
        "bodies": "Bodies check_host",
        "bounds": "check_counts",
        "connections": "KEEP_S timed",
        "counters": "Counters exposition",
        "embeddings": "EMBEDDINGS EmbeddingService",
        "errors": "RequestError error_body error_of unsupported",
        "field": "CacheClipField",
        "hidden": "names_of renamed",
        "inspection": "AnswerPages InspectedAnswer Inspection",
        "learning": "LearnedTexts",
        "messages_api": "MessagesReply",
        "queue": "Queue QueueFull",
        "reading": "read_json",
        "replies": "as_json server_sent",
        "schema": "ChatBody parse_field without_nothing",
        "server": "Server address_of check_reachable served_name",
        "transformers": "TransformersBackend",
        "translating": "drop_optional_tools",
    },
)
