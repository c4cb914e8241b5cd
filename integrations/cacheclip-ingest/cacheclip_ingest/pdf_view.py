"""Which text of a PDF page its readers see. pypdf gives all text that is drawn, seen or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import hypot, inf
from typing import TYPE_CHECKING, Any, NamedTuple

from .unseen import Unseen

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in units of the page."""
EVERYWHERE: Box = (-inf, -inf, inf, inf)
_NOWHERE: Box = (inf, inf, -inf, -inf)
_UPRIGHT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
_WHITE = 0.97
"""Least light of each colour in white."""
_LEAST_SIZE = 0.5
"""Least height of letters that can be read, in units of the page."""
_WIDE_LINE = 5
"""Least width of a line that may be the ground of a text."""
_MOST_BOXES = 1000
_PLAIN_SPACES = ("/DeviceGray", "/DeviceRGB", "/DeviceCMYK", "/CalGray", "/CalRGB", "/ICCBased")
"""Spaces whose numbers are lights, or four inks."""


def entry(holder: Any, key: str) -> Any:
    """The object that an entry of a dictionary is or refers to; None without it."""
    found = holder.get(key)
    return None if found is None else found.get_object()


def _entries(holder: Any, key: str) -> Any:
    """The dictionary that is an entry of another; an empty one without it, or if it is damaged."""
    found = entry(holder, key)
    return found if isinstance(found, dict) else {}


def page_box(page: PageObject) -> Box:
    """The part of a page that is shown."""
    try:
        media, crop = (upright(each) for each in (page.mediabox, page.cropbox))
    except (TypeError, ValueError):  # are damaged
        return EVERYWHERE
    shown = _shared(media, crop)
    return media if shown == _NOWHERE else shown


def upright(box: Iterable[Any]) -> Box:
    """A rectangle of a file, whose corners may stand in any order."""
    left, bottom, right, top = map(float, box)
    return min(left, right), min(bottom, top), max(left, right), max(bottom, top)


