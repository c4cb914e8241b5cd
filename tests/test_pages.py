"""Large memory: what is asked for, and what is given back."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from cacheclip_rag import pages

SIZES = [1, 4096, 1_000_000, pages._HUGE - 1, pages._HUGE, 3 * pages._HUGE, 5_000_000, 7_340_031]
CPU = torch.device("cpu")


@pytest.fixture(params=["huge pages", "no huge pages", "no madvise"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "huge pages" and not pages._HAS_HUGE:
        pytest.skip("this system has no huge pages")
    if request.param != "huge pages":
        monkeypatch.setattr(pages, "_HAS_HUGE", False)
    if request.param == "no madvise":
        monkeypatch.setattr(pages, "_CAN_RETURN", False)
    return str(request.param)


@pytest.mark.parametrize("num_bytes", [0, *SIZES])
def test_memory_is_as_large_as_asked_and_can_be_written(system: str, num_bytes: int) -> None:
    memory = pages.new_memory(num_bytes)
    assert memory.nbytes == num_bytes and not memory.readonly and memory.format == "B"
    memory[:] = content = random.Random(0).randbytes(num_bytes)
    assert bytes(memory) == content


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_after_the_returned_part_stays(system: str, num_bytes: int) -> None:
    """Bytes are returned from the front to the back, as layers are used."""
    content = random.Random(0).randbytes(num_bytes)
    memory = pages.new_memory(num_bytes)
    memory[:] = content
    step = max(1, num_bytes // 7)
    for start in range(0, num_bytes, step):
        stop = min(num_bytes, start + step)
        pages.give_back(memory, start, stop)
        assert memory[stop:] == content[stop:]
    if system != "no madvise" and num_bytes >= pages._HUGE:
        assert not any(memory[: pages._HUGE])  # the system gives zeros


@pytest.mark.parametrize("system", ["huge pages"], indirect=True)
@pytest.mark.parametrize(("num_bytes", "huge"), [(1_000_000, 0), (1_100_000, 1), (3_000_000, 1), (3_200_000, 2)])
def test_at_most_half_a_huge_page_is_wasted(
    system: str, monkeypatch: pytest.MonkeyPatch, num_bytes: int, huge: int
) -> None:
    asked: list[tuple[int, int]] = []

    class Map(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:  # type: ignore[override]
            assert option == mmap.MADV_HUGEPAGE
            asked.append((start, length))

    monkeypatch.setattr(pages.mmap, "mmap", Map)
    address = torch.frombuffer(pages.new_memory(num_bytes), dtype=torch.uint8).data_ptr()
    assert [length for _, length in asked] == [huge * pages._HUGE] * bool(huge)
    assert not huge or address % pages._HUGE == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 1, 3, 700, 64), (0, 5)])
def test_a_tensor_of_it(system: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = pages.empty(shape, dtype, CPU)
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous() and found.device == CPU
    found.copy_(values := torch.randn(shape).to(dtype))
    assert torch.equal(found, values)


def test_other_devices_have_memory_of_their_own() -> None:
    found = pages.empty((2, 1 << 20), torch.float32, torch.device("meta"))
    assert found.device.type == "meta" and found.shape == (2, 1 << 20)


def test_memory_that_cannot_be_returned_is_left_alone() -> None:
    memory = memoryview(bytearray(b"x" * 100_000))
    pages.give_back(memory, 0, 100_000)
    assert bytes(memory) == b"x" * 100_000
