"""The page ``/inspect`` before vLLM's server: how its last answers came about, as far as plan and token counts tell. No
token has a score there, and nobody says why a text was not found.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass

from cacheclip_serve import AnswerPages, CacheClipField, InspectedAnswer, Inspection, ServedQuestion, in_background
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

    async def add(self, page: UpcomingPage, way: Route, stats: FusionStats, said: ReplyText) -> InspectedAnswer | None:
        """Keep an answer. What goes wrong is logged."""
        try:
            return await asyncio.to_thread(self._add, page, way, stats, said)
        except Exception as error:
            self._warn_once("an answer has no page: %s", error)
            return None

    def _add(self, page: UpcomingPage, way: Route, stats: FusionStats, said: ReplyText) -> InspectedAnswer | None:
        planner, trace = self._planning.planner(page.tenant), None
        if way.planned is not None:
            with planner.asking(Waiter()):
                trace = planner.trace(way.planned, stats)
        answer = Answer(said.text, (), said.finish_reason, stats, trace, reasoning=said.reasoning)
        prompt = "" if way.asked is None else way.asked.prompt
        behind = in_background(page.field.background, prompt)
        question = ServedQuestion(prompt, page.tenant, page.field.call_options(), in_background=behind)
        return self._inspection.add(question, answer, page.forgets)


@dataclass(eq=False, slots=True)
class UpcomingPage:
    """What is known of a page before its answer."""

    inspecting: Inspecting
    field: CacheClipField
    tenant: str
    forgets: int
    """How often the tenant's answers were forgotten before the prompt was read."""

    async def add(self, way: Route, stats: FusionStats, said: ReplyText) -> InspectedAnswer | None:
        """Keep the answer, unless a text of the tenant was erased meanwhile."""
        return await self.inspecting.add(self, way, stats, said)
