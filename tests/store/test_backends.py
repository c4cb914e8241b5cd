"""The backends of the package: what all of them promise, and what is each one's own."""

import os
from pathlib import Path

import pytest
from cacheclip_testing.backends import BackendConformance, sample_key, sample_payload

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.store import (
    CAN_DROP_PAGE_CACHE,
    PAGE_CACHE,
    Backend,
    DiskBackend,
    MemoryBackend,
    Sink,
    Tiers,
    memory,
)


class TestMemoryBackend(BackendConformance):
    persists = False

    def make_backend(self, folder: Path) -> Backend:
        return MemoryBackend()

    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        assert isinstance(backend, MemoryBackend)
        return bytes(backend._payloads[key][0]) if key in backend._payloads else None

    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        assert isinstance(backend, MemoryBackend)
        backend._payloads[key] = memoryview(data), len(data)
        backend.num_bytes += len(data)


class TestMemoryLimit:
    def test_page_locked_memory_is_counted_as_it_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PyTorch takes a power of two."""
        monkeypatch.setattr(memory, "pins_memory", lambda: True)
        monkeypatch.setattr(memory, "new_memory", lambda size: memoryview(bytearray(size)))
        backend = MemoryBackend(3000)
        for number in (1, 2):
            backend.put(sample_key(number), bytes(1025))
        assert [*backend.list()] == [sample_key(2)] and backend.num_bytes == 2048
        backend.put(sample_key(2), bytes(2049))
        assert not [*backend.list()] and not backend.num_bytes

    def test_least_recently_used_goes_first(self) -> None:
        backend = MemoryBackend(3000)
        for number in (1, 2, 3):
            backend.put(sample_key(number), sample_payload(number))
        backend.get_many([sample_key(1)])
        backend.put(sample_key(4), sample_payload(4))
        assert set(backend.list()) == {sample_key(number) for number in (1, 3, 4)}

    def test_never_above_the_limit(self) -> None:
        backend = MemoryBackend(5017)
        for number in range(40):
            backend.put(sample_key(number % 7), sample_payload(number, 300 * (1 + number % 9)))
            held = backend.get_many(backend.list())
            assert sum(len(bytes(data)) for data in held.values()) <= 5017 and sample_key(number % 7) in held

    def test_payload_above_the_limit_is_not_kept_and_evicts_nothing(self) -> None:
        backend = MemoryBackend(2000)
        for number in (1, 2):
            backend.put(sample_key(number), sample_payload(number))
        backend.put(sample_key(1), sample_payload(9, 2001))
        assert list(backend.list()) == [sample_key(2)]  # nor is the older version served any more


class TestDiskBackend(BackendConformance):
    def make_backend(self, folder: Path) -> Backend:
        return DiskBackend(folder)

    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        path = _path(backend, key)
        return path.read_bytes() if path.exists() else None

    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        _path(backend, key).parent.mkdir(parents=True, exist_ok=True)
        _path(backend, key).write_bytes(data)

    @pytest.mark.skipif(not CAN_DROP_PAGE_CACHE, reason="the system does not say what its page cache has")
    def test_the_medium_is_the_page_cache_only_while_it_has_the_file(self, tmp_path: Path) -> None:
        backend = DiskBackend(tmp_path)
        backend.put(sample_key(1), sample_payload(1, 4_000_000))
        assert backend.medium(sample_key(1)) == PAGE_CACHE
        backend.drop_cached([sample_key(1)])
        assert (backend.medium(sample_key(1)) != PAGE_CACHE) == _can_drop(tmp_path / "other")
        backend.get_many([sample_key(1)])
        assert backend.medium(sample_key(1)) == PAGE_CACHE

    def test_stores_on_one_file_system_have_one_medium(self, tmp_path: Path) -> None:
        one, other = (DiskBackend(tmp_path / name).medium(sample_key(1)) for name in ("a", "b/c"))
        assert one == other == f"disk at {one.removeprefix('disk at ')}" and Path(one[8:]).is_mount()

    def test_files_of_others_are_not_listed(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1))
        folder = _path(backend, sample_key(1)).parent
        for name in (".hidden.kv", "notes.txt"):
            (folder / name).write_bytes(b"half")
        assert list(backend.list()) == [sample_key(1)]

    def test_bytes_are_counted_in_blocks(self, backend: Backend) -> None:
        """A file takes whole blocks of its disk, however short it is."""
        for num_bytes in (1, 4096, 4097):
            backend.put(sample_key(1), sample_payload(1, num_bytes))
            expected = 8192 if num_bytes > 4096 else 4096
            assert backend.round_up(num_bytes) == backend.occupied(sample_key(1)) == expected
        assert backend.round_up(0) == 0

    def test_a_payload_that_is_cut_off_while_it_is_read(self, backend: Backend) -> None:
        """What is there is returned; nothing is invented, and nobody waits."""
        backend.put(sample_key(1), sample_payload(1, 100_000))

        class Truncating(Sink):
            def allocate(self, num_bytes: int) -> memoryview:
                os.truncate(_path(backend, sample_key(1)), 60_000)
                return super().allocate(num_bytes)

        data = backend.read(sample_key(1), Truncating())
        assert data is not None and bytes(data) == sample_payload(1, 100_000)[:60_000]

    def test_writing_to_what_was_read_does_not_change_the_file(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1))
        view = memoryview(backend.get_many([sample_key(1)])[sample_key(1)])
        view[:] = bytes(len(view))
        assert self.read_raw(backend, sample_key(1)) == sample_payload(1)

    @pytest.mark.parametrize(
        ("before", "of_folders", "of_files"),
        [(None, 0o700, 0o600), (0o755, 0o700, 0o600), (0o770, 0o770, 0o660), (0o777, 0o700, 0o600)],
        ids=["new", "own", "shared with a group", "of everyone"],
    )
    def test_for_its_owner_alone_unless_the_folder_was_made_for_a_group(
        self, tmp_path: Path, before: int | None, of_folders: int, of_files: int
    ) -> None:
        """Stored KV tells what the documents say."""
        tmp_path.chmod(0o775)
        root = tmp_path / "in a new folder" / "store"
        if before is not None:
            root.mkdir(parents=True)
            root.chmod(before)
        umask = os.umask(0o002)
        try:
            backend = DiskBackend(root)
            backend.put(sample_key(1), sample_payload(1))
        finally:
            os.umask(umask)
        assert root.stat().st_mode & 0o777 == (before or 0o700)
        modes = {path.relative_to(root): path.stat().st_mode & 0o777 for path in root.rglob("*")}
        folders = {path: mode for path, mode in modes.items() if (root / path).is_dir()}
        assert len(folders) == 4 and set(folders.values()) == {of_folders}
        assert len(modes) - len(folders) == 2  # the payload, and the writer's lock
        assert {mode for path, mode in modes.items() if path not in folders} == {of_files}


class TestTiers(BackendConformance):
    def make_backend(self, folder: Path) -> Backend:
        return Tiers([MemoryBackend(2500), MemoryBackend(0), DiskBackend(folder)])

    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        return TestDiskBackend().read_raw(_disk(backend), key)

    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        TestDiskBackend().write_raw(_disk(backend), key, data)

    def test_reading_promotes_to_faster_tiers_alone_and_finding_does_not(self) -> None:
        first, second, last = MemoryBackend(), MemoryBackend(), MemoryBackend()
        tiers = Tiers([first, second, last])
        second.put(sample_key(1), sample_payload(1))
        found = tiers.find(sample_key(1), lambda num_bytes: memoryview(bytearray(num_bytes)))
        assert found is not None and found[1] == 1 and list(first.list()) == []
        assert bytes(tiers.get_many([sample_key(1)])[sample_key(1)]) == sample_payload(1)
        assert list(first.list()) == [sample_key(1)] and list(last.list()) == []

    def test_replaced_by_one_too_large_for_a_fast_tier(self, tmp_path: Path) -> None:
        """The fast tier must not go on serving what the last one no longer holds."""
        tiers = Tiers([MemoryBackend(1000), DiskBackend(tmp_path)])
        tiers.put(sample_key(1), sample_payload(1))
        tiers.put(sample_key(1), sample_payload(2, 1001))
        assert bytes(tiers.get_many([sample_key(1)])[sample_key(1)]) == sample_payload(2, 1001)

    def test_what_the_last_tier_refuses_no_tier_serves(self) -> None:
        class Full(MemoryBackend):
            def put(self, key: str, data: object) -> None:
                raise OSError(28, "No space left on device")

        first = MemoryBackend()
        with pytest.raises(OSError, match="No space left"):
            Tiers([first, Full()]).put(sample_key(1), sample_payload(1))
        assert list(first.list()) == []

    def test_no_tier_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="tier"):
            Tiers([])


def _path(backend: Backend, key: str) -> Path:
    assert isinstance(backend, DiskBackend)
    return backend.folder / key[:2] / f"{key}.kv"


def _can_drop(path: Path) -> bool:
    """Whether the file system has a medium that is slower than memory."""
    path.write_bytes(sample_payload(3, 100_000))
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [bytearray(1)], 50_000, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # a file system in memory does not know the question
        return False
    finally:
        os.close(file)
    return False


def _disk(backend: Backend) -> Backend:
    assert isinstance(backend, Tiers)
    return backend.backends[-1]
