"""The process that becomes vLLM's server runs no code of the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cacheclip_vllm.options import absolute_paths


@pytest.mark.long
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = tmp_path / "documents", tmp_path / "mark"
    folder.mkdir()
    for name in ("vllm", "json", "subprocess", "sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).write_text(__file__)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    server = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    server.mkdir(parents=True)
    told = "import os, sys, json; print(os.getcwd(), sys.flags.safe_path, sys.argv); raise SystemExit"
    (server / "serve.py").write_text(told)
    program = (
        "import os\n"
        "from cacheclip_rag.plugins import python_command\n"
        "from cacheclip_vllm.launch import _VLLM, Command, _become\n"
        f"os.environ['PYTHONPATH'] = {f':.:../documents:{tmp_path}/packages:'!r}\n"
        "_become(Command(tuple(python_command(*_VLLM, '--seed')), {'A': 'b'}))"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr.split()[:2] == [str(tmp_path / "home" / "run"), "True"], done.stderr
    assert "'--seed'" in done.stderr and not mark.exists()


def test_paths_in_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "key.pem", "loras/sql", "parser.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    given = ["--ssl-keyfile", "key.pem", "--load-format", "auto", "--lora-modules", "sql=loras/sql", "a=none/b"]
    given += ["--tool-parser-plugin=parser.py", "-tp", "2", '--x={"a": "b=c"}', "--seed=3"]
    here = str(tmp_path)
    expected = ["--ssl-keyfile", f"{here}/key.pem", "--load-format", "auto", "--lora-modules", f"sql={here}/loras/sql"]
    expected += ["a=none/b", f"--tool-parser-plugin={here}/parser.py", "-tp", "2", '--x={"a": "b=c"}', "--seed=3"]
    assert absolute_paths(given) == expected
