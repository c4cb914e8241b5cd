"""Installs what ``make release`` built as strangers do, a group of extras in an empty environment each, and uses it.

    python integrations/check_release.py [GROUP…] --models primary=FOLDER,auxiliary=FOLDER

pip gets our own wheels from ``dist/``, and all else from its index. Pages whose code is run are those of the wheels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
TORCH = re.findall(r'"(torch==[\d.]+)"', (ROOT / "Makefile").read_text())[0]
NAMES = {"primary": "Qwen/Qwen2.5-0.5B-Instruct", "auxiliary": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Of models on the pages."""
HELP, STORE = "cacheclip --help", "--store my-store"
PAIR = "--primary {primary} --auxiliary {auxiliary}"
GROUPS: dict[str, tuple[str, list[str]]] = {
    "core": ("cacheclip-rag", [HELP, "page cacheclip_rag"]),
    "langchain": ("cacheclip-rag[langchain]", ["page cacheclip_rag", "page langchain_cacheclip"]),
    "llama-index": ("cacheclip-rag[llama-index]", ["page cacheclip_rag", "page llama_index_llms_cacheclip"]),
    "serve": ("cacheclip-rag[serve,structured]", ["page cacheclip_rag", f"serve {PAIR} {STORE}"]),
    "all": (
        "cacheclip-rag[all,shared,hot,testing] cacheclip-vllm",
        [
            HELP,
            "cacheclip models list",
            "cacheclip demo --primary {auxiliary} --inspect answer.html",
            f"cacheclip ingest docs {STORE} {PAIR} --embedding packaged:all-MiniLM-L6-v2",
            f"cacheclip ask --json Who? {STORE} --max-tokens 8",
            f"cacheclip store verify {STORE}",
            "cacheclip store create file://{work}/shared",
            "cacheclip serve --help",
            "python -c 'import cacheclip_vllm.middleware'",
            "python -m pytest -p cacheclip_testing.plugin -q test_fake.py",
        ],
    ),
    "llama-cpp": ("cacheclip-rag[llama-cpp,lab]", ["cacheclip demo --primary packaged:qwen2.5-coder-0.5b.gguf"]),
}
"""What pip installs, and what is run: ``page`` is a distribution's own example, ``serve`` a server that is asked once.
vLLM itself is left out: make test-vllm has it."""
TEST = """from cacheclip_testing.fake import FakeRuntime

def test_it():
    assert FakeRuntime
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}; default: all but llama-cpp")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".demo/release", help="folder for environments")
    parser.add_argument("--models", default="", help="role=FOLDER,…, in place of the models that the pages name")
    options = parser.parse_args()
    models = NAMES | dict(each.split("=", 1) for each in filter(None, options.models.split(",")))
    failed = []
    for group in options.groups or [each for each in GROUPS if each != "llama-cpp"]:
        work = options.work.resolve() / group
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if not checked(group, work, options.dist.resolve(), models):
            failed.append(group)
        shutil.rmtree(work)
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


def checked(group: str, work: Path, dist: Path, models: dict[str, str]) -> bool:
    """Whether a group installs and works. Prints each command with its seconds, and what a failed one wrote."""
    what, commands = GROUPS[group]
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {dist}".strip()
    environment = {**os.environ, "PATH": f"{work / 'env/bin'}{os.pathsep}{os.environ['PATH']}", "PIP_FIND_LINKS": links}
    environment |= {"PIP_NO_COMPILE": "1"}  # most modules are never imported
    environment.pop("PYTHONPATH", None)
    (work / "docs").mkdir()
    (work / "docs/note.md").write_text("# The lighthouse\n\nIt was built by Ada Brindle in 1847.\n")
    (work / "test_fake.py").write_text(TEST)
    lines = [
        f"{sys.executable} -m venv env",
        f"pip install --quiet {TORCH}",
        f"pip install --quiet {' '.join(map(repr, what.split()))}",
    ]
    for line in (*lines, "pip check", *commands):
        line = line.format(**models, work=work)
        began = time.monotonic()
        if line.startswith("page "):
            (work / "page.py").write_text(page(dist, line.split()[1], models))
            shown, line = line, "python page.py"
        elif line.startswith("serve "):
            (work / "asked.py").write_text(SERVED)
            shown, line = f"cacheclip {line}, asked once", f"python asked.py {line}"
        else:
            shown = line
        done = subprocess.run(line, shell=True, cwd=work, env=environment, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1][:100]
        print(f"{group:<12} {'ok' if not done.returncode else 'FAILED':<7}{time.monotonic() - began:4.0f} s  {shown}")
        print(f"{'':<27}{last}" if not done.returncode else f"{done.stdout}\n{done.stderr}", flush=True)
        if done.returncode:
            return False
    return True


SERVED = '''"""A server, asked once."""
import json, subprocess, sys
from urllib.request import Request, urlopen
server = subprocess.Popen(["cacheclip", *sys.argv[1:], "--port", "0", "--json"], stdout=subprocess.PIPE)
try:
    told = json.loads(server.stdout.readline())
    body = {"model": told["model"], "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{told['address']}/v1/chat/completions", json.dumps(body).encode(), headers)) as reply:
        print(json.load(reply)["choices"][0]["message"]["content"])
finally:
    server.terminate()
'''


def page(dist: Path, name: str, models: dict[str, str]) -> str:
    """The first Python block of a wheel's page, with other models if some are stated."""
    (wheel,) = dist.glob(f"{name}-*.whl")
    with ZipFile(wheel) as files:
        (metadata,) = [each for each in files.namelist() if each.endswith(".dist-info/METADATA")]
        text = files.read(metadata).decode()
    code: str = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    for role, there in NAMES.items():
        code = code.replace(there, models[role])
    return code


if __name__ == "__main__":
    main()
