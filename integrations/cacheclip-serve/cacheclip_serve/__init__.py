"""An HTTP server with OpenAI's API over an engine: ``cacheclip serve``.

A request passes the files in this order: ``app.py`` (paths, time limit, streams), ``access.py`` (keys and tenants),
``schema.py`` with ``field.py`` (what a body may hold), ``queue.py``, a backend (``backend.py``; ``transformers.py``
answers with this package's engine), ``replies.py`` (what goes back). ``server.py`` starts and stops it.
:mod:`cacheclip_vllm` has vLLM's own server answer instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.base.errors import MissingExtraError
from cacheclip_rag.base.late import late_names

if TYPE_CHECKING:
    from .access import Access
    from .app import Limits
    from .backend import ServingBackend
    from .field import CacheClipField
    from .server import Server
    from .transformers import TransformersBackend

__all__ = ["Access", "CacheClipField", "Limits", "Server", "ServingBackend", "TransformersBackend"]

try:
    import pydantic  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError("the server (starlette, uvicorn and pydantic)", "serve") from error

__getattr__ = late_names(
    __name__,
    {
        "Access": "access",
        "CacheClipField": "field",
        "Limits": "app",
        "Server": "server",
        "ServingBackend": "backend",
        "TransformersBackend": "transformers",
    },
)
