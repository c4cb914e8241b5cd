"""A tenant's quota holds whatever the store's limit is, and for writes that are under way."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.store import ChunkStore, TenantStore
from cacheclip_rag.store.entries import Entry
from cacheclip_rag.store.eviction import make_room
from tests.store.samples import blocks, key, kv, opened, put, size, totals_are_right

SMALL, LARGE = 4, 600
"""Tokens of entries."""
LIMITS: list[tuple[str, int | None, int | None, bool]] = [
    ("below both", 2, 2, True),
    ("above the quota", 1, 2, False),
    ("above the quota, without a limit", 1, None, False),
    ("above the limit", 2, 1, False),
    ("above the limit, without a quota", None, 1, False),
    ("above both", 1, 1, False),
    ("no bounds", None, None, True),
]
"""Quota and limit, 2: above a large entry; 1: below it. Whether it is stored."""


@pytest.mark.some(3)
@pytest.mark.parametrize("medium", ["memory", "disk"])
@pytest.mark.parametrize(("quota", "limit", "fits"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_what_is_too_large_is_not_stored_and_costs_nobody_anything(
    tmp_path: Path, medium: str, quota: int | None, limit: int | None, fits: bool
) -> None:
    ours = opened(tmp_path if medium == "disk" else None)
    theirs = TenantStore(ours.chunk_store, "u")
    small, large = (ours.chunk_store.tiers.round_up(size(tokens)) for tokens in (SMALL, LARGE))
    bounds = {None: None, 1: large - 1, 2: large + 3 * small}
    for tenant in (ours, theirs):
        put(tenant, 1)
    ours.chunk_store.set_quota("t", bounds[quota])
    ours.chunk_store.set_limit(bounds[limit])
    assert ours.put(key(2), kv(2, LARGE), "float32") is fits
    assert ours.keys() == [key(1), *([key(2)] if fits else [])] and theirs.keys() == [key(1, "u")]
    assert not ours.catalog.announcements.writers() and totals_are_right(ours)
    assert ours.put(key(1), kv(1, LARGE), "float32") is fits, "in place of an older version"
    assert (key(1) in ours) is fits


@pytest.mark.long
def test_any_quotas_limits_and_sizes(tmp_path: Path) -> None:
    sizes = {tokens: blocks(tokens) for tokens in (4, 300, 600, 900)}
    for seed in range(25):
        chance = random.Random(seed)
        store = ChunkStore.open(tmp_path / str(seed))
        tenants = [TenantStore(store, name) for name in "tu"]
        quotas = {each.namespace: chance.choice((None, *sizes.values(), 2 * sizes[900])) for each in tenants}
        limit = chance.choice((None, sizes[600], 3 * sizes[900]))
        for name, quota in quotas.items():
            store.set_quota(name, quota)
        store.set_limit(limit)
        for number in range(12):
            tenant, tokens = chance.choice(tenants), chance.choice([*sizes])
            bounds = [each for each in (limit, quotas[tenant.namespace]) if each is not None]
            stored = tenant.put(key(number, tenant.namespace), kv(number, tokens), "float32")
            assert stored == (sizes[tokens] <= min(bounds, default=sizes[tokens])), (seed, number)
            assert (key(number, tenant.namespace) in tenant) == stored
            for each in tenants:
                assert each.stats().bytes <= (quotas[each.namespace] or each.stats().bytes), (seed, number)
            assert store.stats().bytes <= (limit or store.stats().bytes)


@pytest.mark.parametrize(("quota", "limit"), [(3, 3), (3, None), (None, 3), (None, None)])
def test_writes_under_way_count_for_both(quota: int | None, limit: int | None) -> None:
    catalog = ChunkStore.open(None).catalog
    catalog.limits.set_quota("t", quota)
    catalog.limits.set_of_store(limit)
    first, _ = catalog.announcements.reserve("t", key(1), 2, "", lambda keys: None)
    assert first is not None
    bounded = not (quota is None and limit is None)
    second, _ = catalog.announcements.reserve("t", key(2), 2, "", lambda keys: None)
    assert (second is None) == bounded
    third, _ = catalog.announcements.reserve("u", key(1, "u"), 2, "", lambda keys: None)
    assert (third is None) == (limit is not None), "another tenant has no part in a quota"
    catalog.announcements.abandon(first)
    assert bounded == (second is None)
    if bounded and third is None:
        assert catalog.announcements.reserve("t", key(2), 2, "", lambda keys: None)[0] is not None


def test_eviction_ends_if_nothing_can_be_removed() -> None:
    """From a table whose rows cannot be deleted, as with an index of other keys."""
    catalog = ChunkStore.open(None).catalog
    catalog.record(Entry(key(1), "t", None, 500, 1, "float32"))
    catalog.limits.set_of_store(100)
    with catalog.database.transaction() as run:

        def stubborn(sql: str, arguments: Sequence[Any] = ()) -> Any:
            return run(sql.replace("DELETE FROM entries WHERE", "DELETE FROM entries WHERE 0 AND"), arguments)

        assert make_room(stubborn, "t", "", 0, lambda keys: None) == (False, 0)
    assert catalog.keys("t") == [key(1)]
