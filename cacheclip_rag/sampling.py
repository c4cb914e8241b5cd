"""Sampling settings, under the name that the module had before the rooms: programs import it."""

from .base.sampling import SamplingParams

__all__ = ["SamplingParams"]
