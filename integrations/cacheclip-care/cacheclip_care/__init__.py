"""Care of a store folder: verify, repair, collect garbage, clear. The commands ``cacheclip store ...`` look after
stores behind URLs as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .catalog import CatalogCare as CatalogCare
    from .folder import clear as clear, collect_garbage as collect_garbage, repair as repair, verify as verify
    from .reports import RepairReport as RepairReport, VerifyReport as VerifyReport


__getattr__, __all__ = late_names(
    __name__,
    {"catalog": "CatalogCare", "folder": "clear collect_garbage repair verify", "reports": "RepairReport VerifyReport"},
)
