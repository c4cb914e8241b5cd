"""Conformance suite for store backends.

>>> class TestMyBackend(BackendConformance):
...     def make_backend(self, folder):
...         return MyBackend(folder)
...     def read_raw(self, backend, key):
...         return what_the_medium_holds(key)  # bytes, or None
...     def write_raw(self, backend, key, data):
...         put_it_there(key, data)

``read_raw`` and ``write_raw`` bypass the code under test: they open the file or ask the server directly. Without them,
a backend that makes the same error in reading and writing would pass. (Source: the store tests of zarr-python.)
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheclip_rag.store import Backend, Sink


def sample_key(number: int) -> str:
    """A key in the store's format: 64 hexadecimal digits."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def sample_payload(number: int, num_bytes: int = 1000) -> bytes:
    """Pseudo-random bytes, different for each number."""
    return hashlib.shake_128(str(number).encode()).digest(num_bytes)


def problems_in_threads(work: Callable[[int, list[str]], None]) -> list[str]:
    """Run ``work(seed, problems)`` in four threads at once; what they noted, and what they raised."""
    problems: list[str] = []

    def guarded(seed: int) -> None:
        try:
            work(seed, problems)
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


class BackendCase:
    """A backend, and a way around it to its medium."""

    persists = True
    """Whether a second backend on the same folder sees what the first one wrote."""

    replaces = True
    """Whether a second payload takes the place of the first one; False: the first one stays, for good."""

    @abstractmethod
    def make_backend(self, folder: Path) -> Backend:
        """A backend without a size limit.

        Args:
            folder: empty folder of this test. A persistent backend made again with this folder has the same payloads.
        """

    @abstractmethod
    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        """The medium's bytes under ``key``, read without the backend's code; None if there are none."""

    @abstractmethod
    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        """Write ``data`` to the medium under ``key``, without the backend's code."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def backend(self, folder: Path) -> Backend:
        return self.make_backend(folder)


class PayloadConformance(BackendCase):
    """Reading and writing."""

    def test_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)

    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 3_000_001])
    def test_put_writes_every_byte_to_the_medium(self, backend: Backend, num_bytes: int) -> None:
        data = sample_payload(1, num_bytes)
        backend.put(sample_key(1), data)
        assert self.read_raw(backend, sample_key(1)) == data

    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 3_000_001])
    def test_get_reads_every_byte_from_the_medium(self, backend: Backend, num_bytes: int) -> None:
        data = sample_payload(1, num_bytes)
        self.write_raw(backend, sample_key(1), data)
        assert _got(backend, 1) == data

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_any_buffer(self, backend: Backend, kind: type) -> None:
        backend.put(sample_key(1), kind(sample_payload(1)))
        assert _got(backend, 1) == sample_payload(1)

    def test_missing_keys_are_left_out(self, backend: Backend) -> None:
        assert backend.get_many([sample_key(1)]) == {}
        backend.put(sample_key(2), sample_payload(2))
        payloads = backend.get_many([sample_key(1), sample_key(2), sample_key(3)])
        assert list(payloads) == [sample_key(2)]

    def test_many_at_once(self, backend: Backend) -> None:
        for number in range(5):
            backend.put(sample_key(number), sample_payload(number))
        payloads = backend.get_many(sample_key(number) for number in (3, 0, 9, 3))
        assert {key: bytes(data) for key, data in payloads.items()} == {
            sample_key(n): sample_payload(n) for n in (0, 3)
        }

    def test_no_key_at_all(self, backend: Backend) -> None:
        assert backend.get_many([]) == {} and backend.delete([]) == 0

    def test_put_again_replaces_or_keeps(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1, 3000))
        backend.put(sample_key(1), sample_payload(2, 1000))
        expected = sample_payload(2, 1000) if self.replaces else sample_payload(1, 3000)
        assert _got(backend, 1) == self.read_raw(backend, sample_key(1)) == expected
        assert list(backend.list()) == [sample_key(1)]

    def test_put_keeps_a_copy(self, backend: Backend) -> None:
        data = bytearray(sample_payload(1))
        backend.put(sample_key(1), data)
        data[:] = bytes(len(data))
        assert _got(backend, 1) == sample_payload(1)

    def test_payload_in_hand_survives_deletion_and_replacement(self, backend: Backend) -> None:
        for number in (1, 2):
            backend.put(sample_key(number), sample_payload(number))
        payloads = backend.get_many([sample_key(1), sample_key(2)])
        backend.delete([sample_key(1)])
        backend.put(sample_key(2), sample_payload(3))
        assert [bytes(data) for data in payloads.values()] == [sample_payload(1), sample_payload(2)]


class PlaceConformance(BackendCase):
    """What the store asks beside payloads: parts, sizes, media."""

    def test_the_medium_has_a_name(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1))
        assert all(isinstance(backend.medium(sample_key(number)), str) for number in (1, 2))
        assert backend.medium(sample_key(1))

    def test_nothing_is_lost_when_caches_are_dropped(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1, 3_000_001))
        backend.drop_cached([sample_key(1), sample_key(2)])
        assert _got(backend, 1) == sample_payload(1, 3_000_001)

    def test_read_may_use_the_readers_memory(self, backend: Backend) -> None:
        """And says what is there already, so that the reader can check it."""
        payload = sample_payload(1, 3_000_001)

        class Checking(Sink):
            memory = memoryview(b"")
            seen = 0

            def allocate(self, num_bytes: int) -> memoryview:
                self.memory = super().allocate(num_bytes)
                return self.memory

            def received(self, num_bytes: int) -> None:
                assert num_bytes > self.seen and bytes(self.memory[:num_bytes]) == payload[:num_bytes]
                self.seen = num_bytes

        sink = Checking()
        backend.put(sample_key(1), payload)
        data = backend.read(sample_key(1), sink)
        assert data is not None and bytes(data) == payload
        assert (sink.memory.nbytes, sink.seen) in ((0, 0), (len(payload), len(payload)))
        assert backend.read(sample_key(2), sink) is None

    def test_head_is_the_beginning_and_the_size(self, backend: Backend) -> None:
        assert backend.head(sample_key(1), 10) is None
        backend.put(sample_key(1), sample_payload(1))
        for num_bytes in (0, 10, 5000):
            head = backend.head(sample_key(1), num_bytes)
            assert head is not None and head[1] == 1000
            assert bytes(head[0])[:num_bytes] == sample_payload(1)[:num_bytes]

    def test_a_part_of_a_payload(self, backend: Backend) -> None:
        """Of a backend that has parts; the others' are right, too, but slow."""
        payload, target = sample_payload(1), memoryview(bytearray(100))
        assert backend.read_part(sample_key(1), 0, target) == 0
        backend.put(sample_key(1), payload)
        for start in (0, 1, 500, 900):
            assert backend.read_part(sample_key(1), start, target) == 100
            assert bytes(target) == payload[start : start + 100]
        assert backend.read_part(sample_key(1), 950, target) == 50 and bytes(target[:50]) == payload[950:]
        assert backend.read_part(sample_key(1), 2000, target) == 0

    def test_bytes_on_the_medium(self, backend: Backend) -> None:
        assert backend.occupied(sample_key(1)) == 0
        for number, num_bytes in ((2, 1), (3, 5000)):
            backend.put(sample_key(number), sample_payload(number, num_bytes))
            assert backend.occupied(sample_key(number)) >= backend.round_up(num_bytes) >= num_bytes


