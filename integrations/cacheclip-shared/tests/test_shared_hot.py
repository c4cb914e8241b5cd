"""The hot tier of a shared store: copies in a Valkey server, and answers without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_shared.hot import TTL_S, HotBackend
from cacheclip_shared.objects import ObjectBackend
from cacheclip_shared.place import SharedPlace, object_name, tenant_folder
from cacheclip_shared.testing import Machine, Relay, hits, shared
from cacheclip_testing import BackendConformance, sample_key, sample_payload
from cacheclip_testing.plugin import CHUNKS, rag_prompt

from cacheclip_rag import ConfigurationError, EngineConfig, MissingExtraError, SamplingParams
from cacheclip_rag.store import Backend, StoreReader, later

redis = pytest.importorskip("redis", reason="redis is not installed")


@pytest.fixture
def client(valkey_address: str) -> Iterator[Any]:
    with redis.Redis.from_url(valkey_address.replace("valkey", "redis")) as client:
        client.flushall()
        yield client


@pytest.fixture
def hot_url(client: Any, store_url: str, valkey_address: str) -> str:
    return f"{store_url}?hot={valkey_address}"


def hot_of(url: str) -> HotBackend:
    return HotBackend(ObjectBackend(SharedPlace(url)))


def written() -> None:
    """Wait for copies that were offered."""
    later(lambda: None).result()


class TestHotBackend(BackendConformance):
    @pytest.fixture
    def folder(self, client: Any, bucket: str, valkey_address: str) -> Path:  # type: ignore[override]
        return f"{bucket}?hot={valkey_address}"  # type: ignore[return-value]

    def make_backend(self, folder: Path) -> Backend:
        return hot_of(str(folder))

    @staticmethod
    def name(backend: Backend, key: str) -> str:
        assert isinstance(backend, HotBackend)
        return f"{backend._prefix}{object_name('default', key, 'raw')}"

    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        with redis.Redis(port=int(backend.medium("").rpartition(":")[2])) as client:
            return client.get(self.name(backend, key))

    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        with redis.Redis(port=int(backend.medium("").rpartition(":")[2])) as client:
            client.set(self.name(backend, key), data)


def tiers(engine: Any) -> dict[str, tuple[int, int, int]]:
    """Hits, misses and damaged payloads, by tier."""
    return {each.name: (each.hits, each.misses, each.damaged) for each in engine.store.chunk_store.stats().tiers}


def answered(engine: Any, **options: Any) -> int:
    shared(engine).poll()
    engine.prefixes.clear()
    found = hits(engine, **options)
    written()
    return found


class TestCopies:
    def test_one_machine_reads_what_another_ones_answer_put_there(self, machine: Machine, hot_url: str) -> None:
        """Also while object storage is gone."""
        machine().precompute(CHUNKS)
        one, other = machine(store=hot_url), machine(store=hot_url)
        assert answered(one) == len(CHUNKS)
        assert tiers(one)["hot"][0] == 0 and tiers(one)["object store"][0] >= len(CHUNKS)
        assert answered(other) == len(CHUNKS)
        assert tiers(other)["hot"][0] >= len(CHUNKS) and tiers(other)["object store"] == (0, 0, 0)
        shared(other)._stop.set()
        shared(other).objects.breaker._until = float("inf")
        assert answered(other) == len(CHUNKS)

    def test_each_tenants_copies_have_a_prefix_and_an_end(self, machine: Machine, hot_url: str, client: Any) -> None:
        made = {name: machine(store=hot_url, namespace=name) for name in ("one", "other")}
        for engine in made.values():
            engine.precompute(CHUNKS)
        names = [name.decode() for name in client.keys("*")]
        assert {name.split(":")[2].split("/kv/")[0] for name in names} == {tenant_folder(name) for name in made}
        assert all(0 < client.ttl(name) <= TTL_S for name in names)
        assert made["one"].release(CHUNKS) == len(CHUNKS)
        left = [name.decode() for name in client.keys("*")]
        folder = tenant_folder("other")
        assert {name for name in left if folder in name} == {name for name in names if folder in name}
        assert len(left) == len(names) - len(CHUNKS), "the shared prefix stays"

    @pytest.mark.some(2)
    @pytest.mark.parametrize("erases_with_hot", [True, False])
    def test_erasure_reaches_copies_that_others_made(
        self,
        machine: Machine,
        store_url: str,
        hot_url: str,
        client: Any,
        erases_with_hot: bool,
    ) -> None:
        """In any codec; at once, or when a machine with the hot tier sees that the text is gone."""
        coarse, fine = (machine(store=hot_url, namespace="x", codec=codec) for codec in ("int8", "float32"))
        for engine in (coarse, fine):
            engine.precompute(CHUNKS)
        key, before = fine.chunk_caches()[0].key(CHUNKS[0]), client.dbsize()
        assert len(client.keys(f"*{key}*")) == 2
        url = hot_url if erases_with_hot else store_url
        eraser, other = (machine(store=each, namespace="x") for each in (url, hot_url))
        for engine in (eraser, other):
            shared(engine).poll()
        assert eraser.release(CHUNKS[:1]) == 1
        assert len(client.keys(f"*{key}*")) == (0 if erases_with_hot else 2)
        shared(other).poll()
        assert client.keys(f"*{key}*") == [] and client.dbsize() == before - 2

    @pytest.mark.parametrize("place", ["header", "layers"])
    def test_a_damaged_copy_is_replaced(self, machine: Machine, hot_url: str, client: Any, place: str) -> None:
        one = machine(store=hot_url)
        one.precompute(CHUNKS)
        key = one.chunk_caches()[0].key(CHUNKS[1])
        (name,) = client.keys(f"*{key}*")
        whole = client.get(name)
        client.setrange(name, {"header": 20, "layers": len(whole) - 5}[place], b"xx")
        full = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4), recompute_ratio=1.0)
        written()
        assert full.stats.hits == len(CHUNKS) and tiers(one)["hot"][2] == 1
        assert client.get(name) == whole

    def test_another_kind_of_value_is_replaced_and_no_outage(self, machine: Machine, hot_url: str, client: Any) -> None:
        """The other copies are read as ever."""
        one = machine(store=hot_url)
        one.precompute(CHUNKS)
        key = one.chunk_caches()[0].key(CHUNKS[1])
        (name,) = client.keys(f"*{key}*")
        whole = client.get(name)
        client.delete(name)
        client.rpush(name, b"x")
        before = tiers(one)["hot"][0]
        assert answered(one) == len(CHUNKS) and tiers(one)["hot"][0] >= before + len(CHUNKS) - 1
        assert client.get(name) == whole

    def test_a_process_that_carries_out_plans_reads_them(self, machine: Machine, hot_url: str, client: Any) -> None:
        one = machine(store=hot_url, codec="int8")
        one.precompute(CHUNKS[:1])
        key = one.chunk_caches()[0].key(CHUNKS[0])
        reader = StoreReader(hot_url, "default", "int8")
        reader._tiers.last.breaker._until = float("inf")  # type: ignore[attr-defined]
        assert reader.get(key, codec="int8").codec == "int8"
        client.flushall()
        reader._tiers.last.breaker._until = 0.0  # type: ignore[attr-defined]
        assert reader.get(key, codec="int8").codec == "int8"
        written()
        assert len(client.keys(f"*{key}*")) == 1

    @pytest.mark.long
    def test_a_profile_measures_both_and_leaves_nothing(self, machine: Machine, hot_url: str, client: Any) -> None:
        one = machine(store=hot_url)
        one.precompute(CHUNKS)
        objects = {each["path"] for each in shared(one).objects.objects_of("tenants/")}
        before = {*client.keys("*")}, one.store.stats(), shared(one).catalog.tenants()
        media = one.profile_machine().media
        assert set(media) == {"s3://bucket", shared(one).tiers.backends[0].medium("")}
        assert media["s3://bucket"].first == pytest.approx(media["s3://bucket"].constant / 16)
        assert {each["path"] for each in shared(one).objects.objects_of("tenants/")} == objects
        assert ({*client.keys("*")}, one.store.stats(), shared(one).catalog.tenants()) == before

    def test_payloads_that_nobody_may_keep(self, bucket: str, valkey_address: str, client: Any) -> None:
        """A server that is full can be read, and refuses copies without an error; nothing waits without end."""
        hot = hot_of(f"{bucket}?hot={valkey_address}")
        hot.put(sample_key(1), sample_payload(1))
        client.config_set("maxmemory", 1)
        try:
            hot.put(sample_key(2), sample_payload(2))
            hot.offer(sample_key(3), sample_payload(3))
            written()
            assert set(hot.get_many(map(sample_key, (1, 2, 3)))) == {sample_key(1)}
        finally:
            client.config_set("maxmemory", 0)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", ["gone", "silent", "never there"])
def test_without_the_server_answers_go_on(
    machine: Machine, store_url: str, valkey_address: str, client: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """From object storage; the server is asked once, with one warning, and erasing raises nothing."""
    relay = Relay(valkey_address.removeprefix("valkey://"))
    one = machine(store=f"{store_url}?hot=valkey://{relay.address.removeprefix('http://')}")
    if kind == "never there":
        relay.go()
    one.precompute(CHUNKS)
    expected = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4), recompute_ratio=1.0).text
    if kind != "never there":
        assert len(client.keys("*")) > len(CHUNKS)
        relay.go() if kind == "gone" else setattr(relay, "is_silent", True)
    one.prefixes.clear()
    answer = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4), recompute_ratio=1.0)
    asked = relay.connections
    assert (answer.text, answer.stats.hits) == (expected, len(CHUNKS))
    assert answered(one) == len(CHUNKS) and relay.connections == asked
    assert one.release(CHUNKS[:1]) == 1
    assert sum("hot tier" in each.message for each in caplog.records) == 1
    relay.go()


class TestSettings:
    @pytest.mark.parametrize("hot", ["valkey://h:6379", "redis://h", "rediss://user:word@h:1/0?ssl_cert_reqs=none"])
    def test_the_stores_url_names_it(self, hot: str) -> None:
        place = SharedPlace(str(EngineConfig(store=f"s3://b/p/?hot={hot}").store))
        assert (place.url, place.hot) == ("s3://b/p", hot)
        assert place.replica == SharedPlace("s3://b/p").replica

    @pytest.mark.parametrize("hot", ["", "h:6379", "http://h", "valkey://"])
    def test_refused(self, hot: str) -> None:
        with pytest.raises(ConfigurationError, match="valkey://host:6379"):
            EngineConfig(store=f"s3://b/p?hot={hot}")

    def test_without_the_extra_one_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "redis", None)
        with pytest.raises(MissingExtraError, match=r"pip install .*\[hot\]"):
            hot_of("s3://b/p?hot=valkey://h")
