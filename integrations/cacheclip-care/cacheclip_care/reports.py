"""What care of a store folder says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class VerifyReport:
    """What is wrong in a store; nothing was changed."""

    entries: int = 0
    bytes: int = 0
    """Bytes of all payloads on disk."""
    damaged: list[str] = field(default_factory=list)
    """Keys of payloads that do not match their checksums, key, tenant or entry."""
    unreadable: list[str] = field(default_factory=list)
    """Keys of payloads that cannot be read now, and may be intact: the disk fails, or others may not read them."""
    other_versions: list[str] = field(default_factory=list)
    """Keys of payloads of another version of this package: misses here, and nothing wrong."""
    missing: list[str] = field(default_factory=list)
    """Keys of entries without a payload."""
    unknown_files: list[str] = field(default_factory=list)
    """Payloads without an entry, temporary files of killed processes, and files of others, as paths in the store."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the catalog, its totals, the text index and the limit."""

    @property
    def is_clean(self) -> bool:
        return not (self.damaged or self.unreadable or self.missing or self.unknown_files or self.problems)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class RepairReport:
    """What a repair did."""

    entries: int = 0
    """Entries afterwards."""
    deleted: int = 0
    """Damaged payloads deleted. Their chunks are computed again when they are needed."""
    unreadable: list[str] = field(default_factory=list)
    """Keys of payloads that cannot be read or deleted now. They may be intact, and stay."""
    other_versions: list[str] = field(default_factory=list)
    """Keys of payloads of another version of this package. They stay."""
    forgotten: int = 0
    """Entries removed because they had no payload."""
    found_whole_only: int = 0
    """Texts that are found in prompts as a whole, but not in part, until they are precomputed again: payloads do not
    hold the text, and the catalog lost it."""
    recorded: int = 0
    """Payloads that got an entry again."""
    removed_files: list[str] = field(default_factory=list)
    """Files of killed processes that were removed."""
    moved_files: list[str] = field(default_factory=list)
    """Files that are not the store's, moved to its folder ``unknown``; and a catalog that could not be used."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
