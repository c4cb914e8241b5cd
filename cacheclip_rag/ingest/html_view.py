"""Which parts of an HTML page its readers see, as far as the elements say it themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from .unseen import Unseen

_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(%|[a-z]*)")
_FAR = {"px": 900, "pt": 700, "em": 50, "rem": 50, "vw": 100, "vh": 100}
"""How far to the left or above a place is off the page, by unit."""
_MOVED = re.compile(r"translate(?:x|y|3d)?\(-\d{4,}px.*")
_MOVES = ("transform", "transition", "animation", "will-change", "animation-name", "transition-property")
"""With them, what is invisible at first is shown by a script while the reader looks on."""
_NO_ROOM = re.compile(r"rect\((?:0|1px,1px,1px,1px).*|inset\((?:50|100)%\)")
_CLEAR = re.compile(r"transparent|(?:rgb|hsl)a?\((?:(?:[^,/]+,){3}|[^/]+/)0*(?:\.0+)?%?\)|#[0-9a-f]{6}00|#[0-9a-f]{3}0")
_WHITE = re.compile(r"white|#f{3,4}|#f{6}(?:f{2})?|rgba?\(255,255,255(?:,1)?\)|hsla?\(\d+,\d+%,100%(?:,1)?\)")
_SAME = ("", "inherit", "initial", "unset", "none", "currentcolor", "0", "00")
"""What changes no colour."""


def style_of(given: Mapping[str, str]) -> dict[str, str]:
    """What an element's own style says, in small letters and without spaces."""
    style = re.sub(r"\s|!important", "", given.get("style", "").lower())
    return {name: value for name, _, value in (each.partition(":") for each in style.split(";") if each)}


def why_unseen(tag: str, given: Mapping[str, str], style: Mapping[str, str]) -> Unseen | None:
    """Why readers see nothing of an element, and of what stands in it; None if they may."""
    if "hidden" in given or given.get("aria-hidden") == "true" or (tag == "dialog" and "open" not in given):
        return Unseen.SWITCHED_OFF
    if style.get("display") == "none" or style.get("visibility") in ("hidden", "collapse"):
        return Unseen.SWITCHED_OFF
    if _is_nothing(style.get("opacity", "")) and not any(name in style for name in _MOVES):
        return Unseen.TRANSPARENT
    return Unseen.OUTSIDE if _is_off_page(style) or _is_cut_off(style) else None


def _is_off_page(style: Mapping[str, str]) -> bool:
    places = ["text-indent", "margin-left", "margin-top"]
    if style.get("position") in ("absolute", "fixed", "relative"):
        places += ["left", "right", "top", "bottom"]
    found = (_NUMBER.fullmatch(style.get(name, "")) for name in places)
    return any(each is not None and float(each[1]) <= -_FAR.get(each[2], inf) for each in found) or bool(
        _MOVED.fullmatch(style.get("transform", ""))
    )


def _is_cut_off(style: Mapping[str, str]) -> bool:
    """Whether an element has no room, as what is meant for screen readers only."""
    if any(_NO_ROOM.fullmatch(style.get(name, "")) for name in ("clip", "clip-path")):
        return True
    sizes = (style.get(name, "") for name in ("width", "height", "max-width", "max-height"))
    return style.get("overflow") == "hidden" and any(map(_is_nothing, sizes))


def _is_nothing(value: str) -> bool:
    found = _NUMBER.fullmatch(value)
    return found is not None and float(found[1]) == 0


class Letters(NamedTuple):
    """How an element draws letters. Elements within it do the same, unless they say otherwise."""

    small: bool = False
    clear: bool = False
    white: bool = False
    on_ground: bool = False
    """Whether something that is not white may stand behind them."""

    def within(self, given: Mapping[str, str], style: Mapping[str, str]) -> Letters:
        """The letters of an element within this one."""
        letters, size = self, style.get("font-size", "")
        colour = style.get("color", given.get("color", given.get("text", "")).lower())
        ground = style.get("background-color", style.get("background", given.get("bgcolor", "").lower()))
        if found := _NUMBER.fullmatch(size):
            is_part = found[2] in ("em", "%")
            letters = letters._replace(small=_is_nothing(size) or (is_part and self.small))
        if colour not in _SAME:
            is_clear, is_white = (each.fullmatch(colour) is not None for each in (_CLEAR, _WHITE))
            letters = letters._replace(clear=is_clear, white=is_white)
        if "background" in given or "background-image" in style:
            letters = letters._replace(on_ground=True)
        elif ground not in _SAME and not _CLEAR.fullmatch(ground):
            letters = letters._replace(on_ground=_WHITE.fullmatch(ground) is None)
        return letters

    def why_unseen(self) -> Unseen | None:
        if self.small:
            return Unseen.TOO_SMALL
        if self.clear:
            return Unseen.TRANSPARENT
        return Unseen.ON_WHITE if self.white and not self.on_ground else None
