"""The distribution that docs/pages/how-to/extend.md shows is installed as it stands there, proven and used."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cacheclip_testing import names_outside_the_door

PAGE = (Path(__file__).parents[1] / "docs/pages/how-to/extend.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
"""Code by the file that it belongs to."""
USED = """
import sys
from cacheclip_rag import CacheClipEngine

engine = CacheClipEngine(primary="a.words", auxiliary=None, method="last-tokens")
assert not {"cacheclip_words.runtime", "cacheclip_words.commands"} & {*sys.modules}, "loaded at first use"
text = "The lamp burned whale oil until 1871."
engine.precompute([text])
answer = engine.generate(f"{text}\\n\\nWhen?", recompute_ratio=0.5)
print(answer.text, answer.stats.method, answer.stats.recomputed_tokens, engine.observers[-1].total)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python beside the distribution, which is installed as a folder on the path."""
    folder = tmp_path_factory.mktemp("words")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "cacheclip_words/__init__.py").touch()
    [project] = [tomllib.loads(each)["project"] for each in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    about = folder / "cacheclip_words-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in own.items()) for group, own in groups]
    (about / "entry_points.txt").write_text("\n".join(lines))

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)

    return python


def test_every_block_is_a_file() -> None:
    assert len(re.findall("^```python$", PAGE, re.MULTILINE)) == len(FILES) > 5


def test_it_adds_a_command(run: Run) -> None:
    main = "import sys; sys.modules['torch'] = None; from cacheclip_rag.cli import main; main()"
    done = run("-c", main, "count-words", "two words")
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert run("-c", main, "count-words", "--json", "a b c").stdout == '{"words": 3}\n'


@pytest.mark.long
def test_an_engine_uses_its_runtime_observer_and_method(run: Run) -> None:
    done = run("-c", USED)
    assert re.fullmatch(r"\d+ is the sum\. last-tokens 4 1\n", done.stdout), done


@pytest.mark.long
def test_its_suites_pass(run: Run) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests")
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def test_it_takes_public_names_alone(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name.replace("/", "_")).write_text(text)
    assert names_outside_the_door(tmp_path) == set()


def test_it_declares_what_it_imports() -> None:
    code = "".join(text for name, text in FILES.items() if not name.startswith("tests/"))
    taken = {name.replace("_", "-") for name in re.findall(r"^ *(?:from|import) (cacheclip_\w+)", code, re.MULTILINE)}
    [needed] = re.findall(r"^dependencies = (.*)$", PAGE, re.MULTILINE)
    assert "cacheclip-testing" in taken and taken <= {*re.findall(r'"(.*?)"', needed)}
