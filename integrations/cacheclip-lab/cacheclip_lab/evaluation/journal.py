"""The folder of a comparison: settings, and every answer as soon as it is made, so that a killed run can continue."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import atomic_path

from ..certificates.identity import differences
from .records import Record
from .results import ItemResult

_SETTINGS, _ITEMS = "settings.json", "items.jsonl"
METHODS = "methods"
_DIGEST = "record_sha256"
_CHANGED_SHOWN = 3


@dataclass(slots=True)
class Journal:
    """Answers to the records of a comparison, including answers of earlier runs."""

    settings: dict[str, Any]
    """Settings of the folder, and settings that this run needs first."""
    items: dict[tuple[str, str], ItemResult] = field(default_factory=dict)
    """Answers by record id and run label."""
    _digests: Mapping[str, str] = field(default_factory=dict)
    _file: TextIO | None = None

    def add(self, item: ItemResult) -> None:
        """Keep an answer. With a folder, it is on disk when this returns."""
        self.items[item.id, item.label] = item
        if self._file is not None:
            line = {_DIGEST: self._digests[item.id], **asdict(item)}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError unless ``folder`` is missing, empty, or holds a comparison."""
    if any(each.exists() and not each.is_dir() for each in (folder, *folder.parents)):
        raise ConfigurationError(f"expected a folder for the comparison, got a file at {folder}. Name another.")
    if folder.exists() and not (folder / _SETTINGS).exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty and holds no comparison. Name another folder.")


@contextmanager
def open_journal(folder: Path | None, settings: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Journal]:
    """The journal of ``folder`` (None: in memory), with its answers to ``records``. There may be more or fewer records
    than in earlier runs.

    ``date`` is the date of the first run. Settings of the auxiliary model are None until a method needs it. More
    ``methods`` may come, by label; those of earlier runs are kept.

    Raises:
        ConfigurationError: the folder holds something else, a comparison with other settings, or answers to a record
            that has changed; or it is a file, or its files are damaged.
    """
    if folder is None:
        yield Journal(dict(settings))
        return
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    digests = {record.id: digest_of(record) for record in records}
    journal = Journal(_agreed(folder, settings), _digests=digests)
    journal.items.update(_answers(folder, digests))
    _write_settings(folder, journal.settings)
    with (folder / _ITEMS).open("a", encoding="utf-8") as file:
        journal._file = file
        yield journal


def read_journal(folder: Path) -> Journal:
    """The settings and answers of a comparison, whatever was asked.

    Raises:
        ConfigurationError: the folder holds no comparison, or its files are damaged.
    """
    path = folder / _SETTINGS
    if not path.is_file():
        raise ConfigurationError(
            f"expected the folder of a comparison, got {folder} without {_SETTINGS}. Name one that cacheclip eval "
            "wrote with --out."
        )
    journal = Journal(_parsed(path.read_bytes(), str(path)))
    for number, line in enumerate(_lines(folder / _ITEMS), 1):
        _, item = _answer(line, f"line {number} of {folder / _ITEMS}")
        if all(map(math.isfinite, item.fidelity.values())):
            journal.items[item.id, item.label] = item
    return journal


def digest_of(record: Record) -> str:
    return hashlib.sha256(json.dumps(asdict(record), sort_keys=True, default=repr).encode()).hexdigest()


def _agreed(folder: Path, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with which to continue."""
    path = folder / _SETTINGS
    if not path.exists():
        return dict(mine)
    theirs = _parsed(path.read_bytes(), str(path))
    agreed, other = dict(mine), []
    for key, value in mine.items():
        if key not in theirs:
            other.append(f"{key} is not recorded there and {value!r} now")
        elif key == METHODS and isinstance(known := theirs[key], dict):
            for label in sorted(value.keys() & known.keys()):
                changed = differences(known[label], value[label])
                other += [f"{name} of {label} is {there} there" for name, there in changed.items()]
            agreed[key] = {**known, **value}
        elif key == "date" or (key.startswith("auxiliary") and value is None):
            agreed[key] = theirs[key]
        elif theirs[key] != value and not (key.startswith("auxiliary") and theirs[key] is None):
            other.append(f"{key} is {theirs[key]!r} there and {value!r} now")
    if other:
        raise ConfigurationError(
            f"the comparison in {folder} was begun with other settings: {'; '.join(other)}. "
            "Use the first settings to continue it, or name another folder."
        )
    return agreed


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    with atomic_path(folder / _SETTINGS) as temporary:
        temporary.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _answers(folder: Path, digests: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], ItemResult]]:
    """Answers so far to the records with these digests."""
    changed: dict[str, None] = {}
    for number, line in enumerate(_lines(folder / _ITEMS), 1):
        digest, item = _answer(line, f"line {number} of {folder / _ITEMS}")
        if digests.get(item.id, digest) != digest:
            changed[item.id] = None
        elif item.id in digests and all(map(math.isfinite, item.fidelity.values())):  # otherwise ask again
            yield (item.id, item.label), item
    if changed:
        shown = ", ".join(list(changed)[:_CHANGED_SHOWN])
        more = f" and {len(changed) - _CHANGED_SHOWN} more" if len(changed) > _CHANGED_SHOWN else ""
        raise ConfigurationError(
            f"expected the questions that {folder} holds answers to, got others with the same ids: {shown}{more} "
            "changed since. Give these ids of their own, restore them to go on, or name another folder."
        )


def _answer(line: bytes, where: str) -> tuple[str, ItemResult]:
    """The digest of a record, and an answer to it."""
    value = _parsed(line, where)
    known = {each.name for each in fields(ItemResult)} | {_DIGEST}
    if unknown := sorted(value.keys() - known):
        raise ConfigurationError(
            f"{where} has fields that this version does not know: {', '.join(unknown)}. Go on with the version that "
            "wrote it, or name another folder."
        )
    try:
        return value.pop(_DIGEST), ItemResult(**value)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{where} is not an answer of a comparison ({error}). Delete the line to have the question asked again, or "
            "name another folder."
        ) from error


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:  # not UTF-8 either
        raise ConfigurationError(f"{where} is not valid JSON ({error}). Restore it, or name another folder.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} is not a JSON object. Restore it, or name another folder.")
    return value


def _lines(path: Path) -> list[bytes]:
    """Complete lines of a file. An incomplete last line (of a killed run) is cut off, and its question is asked
    again."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return content[:whole].splitlines()
