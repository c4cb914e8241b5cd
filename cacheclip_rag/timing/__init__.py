"""How long a prompt takes: profiles, the controller that chooses a recompute ratio, and texts to measure with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..base.machine import processor_name
    from .controller import Controller, find_profile, fit_media
    from .texts import QUESTION, make_texts

__all__ = ["QUESTION", "Controller", "find_profile", "fit_media", "make_texts", "processor_name"]

__getattr__ = late_names(
    __name__,
    {
        "QUESTION": "texts",
        "Controller": "controller",
        "find_profile": "controller",
        "fit_media": "controller",
        "make_texts": "texts",
        "processor_name": ".base.machine",
    },
)