def overlap(one: Box, other: Box) -> bool:
    """Whether boxes share more than a line."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _shared(one: Box, other: Box) -> Box:
    found = max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])
    return found if found[0] <= found[2] and found[1] <= found[3] else _NOWHERE


def _times(m: list[float], n: list[float]) -> list[float]:
    """The matrix that does what ``m`` does, then what ``n`` does."""
    return [
        m[0] * n[0] + m[1] * n[2],
        m[0] * n[1] + m[1] * n[3],
        m[2] * n[0] + m[3] * n[2],
        m[2] * n[1] + m[3] * n[3],
        m[4] * n[0] + m[5] * n[2] + n[4],
        m[4] * n[1] + m[5] * n[3] + n[5],
    ]


def _moved(m: list[float], left: float, bottom: float, right: float, top: float) -> Box:
    """The box around a box that a matrix moved."""
    across, up = sorted((left * m[0], right * m[0])), sorted((left * m[1], right * m[1]))
    along, high = sorted((bottom * m[2], top * m[2])), sorted((bottom * m[3], top * m[3]))
    return across[0] + along[0] + m[4], up[0] + high[0] + m[5], across[1] + along[1] + m[4], up[1] + high[1] + m[5]


class _Boxes:
    """Places of a page. Beyond a number, new ones widen the last one, so that a page of many costs no more."""

    def __init__(self, boxes: Iterable[Box] = ()) -> None:
        self.all = [*boxes]

    def add(self, box: Box) -> None:
        if len(self.all) < _MOST_BOXES:
            self.all.append(box)
        else:
            last = self.all[-1]
            self.all[-1] = (*map(min, last[:2], box[:2]), *map(max, last[2:], box[2:]))  # type: ignore[assignment]

    def touch(self, box: Box) -> bool:
        return any(overlap(each, box) for each in self.all)


class Layers:
    """Layers of a file (optional content groups), and which of them are switched off when it is opened."""

    def __init__(self, reader: PdfReader) -> None:
        properties = _entries(entry(reader.trailer, "/Root"), "/OCProperties")
        default = _entries(properties, "/D")
        off = {*_keys(entry(properties, "/OCGs"))} if entry(default, "/BaseState") == "/OFF" else set()
        self._off = (off - {*_keys(entry(default, "/ON"))}) | {*_keys(entry(default, "/OFF"))}
        self._known: dict[Any, bool] = {}

    def are_off(self, group: Any) -> bool:
        """Whether what names this group, or this membership of groups, is not shown."""
        if group is None or not self._off:
            return False
        key = _key(group)
        if key not in self._known:
            self._known[key] = self._is_off(group.get_object(), key)
        return self._known[key]

    def _is_off(self, group: Any, key: Any) -> bool:
        named = group.get("/OCGs") if isinstance(group, dict) else None
        if named is None:
            return key in self._off
        members = named.get_object()
        off = [each in self._off for each in (_keys(members) if isinstance(members, list) else [_key(named)])]
        hides = {"/AllOn": any(off), "/AnyOff": not any(off), "/AllOff": not all(off)}
        return bool(off) and hides.get(entry(group, "/P"), all(off))


def _keys(references: Any) -> Iterator[Any]:
    return map(_key, references if isinstance(references, list) else ())


def _key(reference: Any) -> Any:
    """The number of an object, which all that refer to it share."""
    return getattr(reference, "idnum", None) or id(reference)


class _GraphicsState(NamedTuple):
    """What ``q`` keeps for ``Q``, as far as it decides what is seen."""

    clip: Box
    white: bool = False
    """Whether letters and areas are filled with white."""
    space: str = "/DeviceGray"
    clear: bool = False
    """Whether fillings let all through."""
    mode: int = 0
    """0 and 4 fill letters; 3 draws none."""
    size: float = 12.0
    spacing: float = 0.0
    leading: float = 0.0
    width: float = 1.0
    """Of lines."""


@dataclass(slots=True)
class _Form:
    """What waits until a form, which a page draws as a part of it, ends."""

    operands: Any
    base: list[float]
    resources: Any
    state: _GraphicsState
    saved: list[_GraphicsState]
    marks: list[bool]
    off: int


class PageView:
    """Follows the commands that draw a page, and takes out of them, before pypdf reads them, the texts that readers of
    the page do not see. What is unsure stays: boxes are too large rather than too small."""

    def __init__(
        self,
        drawn: Any,
        layers: Layers,
        shown: Box = EVERYWHERE,
        ground: Iterable[Box] = (),
        pictures: Iterable[Box] = (),
    ) -> None:
        """
        Args:
            drawn: a page or form.
            shown: part of it that is shown.
            ground: places that are not white before anything is drawn.
            pictures: places of pictures that are drawn later.
        """
        self.left_out: set[Unseen] = set()
        self.pictures = _Boxes(pictures)
        self._ground = _Boxes(ground)
        self._layers = layers
        self._resources = _entries(drawn, "/Resources")
        self._base = _UPRIGHT
        self._state, self._saved = _GraphicsState(shown), list[_GraphicsState]()
        self._marks, self._forms = list[bool](), list[_Form]()
        """Of the parts of the page that are open, whether each is switched off; forms that are open."""
        self._off = 0
        self._path: list[Any] = []
        self._clips = False
        self._sizes: dict[tuple[int, str], float] = {}
        self._place: tuple[float, ...] = ()
        self._from = self._to = 0.0

    def before(self, operator: bytes, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        """pypdf calls it before it reads a command. ``cm`` and ``tm`` are its matrices of page and text."""
        follow = _FOLLOWED.get(operator)
        if follow is not None:
            try:
                follow(self, operands, cm, tm)
            except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
                return  # a damaged command draws nothing; what pypdf makes of it stays

    def after(self, operator: bytes, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        """pypdf calls it after it read a command."""
        while operator == b"Do" and any(each.operands is operands for each in self._forms):
            form = self._forms.pop()  # those within it, which an error ended, go with it
            self._base, self._resources, self._state = form.base, form.resources, form.state
            self._saved, self._marks, self._off = form.saved, form.marks, form.off

    def _named(self, kind: str, name: Any) -> Any:
        """What a name of the page's resources refers to."""
        return _entries(self._resources, kind).get(name)

    def _set(self, **changes: Any) -> None:
        self._state = self._state._replace(**changes)

    def _box(self, cm: list[float], *box: float) -> Box:
        return _moved(cm if self._base is _UPRIGHT else _times(cm, self._base), *box)

    def _save(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._saved.append(self._state)

    def _restore(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        if self._saved:
            self._state = self._saved.pop()

    def _begin_mark(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._marks.append(False)
        if operands[0] == "/OC" and self._layers.are_off(self._named("/Properties", operands[1])):
            self._marks[-1] = True
            self._off += 1

    def _end_mark(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        if self._marks:
            self._off -= self._marks.pop()

    def _set_text_state(self, name: str, operands: list[Any]) -> None:
        self._set(**{name: operands[0]})

    def _set_font(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        key = id(self._resources), operands[0]
        if key not in self._sizes:
            font = self._named("/Font", operands[0])
            font = {} if font is None else font.get_object()
            unit = abs(float(entry(font, "/FontMatrix")[3])) if entry(font, "/Subtype") == "/Type3" else 0.001
            self._sizes[key] = 1000 * unit
        self._set(size=operands[1] * self._sizes[key])

    def _set_leading(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._set(leading=-operands[1])  # of TD

    def _set_parameters(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        given = self._named("/ExtGState", operands[0]).get_object()
        if "/ca" in given:
            self._set(clear=entry(given, "/ca") <= 1 - _WHITE)

    def _set_colour(self, operands: list[Any], cm: list[float], tm: list[float], is_plain: bool = True) -> None:
        are_inks = len(operands) == 4
        white = bool(operands) and all(
            isinstance(each, int | float) and (1 - each if are_inks else each) >= _WHITE for each in operands
        )
        white = white and (is_plain or self._is_plain(self._state.space))
        if white != self._state.white:
            self._set(white=white)

    def _set_colour_in_space(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._set_colour(operands, cm, tm, is_plain=False)

    def _set_space(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        if operands[0] != self._state.space or self._state.white:
            self._set(space=operands[0], white=False)

    def _is_plain(self, name: str) -> bool:
        space = self._named("/ColorSpace", name)
        space = name if space is None else space.get_object()
        return (space[0] if isinstance(space, list) else space) in _PLAIN_SPACES

    def _add_points(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._path += operands

    def _add_rectangle(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        x, y, width, height = operands
        self._path += (x, y, x + width, y + height)

    def _clip(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._clips = True

    def _end_path(self, cm: list[float], grown: float | None) -> None:
        """``grown``: by how much what is painted is larger than the path; None if nothing is painted."""
        path, clips = self._path, self._clips
        self._path, self._clips = [], False
        if path and (clips or grown is not None):
            grown = grown or 0.0
            across, up = path[::2], path[1::2]
            box = self._box(cm, min(across) - grown, min(up) - grown, max(across) + grown, max(up) + grown)
            box = _shared(box, self._state.clip)
            if clips:
                self._set(clip=box)
            elif not self._off:
                self._ground.add(box)

    def _fill(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._end_path(cm, None if self._state.white or self._state.clear else 0.0)

    def _stroke(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        is_wide = self._state.width * hypot(cm[0], cm[1]) > _WIDE_LINE
        self._end_path(cm, self._state.width / 2 if is_wide else None)

    def _end(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._end_path(cm, None)

    def _shade(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._ground.add(self._state.clip)

    def _picture(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        if not self._off:
            box = _shared(self._box(cm, 0, 0, 1, 1), self._state.clip)
            self._ground.add(box)
            self.pictures.add(box)

    def _draw(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        drawn = self._named("/XObject", operands[0]).get_object()
        is_off = self._layers.are_off(drawn.get("/OC"))
        if entry(drawn, "/Subtype") == "/Image":
            return None if is_off else self._picture(operands, cm, tm)
        form = _Form(operands, self._base, self._resources, self._state, self._saved, self._marks, self._off)
        self._forms.append(form)
        self._base = _times([*map(float, entry(drawn, "/Matrix") or _UPRIGHT)], _times(cm, self._base))
        self._resources = _entries(drawn, "/Resources")
        self._saved, self._marks, self._off = [], [], self._off + is_off
        if bounds := entry(drawn, "/BBox"):
            self._set(clip=_shared(_moved(self._base, *upright(bounds)), self._state.clip))
        return None

    def _show(self, operands: list[Any], cm: list[float], tm: list[float], next_line: bool = False) -> None:
        parts = operands[-1] if isinstance(operands[-1], list) else operands[-1:]
        texts = [each for each in parts if isinstance(each, str | bytes)]
        length = sum(map(len, texts))
        if not length:
            return
        if next_line:
            tm = _times([1.0, 0.0, 0.0, 1.0, 0.0, -self._state.leading], tm)
        unseen = self._reason(length, [each for each in parts if isinstance(each, int | float)], cm, tm)
        if unseen is not None:
            if any(each.strip() for each in texts):
                self.left_out.add(unseen)
            operands[-1] = type(operands[-1])() if isinstance(operands[-1], list) else ""

    def _show_below(self, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._show(operands, cm, tm, next_line=True)

    def _reason(self, length: int, gaps: list[float], cm: list[float], tm: list[float]) -> Unseen | None:
        """Why readers do not see a text, None if they may.

        Args:
            length: its bytes, each at most as wide as it is high.
            gaps: widths between its parts, in thousandths of the size; positive ones go back.
        """
        if self._off:
            return Unseen.SWITCHED_OFF
        state, size = self._state, self._state.size
        if (place := (*cm, *tm)) != self._place:  # pypdf does not move on behind a text
            self._place, self._from, self._to = place, 0.0, 0.0
        for move in (length * size, length * state.spacing, *(-each * size / 1000 for each in gaps)):
            self._from, self._to = self._from + min(move, 0), self._to + max(move, 0)
        at = _times(tm, cm) if self._base is _UPRIGHT else _times(_times(tm, cm), self._base)
        high = abs(size)
        if high * hypot(at[2], at[3]) < _LEAST_SIZE:
            return Unseen.TOO_SMALL
        box = _moved(at, self._from, -high / 2, self._to, high)
        if not overlap(box, state.clip):
            return Unseen.OUTSIDE
        is_filled = state.mode in (0, 4)
        if state.mode == 3 or (state.clear and is_filled):
            return None if self.pictures.touch(_moved(at, 0, 0, high, high)) else Unseen.TRANSPARENT
        return Unseen.ON_WHITE if state.white and is_filled and not self._ground.touch(box) else None


def _sets(name: str) -> Callable[..., None]:
    return lambda view, operands, cm, tm: view._set_text_state(name, operands)


_FOLLOWED: dict[bytes, Callable[[PageView, list[Any], list[float], list[float]], None]] = {
    b"q": PageView._save,
    b"Q": PageView._restore,
    b"BMC": PageView._begin_mark,
    b"BDC": PageView._begin_mark,
    b"EMC": PageView._end_mark,
    b"Tf": PageView._set_font,
    b"Tr": _sets("mode"),
    b"Tc": _sets("spacing"),
    b"TL": _sets("leading"),
    b"TD": PageView._set_leading,
    b"w": _sets("width"),
    b"gs": PageView._set_parameters,
    b"cs": PageView._set_space,
    **dict.fromkeys((b"g", b"rg", b"k"), PageView._set_colour),
    **dict.fromkeys((b"sc", b"scn"), PageView._set_colour_in_space),
    **dict.fromkeys((b"m", b"l", b"c", b"v", b"y"), PageView._add_points),
    b"re": PageView._add_rectangle,
    **dict.fromkeys((b"W", b"W*"), PageView._clip),
    **dict.fromkeys((b"f", b"F", b"f*", b"B", b"B*", b"b", b"b*"), PageView._fill),
    **dict.fromkeys((b"S", b"s"), PageView._stroke),
    b"n": PageView._end,
    b"sh": PageView._shade,
    b"Do": PageView._draw,
    b"INLINE IMAGE": PageView._picture,
    **dict.fromkeys((b"Tj", b"TJ"), PageView._show),
    **dict.fromkeys((b"'", b'"'), PageView._show_below),
}
"""Commands that decide what is seen (PDF 32000-1, annex A)."""
