"""Answers and their parts, under the name that the module had before the rooms: programs import it."""

from .fusion.answer import Answer, Event, FusionStats, Trace

__all__ = ["Answer", "Event", "FusionStats", "Trace"]
