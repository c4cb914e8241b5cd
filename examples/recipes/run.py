"""Runs the recipes of this folder against a server: two questions about two documents each, in an environment that has
the application's package. Prints the answers, and how many tokens of the second prompt were not computed.

    python examples/recipes/run.py [NAME…] [--server URL --model NAME] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
MODEL = "packaged:qwen2.5-coder-0.5b"
RECIPES = {
    "haystack": (["haystack-ai"], ["python", "haystack_pipeline.py"]),
    "pydantic-ai": (["pydantic-ai-slim[openai]"], ["python", "pydantic_ai_agent.py"]),
    "openai-agents": (["openai-agents"], ["python", "openai_agents.py"]),
    "dspy": (["dspy"], ["python", "dspy_program.py"]),
    "aider": (["aider-chat"], ["sh", "aider.sh"]),
    "opencode": (["opencode-ai"], ["sh", "opencode.sh"]),
    "vercel": (["ai", "@ai-sdk/openai-compatible"], ["node", "vercel_ai.mjs"]),
}
"""What each installs, and how it is run."""
OF_NPM = ("opencode", "vercel")
"""Packages of these are npm's."""
QUESTIONS = ("In which year was the lighthouse built?", "Who founded the library?")


@contextmanager
def server(work: Path) -> Iterator[str]:
    """A server of the packaged models, until the block ends."""
    line = ["cacheclip", "serve", "--primary", MODEL, "--auxiliary", "packaged:smollm2-135m", "--port", "8123"]
    with (work / "server.log").open("w") as log:
        process = subprocess.Popen([*line, "--store", str(work / "store")], stdout=log, stderr=log)
        try:
            for _ in range(600):
                try:
                    with urlopen("http://127.0.0.1:8123/health"):
                        break
                except OSError:
                    if process.poll() is not None:
                        sys.exit(f"the server did not start: see {work / 'server.log'}")
                    time.sleep(1)
            yield "http://127.0.0.1:8123"
        finally:
            process.terminate()
            process.wait()


def installed(name: str, packages: list[str], work: Path) -> Path:
    """The folder with the programs of an environment that has the packages."""
    folder = work / name
    if name in OF_NPM:
        folder.mkdir(exist_ok=True)
        if not (folder / "node_modules").exists():
            subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)
        (folder / "vercel_ai.mjs").write_text((HERE / "vercel_ai.mjs").read_text())  # imports from beside itself
        return folder / "node_modules/.bin"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
    return folder / "bin"


def tokens(url: str) -> dict[str, float]:
    """Prompt tokens so far, by the source of their KV."""
    with urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    return {name: float(n) for name, n in re.findall(r'prompt_tokens_total\{source="(\w+)"\} (\S+)', text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--server", help="of a server that runs; default: one of the packaged models is started")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--work", type=Path, default=Path(".demo/recipes"), help="folder of environments and store")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    texts = HERE.parents[1] / "integrations/cacheclip-lab/cacheclip_lab/documents"
    documents = [str(texts / name) for name in ("lighthouse.txt", "library.txt")]
    if options.server:
        run(options.names or [*RECIPES], options.server, options.model, work, documents)
        return
    with server(work) as url:
        run(options.names or [*RECIPES], url, options.model, work, documents)


def run(names: list[str], url: str, model: str, work: Path, documents: list[str]) -> None:
    for name in names:
        packages, line = RECIPES[name]
        bin_folder = installed(name, packages, work)
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "BASE_URL": f"{url}/v1", "MODEL": model}
        where = work / name if line[0] == "node" else HERE
        for question in QUESTIONS:
            before = tokens(url)
            command = [*line[:-1], str(where / line[-1]), question, *documents]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=where)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            used = {source: number - before.get(source, 0.0) for source, number in tokens(url).items()}
            whole = sum(used.values())
            share = f"{whole - used['computed']:.0f} of {whole:.0f} prompt tokens from KV"
            print(f"{name:<14} {question}\n    {' '.join(done.stdout.split())[-200:]}\n    {share}", flush=True)


if __name__ == "__main__":
    main()
