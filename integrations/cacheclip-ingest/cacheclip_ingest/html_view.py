"""Which parts of an HTML page its readers see, as far as the elements say it themselves.

What is unsure stays: a style sheet or script may change sizes and colours, and what is moved or cut off is often shown
later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .unseen import Unseen

_NOT_SAID = re.compile(r"""/\*.*?(?:\*/|\Z)|"[^"]*+"|'[^']*+'|url\([^)]*+(?:\)|\Z)""", re.DOTALL)
"""Parts of a style in which colons and semicolons say nothing."""
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(%|[a-z]*)")
_PIXELS = {"px": 1.0, "pt": 4 / 3, "em": 16.0, "rem": 16.0}
_FAR = 2000
"""Pixels to the left of the page, or above it, to which nobody scrolls."""
_MOVES = ("transform", "transition", "animation", "will-change", "animation-name", "transition-property")
"""With them, what is invisible at first is shown by a script while the reader looks on."""
_CLEAR = re.compile(r"transparent|(?:rgb|hsl)a?\((?:(?:[^,/]+,){3}|[^/]+/)0*(?:\.0+)?%?\)|#[0-9a-f]{6}00|#[0-9a-f]{3}0")
_WHITE = re.compile(r"white|#f{3,4}|#f{6}(?:f{2})?|rgba?\(255,255,255(?:,1)?\)|hsla?\(\d+,\d+%,100%(?:,1)?\)")
_SAME = ("", "inherit", "initial", "unset", "none", "currentcolor", "0", "00")
"""What changes no colour."""
_DRAWS = re.compile("background|shadow|text-stroke|text-fill|filter|blend|color-scheme")
"""Parts of the names of what draws a ground, or letters in other colours."""
_OWN_COLOUR, _OWN_LETTERS = frozenset({"a", "mark"}), frozenset("button input select table textarea".split())
"""Elements that do not draw letters as what is around them: in another colour, or size, too. (A table does not in
pages of old.)"""
_STYLED = re.compile(r"<(?:style|script)\b|stylesheet|color-scheme", re.IGNORECASE)
_PICTURES = frozenset("canvas embed iframe img object svg video".split())


def is_styled(source: str) -> bool:
    """Whether something else than the elements themselves may say how a page is drawn."""
    return _STYLED.search(source) is not None


def style_of(given: Mapping[str, str]) -> dict[str, str]:
    """What an element's own style says, in small letters and without spaces. The last word counts, and what is
    important."""
    if "style" not in given:
        return {}
    style = re.sub(r"\s", "", _NOT_SAID.sub("-", given.get("style", "").lower()))
    said = sorted(style.split(";"), key=lambda each: each.endswith("!important"))
    return {name: value.removesuffix("!important") for name, _, value in (each.partition(":") for each in said)}


def why_unseen(tag: str, given: Mapping[str, str], style: Mapping[str, str]) -> Unseen | None:
    """Why readers see nothing of an element, and of what stands in it; None if they may."""
    is_off = "hidden" in given or (tag == "dialog" and "open" not in given)
    if style.get("display", "none" if is_off else "") == "none":
        return Unseen.SWITCHED_OFF
    if given.get("aria-hidden", "").strip().casefold() == "true":
        return Unseen.SWITCHED_OFF
    if _is_nothing(style.get("opacity", "")) and not any(name in style for name in _MOVES):
        return Unseen.TRANSPARENT
    return Unseen.OUTSIDE if _is_off_page(style) else None


def _is_off_page(style: Mapping[str, str]) -> bool:
    found = (_NUMBER.fullmatch(style.get(name, "")) for name in ("left", "top"))
    return style.get("position") in ("absolute", "fixed") and any(
        each is not None and float(each[1]) * _PIXELS.get(each[2], 0) <= -_FAR for each in found
    )


def _is_nothing(value: str) -> bool:
    found = _NUMBER.fullmatch(value)
    return found is not None and float(found[1]) == 0


def draws(tag: str, given: Mapping[str, str], style: Mapping[str, str]) -> bool:
    """Whether an element draws something on which, or by which, letters without a colour of their own are seen."""
    colours = [given.get("bgcolor", "").lower(), *(style[name] for name in style if _DRAWS.search(name))]
    return (
        tag in _PICTURES
        or "background" in given
        or any(each not in _SAME and not _CLEAR.fullmatch(each) and not _WHITE.fullmatch(each) for each in colours)
    )


class Letters(NamedTuple):
    """How an element draws letters. Elements within it do the same, unless they say otherwise."""

    hidden: bool = False
    small: bool = False
    clear: bool = False
    white: bool = False

    def within(self, tag: str, given: Mapping[str, str], style: Mapping[str, str], is_styled: bool) -> Letters:
        """The letters of an element within this one.

        Args:
            is_styled: the page has a style sheet, which may say how large these are.
        """
        hidden, small, clear, white = self
        if style.get("visibility", "inherit") != "inherit":
            hidden = style["visibility"] in ("hidden", "collapse")
        if tag in _OWN_LETTERS or is_styled or "font" in style or "size" in given:
            small = False
        if size := style.get("font-size"):
            is_part = size.endswith(("em", "%")) and not size.endswith("rem") and _NUMBER.fullmatch(size)
            small = "font" not in style and (_is_nothing(size) or (small and bool(is_part)))
        colour = style.get("color", given.get({"font": "color", "body": "text"}.get(tag, ""), "").lower())
        if tag in _OWN_LETTERS | _OWN_COLOUR or colour not in _SAME:
            clear, white = (each.fullmatch(colour) is not None for each in (_CLEAR, _WHITE))
        return Letters(hidden, small, clear, white)

    def why_unseen(self, has_ground: bool) -> Unseen | None:
        """Why readers do not see them.

        Args:
            has_ground: something else than their colour may show them.
        """
        if self.hidden:
            return Unseen.SWITCHED_OFF
        if self.small:
            return Unseen.TOO_SMALL
        if has_ground or not (self.clear or self.white):
            return None
        return Unseen.TRANSPARENT if self.clear else Unseen.ON_WHITE
