"""Content addresses: any other input, any other key; the same input, the same key in every process."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from cacheclip_rag.store import chunk_key
from tests.conftest import examples

BASE: dict[str, Any] = {"model_fingerprint": "abc:float32", "prefix_ids": [1, 23], "chunk_ids": [4, 5, 6]}
BASE |= {"rope_pin": "[]", "namespace": "tenant"}
ids = st.lists(st.integers(0, 200_000), max_size=6)
text = st.text("ab:é[]", max_size=4)
inputs = st.fixed_dictionaries(
    {**dict.fromkeys(("model_fingerprint", "rope_pin", "namespace"), text), "prefix_ids": ids, "chunk_ids": ids}
)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_ids": [4, 56]},
        {"chunk_ids": [6, 5, 4]},
        {"chunk_ids": []},
        {"namespace": "Tenant"},
        {"namespace": "tenant "},
        {"namespace": ""},
        {"namespace": "tenant\x00"},
        {"namespace": "\ud800"},
        {"prefix_ids": [1, 23, 4], "chunk_ids": [5, 6]},
        {"prefix_ids": [], "chunk_ids": [1, 23, 4, 5, 6]},
        {"model_fingerprint": "abc:bfloat16"},
        {"prefix_ids": [12, 3]},
        {"rope_pin": ""},
        {"rope_pin": "[]t", "namespace": "enant"},
    ],
    ids=str,
)
def test_any_change_changes_the_key(change: dict[str, Any]) -> None:
    assert chunk_key(**{**BASE, **change}) != chunk_key(**BASE)


@examples(300)
@given(one=inputs, other=inputs)
def test_equal_keys_mean_equal_inputs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (chunk_key(**one) == chunk_key(**other)) == (one == other)


@examples(200)
@given(base=inputs, field=st.sampled_from(sorted(BASE)), data=st.data())
def test_one_changed_field_is_enough(base: dict[str, Any], field: str, data: st.DataObject) -> None:
    new = data.draw(ids if field.endswith("ids") else st.text(max_size=5))
    assert (chunk_key(**{**base, field: new}) == chunk_key(**base)) == (new == base[field])


@examples(100)
@given(base=inputs, one=st.text(max_size=8), other=st.text(max_size=8))
def test_namespaces_never_share(base: dict[str, Any], one: str, other: str) -> None:
    same = chunk_key(**{**base, "namespace": one}) == chunk_key(**{**base, "namespace": other})
    assert same == (one == other)


def test_is_a_safe_file_name() -> None:
    key = chunk_key(**{**BASE, "namespace": "../../etc"})
    assert len(key) == 64 and set(key) <= set("0123456789abcdef")


def test_keys_of_published_stores_stay_what_they_are() -> None:
    """A change here empties every user's store without a word: raise FORMAT_VERSION, and this line, on purpose."""
    assert chunk_key(**BASE) == "a6eb057b327b77dfe9ba5bba48cbb5b0e26c9089f8f0137ab3a171fe688bf124"
    bare = {**BASE, "rope_pin": "", "namespace": "default", "model_fingerprint": "m:t:float32"}
    other = chunk_key(**{**bare, "prefix_ids": [1, 2, 3], "chunk_ids": [5, 6]})
    assert other == "a400201748323bb29abbceedda135ab34adbba49003d83471dda3d2ed4554f66"
