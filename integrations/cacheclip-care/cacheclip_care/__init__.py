"""Care of a store folder: verify, repair, collect garbage, clear. The commands ``cacheclip store ...`` look after
stores behind URLs as well. And why a text was not reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .catalog import CatalogCare as CatalogCare
    from .explain import MissReport as MissReport, explain_miss as explain_miss, plausible as plausible
    from .folder import clear as clear, collect_garbage as collect_garbage, repair as repair, verify as verify
    from .reports import RepairReport as RepairReport, VerifyReport as VerifyReport


__getattr__, __all__ = late_names(
    __name__,
    {
        "catalog": "CatalogCare",
        "explain": "MissReport explain_miss plausible",
        "folder": "clear collect_garbage repair verify",
        "reports": "RepairReport VerifyReport",
    },
)
