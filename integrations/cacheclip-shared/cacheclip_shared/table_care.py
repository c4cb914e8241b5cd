"""A tenant's table for whoever looks after the store: fewer files, and none that is damaged or that nobody reads."""

from __future__ import annotations

import math

from .place import need
from .table import DamagedFileError, TextTable


class TendedTable(TextTable):
    """A table whose files are put together, mended and removed."""

    def compact(self) -> dict[str, int]:
        """Put small files together."""
        if not self.files():
            return {"files": 0, "removed": 0}
        found = self._in_turn(lambda: self._open().optimize.compact())
        self._tried(lambda: self._open().create_checkpoint())
        return {"files": len(self.files()), "removed": int(found["numFilesRemoved"])}

    def repair(self) -> list[str]:
        """Take files that are damaged or missing out of the table; returns their names."""
        gone, damaged = self._forget_missing(), []
        for file in self.files():
            try:
                self.read(file)
            except DamagedFileError:
                damaged.append(file)
        if damaged:
            self._tried(lambda: need("obstore").delete(self._place.patient, damaged))
            self._forget_missing()
        return [*gone, *damaged]

    def _forget_missing(self) -> list[str]:
        if self._tried(self._open) is None:
            return []
        found = self._in_turn(lambda: self._open().repair())
        return [f"{self.folder}/{path}" for path in found["files_removed"]]

    def vacuum(self, hours: float) -> int:
        """Delete files that no version of the last ``hours`` needs; returns how many."""
        table = self._tried(self._open)
        if table is None:
            return 0
        options = {"retention_hours": math.ceil(hours), "enforce_retention_duration": False, "dry_run": False}
        found = self._tried(lambda: table.vacuum(**options))
        self._tried(table.cleanup_metadata)
        return len(found)