class BackendConformance(PayloadConformance, PlaceConformance):
    """Inherit it in a class whose name begins with ``Test``, and implement the three methods of
    :class:`BackendCase`."""

    def test_delete(self, backend: Backend) -> None:
        for number in range(4):
            backend.put(sample_key(number), sample_payload(number))
        assert backend.delete(sample_key(number) for number in (0, 2, 9)) == 2
        assert backend.delete([sample_key(0)]) == 0
        assert self.read_raw(backend, sample_key(0)) is None and self.read_raw(backend, sample_key(1)) is not None
        assert set(backend.get_many(map(sample_key, range(4)))) == {sample_key(1), sample_key(3)}
        backend.put(sample_key(0), sample_payload(0))
        assert _got(backend, 0) == sample_payload(0)

    def test_list(self, backend: Backend) -> None:
        assert list(backend.list()) == []
        for number in range(20):
            backend.put(sample_key(number), sample_payload(number))
        self.write_raw(backend, sample_key(20), sample_payload(20))
        backend.delete([sample_key(7)])
        assert sorted(backend.list()) == sorted(sample_key(number) for number in range(21) if number != 7)

    def test_list_while_payloads_are_deleted_and_added(self, backend: Backend) -> None:
        for number in range(20):
            backend.put(sample_key(number), sample_payload(number))
        listed = []
        for key in backend.list():
            listed.append(key)
            backend.delete(map(sample_key, range(20)))
            backend.put(sample_key(30), sample_payload(30))
        assert len(listed) == len(set(listed)) and set(listed) <= {*map(sample_key, range(20)), sample_key(30)}

    def test_usable_after_close(self, backend: Backend) -> None:
        backend.put(sample_key(1), sample_payload(1))
        backend.close()
        assert _got(backend, 1) == sample_payload(1)
        backend.close()
        backend.close()
        backend.put(sample_key(2), sample_payload(2))
        assert _got(backend, 2) == sample_payload(2)

    def test_shared_with_another_backend_on_the_same_place(self, backend: Backend, folder: Path) -> None:
        backend.put(sample_key(1), sample_payload(1))
        other = self.make_backend(folder)
        if not self.persists:
            assert other.get_many([sample_key(1)]) == {}
            return
        assert _got(other, 1) == sample_payload(1)
        other.put(sample_key(2), sample_payload(2))
        assert _got(backend, 2) == sample_payload(2)
        assert sorted(backend.list()) == sorted(other.list()) == sorted(map(sample_key, (1, 2)))
        other.close()

    def test_threads(self, backend: Backend) -> None:
        """Every payload that a thread reads is a whole payload that was put under the key."""
        versions = {number: [sample_payload(10 * number + version, 20_000) for version in (0, 1)] for number in (1, 2)}

        def work(seed: int, problems: list[str]) -> None:
            for step in range(30):
                number, version = 1 + (seed + step) % 2, (seed + step // 2) % 2
                backend.put(sample_key(number), versions[number][version])
                for key, data in backend.get_many([sample_key(1), sample_key(2)]).items():
                    if bytes(data) not in versions[1 if key == sample_key(1) else 2]:
                        problems.append(f"torn payload under {key}")
                list(backend.list())
                if step % 7 == 6:
                    backend.delete([sample_key(number)])

        assert problems_in_threads(work) == []


def _got(backend: Backend, number: int) -> bytes:
    payloads = backend.get_many([sample_key(number)])
    assert sample_key(number) in payloads, f"payload {number} is gone"
    return bytes(payloads[sample_key(number)])
