"""What surrounds vLLM needs no vLLM: settings, requests, planning."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from cacheclip_vllm.offline import engine_options
from cacheclip_vllm.parameters import NAMESPACES_VARIABLE, PARAMETER, Ready, Settings, request_parameters
from cacheclip_vllm.passes import passes
from cacheclip_vllm.planner import Planner
from cacheclip_vllm.served import Served
from certificate_files import save, verdicts_for

from cacheclip_rag import CacheClipEngine, CertificateError, ConfigurationError
from cacheclip_rag.fusion.wire import StoredPiece
from cacheclip_rag.planning import FusionPlan, load_planning
from cacheclip_rag.store import ChunkStore, StoreReader, TenantStore

ROOM = {"max_runs": 99, "max_rows": 999}


@pytest.fixture(scope="module")
def made(tiny_models: dict[str, str], tmp_path_factory: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("store")
    options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(folder), "method": "epic"}
    engine = CacheClipEngine(**options)
    engine.precompute(CHUNKS)
    engine.warm_up()  # stores the shared prefix, of which later plans make use
    plan = Planner(**options).plan(rag_prompt(CHUNKS)).fusion
    return {"engine": engine, "options": options, "plan": plan, "runtime": load_planning(tiny_models["llama"])}


class TestSettings:
    def test_from_engine_options(self, tmp_path: Path) -> None:
        options = engine_options(tmp_path, namespace="a")
        settings = Settings.of(options["kv_transfer_config"]["kv_connector_extra_config"])
        assert settings == Settings(tmp_path, frozenset("a"))
        options = engine_options(tmp_path, namespace=["b", "a"], sealed=True)
        settings = Settings.of(options["kv_transfer_config"]["kv_connector_extra_config"])
        assert settings == Settings(tmp_path, frozenset("ab"), sealed=True)
        assert options["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
        assert options["worker_cls"].endswith("CPUWorker")
        assert engine_options(tmp_path, device="gpu")["worker_cls"].endswith("GPUWorker")
        options = engine_options("s3://bucket/prefix")["kv_transfer_config"]["kv_connector_extra_config"]
        assert Settings.of(options) == Settings("s3://bucket/prefix")
        with pytest.raises(ConfigurationError, match="device"):
            engine_options(tmp_path, device="cuda")

    def test_tenants_of_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the settings name none, which everybody can read."""
        extra = engine_options(tmp_path, namespace=None)["kv_transfer_config"]["kv_connector_extra_config"]
        assert Settings.of(extra) == Settings(tmp_path)
        monkeypatch.setenv(NAMESPACES_VARIABLE, '["a", "b"]')
        assert Settings.of(extra) == Settings(tmp_path, frozenset("ab"))
        assert Settings.of({**extra, "namespaces": ["c"]}) == Settings(tmp_path, frozenset("c"))
        monkeypatch.setenv(NAMESPACES_VARIABLE, "a, b")
        with pytest.raises(ConfigurationError, match="JSON list"):
            Settings.of(extra)

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            ({}, "needs store"),
            ({"folder": "x", "store": "x"}, "unknown"),
            ({"store": "x", "namespaces": [""]}, "namespace"),
            ({"store": "x", "namespaces": "a"}, "list of names"),
            ({"store": "x", "namespaces": []}, "a name or more"),
            ({"store": "x", "reader": "json:nothing"}, "module:function"),
            ({"exchange": "x", "reader": "json:loads"}, "beside a store"),
        ],
    )
    def test_refused(self, given: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            Settings.of(given)

    def test_a_reader_of_another_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers read from what the operator names; it gets the store as it is written."""
        (tmp_path / "reader_of_an_operator.py").write_text("def opened(*given):\n    return given\n")
        monkeypatch.syspath_prepend(tmp_path)
        settings = Settings.of({"store": "s3://there", "reader": "reader_of_an_operator:opened"})
        assert settings.open_reader("north") == ("s3://there", "north")
        assert isinstance(Settings.of({"store": "x"}).open_reader("north"), StoreReader)
        assert Settings.of({"store": "s3://kv/prod"}).store == "s3://kv/prod"


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_is_planned_is_not_evicted_first(
    tiny_models: dict[str, str], tmp_path: Path, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may need room before the workers have read it, and may be writing when it is planned."""
    options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(tmp_path), "method": "epic"}
    engine = CacheClipEngine(**options)
    engine.precompute(CHUNKS)
    planner, other, flush = Planner(**options), ChunkStore.open(tmp_path), TenantStore.flush
    planner.warm_up()
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        with other.catalog.database.transaction():
            begun.set()
            assert done.wait(60)

    def beside_a_writer(store: TenantStore, *wait_s: float) -> None:
        writer = threading.Thread(target=write)
        writer.start()
        assert begun.wait(60)
        threading.Timer(0.02, done.set).start()
        flush(store, *wait_s)
        writer.join()

    if is_busy:
        monkeypatch.setattr(TenantStore, "flush", beside_a_writer)
    plan = planner.plan(rag_prompt(CHUNKS[:2])).fusion
    monkeypatch.undo()
    assert plan is not None
    assert other.set_limit(other.stats().bytes // 2) > 0, "the planned ones are the oldest"
    reader = Settings(tmp_path).open_reader("default")
    assert all(reader.get(piece.key, codec=plan.codec) for piece in plan.pieces)
    other.close()


class TestReady:
    def ready(self, made: dict[str, Any], given: Any, ids: Any = None, settings: Settings | None = None) -> Ready:
        settings = settings or Settings(Path(made["options"]["store"]))
        return Ready.of(given, ids or made["plan"].token_ids, settings, made["runtime"], **ROOM)

    def test_of_a_plan(self, made: dict[str, Any]) -> None:
        carried = request_parameters(made["plan"])[PARAMETER]
        ready = self.ready(made, carried)
        assert ready.plan == made["plan"] and ready.num_ready == made["plan"].num_ready
        whole = made["plan"].token_ids
        others = {"longer": (*whole, 5), "shorter": whole[:-1], "first": (5, *whole[1:]), "last": (*whole[:-1], 5)}
        for name, ids in {**others, "turned": whole[::-1], "ready": whole[: made["plan"].num_ready + 1]}.items():
            with pytest.raises(ConfigurationError, match="token ids"):
                pytest.fail(f"{name}: {self.ready(made, carried, ids).num_ready} tokens taken")
        with pytest.raises(ConfigurationError, match="no store"):
            self.ready(made, carried, settings=Settings(exchange=Path("x")))
        with pytest.raises(ConfigurationError, match="another tenant"):
            self.ready(made, carried, settings=Settings(Path("x"), frozenset({"other"})))
        several = Settings(Path("x"), frozenset({"other", "default"}))
        assert self.ready(made, carried, settings=several) == ready
        other = replace(made["plan"], namespace="other")
        assert other.lineage != made["plan"].lineage, "tenants never share blocks of vLLM's prefix cache"

    @pytest.mark.parametrize("given", [None, 7, "plan", {}, {"plan": {}, "other": 1}, {"other": 1}])
    def test_of_nonsense(self, made: dict[str, Any], given: Any) -> None:
        with pytest.raises(ConfigurationError, match="gives a plan under"):
            self.ready(made, given)


class TestPlanner:
    def test_settings_without_effect_are_refused(self, made: dict[str, Any]) -> None:
        for name, value in (("finish", "verify"), ("max_ttft_s", 1.0), ("recompute_ratio", "auto")):
            with pytest.raises(ConfigurationError, match=name):
                Planner(**{**made["options"], name: value})
        with pytest.raises(ConfigurationError, match="store"):
            Planner(**{**made["options"], "store": None})

    def test_a_certificate_of_another_backend_does_not_count(
        self, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from cacheclip_lab.certificates import verdicts as certificates

        monkeypatch.setattr(certificates, "_folder", lambda: tmp_path)
        engine, planner = made["engine"], Planner(**made["options"], require_certificate=True)
        ours, method = engine.parts.certificates.identity(engine.make_method()), engine.make_method()
        theirs = planner.parts.certificates.identity(method)
        assert theirs == replace(ours, backend=planner.served.label) and ours.backend == ""
        assert theirs.digest() != ours.digest()
        save(verdicts_for(ours))
        with pytest.raises(CertificateError, match=r"other backend.*cacheclip certify --backend vllm "):
            planner.plan(rag_prompt(CHUNKS))
        save(verdicts_for(theirs))
        assert planner.plan(rag_prompt(CHUNKS)).fusion == made["plan"]

    def test_what_vllm_runs(self, made: dict[str, Any]) -> None:
        planner = Planner(**made["options"])
        planner.serve(Served("cuda", "fp8"))
        plan = planner.plan(rag_prompt(CHUNKS))
        assert planner.primary.fingerprint == f"{made['runtime'].fingerprint}:fp8"
        assert plan.fusion is None, "chunks of other weights are not found"
        planner.serve(Served("cuda", "fp8"))
        with pytest.raises(ConfigurationError, match="has planned for"):
            planner.serve(Served())

    def test_a_primary_that_is_its_own_auxiliary(self, made: dict[str, Any], tmp_path: Path) -> None:
        """The auxiliary has weights, the primary still has none, and the plan is that of an engine with both."""
        own = {"auxiliary": made["options"]["primary"], "method": "cacheclip", "store": str(tmp_path)}
        engine, planner = (make(**{**made["options"], **own}) for make in (CacheClipEngine, Planner))
        engine.precompute(CHUNKS)
        trace = engine.generate(rag_prompt(CHUNKS), max_tokens=1, trace=True).trace
        fusion = planner.plan(rag_prompt(CHUNKS)).fusion
        assert all(parameter.is_meta for parameter in planner.primary.model.parameters())
        in_chunks = {row for start, stop in trace.chunks for row in range(start, stop)}
        computed = {row for run in fusion.computed for row in range(*run)}
        assert in_chunks & computed == {*trace.recomputed} and len(trace.recomputed) < len(in_chunks) / 2


class TestPasses:
    """By hand: chunks at 10 to 20 and 22 to 30, prefix 0 to 8, fresh text between them."""

    plan = FusionPlan(
        token_ids=tuple(range(40)),
        pieces=(StoredPiece(0, "a" * 64, 0, 8), StoredPiece(10, "b" * 64, 0, 10), StoredPiece(22, "c" * 64, 3, 8)),
        computed=((8, 12), (15, 16), (20, 24)),
        chunks=((10, 20), (22, 30)),
        correction=0.5,
    )

    def found(self, start: int = 0, **room: int) -> list[tuple[Any, ...]]:
        return [(e.start, e.stop, e.runs, e.chunks) for e in passes(self.plan, start, **{**ROOM, **room})]

    def test_never_within_a_corrected_chunk(self) -> None:
        first = (0, 20, ((8, 12), (15, 16)), ((10, 20),))
        assert self.found(max_runs=2) == [first, (20, 30, ((20, 24),), ((22, 30),))]
        small = self.found(max_rows=3)
        assert small == [
            (0, 10, ((8, 10),), ()),
            (10, 20, ((10, 12), (15, 16)), ((10, 20),)),
            (20, 22, ((20, 22),), ()),
            (22, 30, ((22, 24),), ((22, 30),)),
        ]
        with pytest.raises(ConfigurationError, match="a chunk has 3 tokens to compute in 2 runs"):
            self.found(max_runs=1)

    def test_from_within_a_chunk(self) -> None:
        """All rows of the chunk are computed, and what is there is not written again."""
        assert self.found(14) == [(14, 30, ((10, 12), (15, 16), (20, 24)), self.plan.chunks)]
        assert passes(self.plan, 14, **ROOM)[0].begin == 10
        assert self.found(20) == [(20, 30, ((20, 24),), ((22, 30),))]

    def test_from_where_only_computed_tokens_are_left(self) -> None:
        plan = FusionPlan(tuple(range(9)), (StoredPiece(0, "a" * 64, 0, 8),), ((6, 8),), ((0, 8),), 0.5)
        (only,) = passes(plan, 6, **ROOM)
        assert (only.start, only.stop, only.runs, only.chunks, only.begin) == (6, 8, ((6, 8),), (), 6)
