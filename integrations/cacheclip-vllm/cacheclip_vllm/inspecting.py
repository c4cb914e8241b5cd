"""The page ``/inspect`` before vLLM's server: how its last answers came about, as far as plan and token counts tell. No
token has a score there, and nobody says why a text was not found.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import dataclass

from cacheclip_serve import AnswerPages, CacheClipField, InspectedAnswer, Inspection, ServedQuestion
from starlette.routing import Route as PathRoute, Router
from starlette.types import Receive, Scope, Send

from cacheclip_rag import Answer, FusionStats
from cacheclip_rag.planning import Waiter

from .once import WarnOnce
from .planners import Planning, Route
from .replies import ReplyText
from .settings import ServerSettings

logger = logging.getLogger(__name__)

_PATH = "/inspect"


class Inspecting:
    """Keeps the last answers of a server, and shows them."""

    def __init__(self, settings: ServerSettings, planning: Planning) -> None:
        access, self._planning = settings.access, planning
        self._inspection = Inspection([access.tenant, *(each for names in access.tenants.values() for each in names)])
        self._inspection.watch(planning.store)
        paths = AnswerPages(self._inspection, None, settings.name).paths()
        self._router = Router([PathRoute(path, show, methods=[method]) for method, path, show in paths])
        self._warn_once = WarnOnce(logger)

    def has(self, path: str) -> bool:
        return path == _PATH or path.startswith(f"{_PATH}/")

    def tell(self, address: str) -> None:
        """Say where each tenant finds its page."""
        for tenant, page in self._inspection.addresses(address):
            sys.stderr.write(f"answers of {tenant}: {page}\n")

    async def pages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a page. Raises RequestError."""
        alone = {name: value for name, value in scope.items() if name not in ("app", "router")}
        await self._router(alone, receive, send)

    def page(self, field: CacheClipField, tenant: str) -> UpcomingPage:
        """The page of an answer. Call it before the prompt is read."""
        return UpcomingPage(self, field, tenant, self._inspection.forgets(tenant))

    async def add(
        self, page: UpcomingPage, way: Route, stats: FusionStats, sent: bytes | bytearray
    ) -> InspectedAnswer | None:
        """Keep an answer. ``sent``: vLLM's response, or the beginning of its stream. What goes wrong is logged."""
        try:
            return await asyncio.to_thread(self._add, page, way, stats, bytes(sent))
        except Exception as error:
            self._warn_once("an answer has no page: %s", error)
            return None

    def _add(self, page: UpcomingPage, way: Route, stats: FusionStats, sent: bytes) -> InspectedAnswer | None:
        planner, trace = self._planning.planner(page.tenant), None
        text, has_ended = said(sent)
        if way.planned is not None:
            with planner.asking(Waiter()):
                trace = planner.trace(way.planned, stats)
        answer = Answer(text, (), "stop" if has_ended else "length", stats, trace)
        prompt = "" if way.asked is None else way.asked.prompt
        question = ServedQuestion(prompt, page.tenant, page.field.call_options())
        return self._inspection.add(question, answer, page.forgets)


@dataclass(eq=False, slots=True)
class UpcomingPage:
    """What is known of a page before its answer."""

    inspecting: Inspecting
    field: CacheClipField
    tenant: str
    forgets: int
    """How often the tenant's answers were forgotten before the prompt was read."""

    async def add(self, way: Route, stats: FusionStats, sent: bytes | bytearray) -> InspectedAnswer | None:
        """Keep the answer, unless a text of the tenant was erased meanwhile."""
        return await self.inspecting.add(self, way, stats, sent)


def said(sent: bytes) -> tuple[str, bool]:
    """Text of an answer of any path, or of the beginning of such a stream, and whether it ended by itself. Raises
    ValueError: it is no answer."""
    if sent.startswith(b"{"):
        whole = json.loads(sent)
        parts = [whole, *(whole.get("output") or ())]
        texts = [part.get("text") or "" for each in parts for part in each.get("content") or ()]
        if texts:
            return "".join(texts), True
    if not sent.startswith(b"event:"):
        answer = ReplyText.of(sent)
        return answer.text, answer.has_ended
    text = ""
    for event in sent.split(b"\n\n")[:-1]:
        kind, _, data = event.partition(b"\ndata: ")
        if kind in (b"event: content_block_delta", b"event: response.output_text.delta"):
            delta = json.loads(data).get("delta")
            text += delta if isinstance(delta, str) else (delta or {}).get("text") or ""
    return text, True
