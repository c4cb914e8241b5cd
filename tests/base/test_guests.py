"""Entry points of other distributions, each installed for one test as a folder on the path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, ConfigurationError, UnknownModelError
from cacheclip_rag.base import guests as module
from cacheclip_rag.guards import Observer
from cacheclip_rag.methods import preset
from cacheclip_rag.models.context import is_here, known_context
from cacheclip_rag.models.load import check_name, load_any, register_runtime
from cacheclip_rag.testing.fake import FakeRuntime
from tests.conftest import CHUNKS, rag_prompt

Install = Callable[..., None]

SOURCE = """
from dataclasses import replace
from cacheclip_rag.guards import Observer
from cacheclip_rag.methods import preset

ALL = replace(preset("epic").at(1.0), name="everything")


class Seen(Observer):
    answers = []

    def on_answer(self, answered):
        self.answers.append(answered.answer.text)


def observer(config):
    return Seen() if config.shadow_rate == 0 else None


def wrong(config):
    return "no observer"
"""

COMMANDS = """
def register(commands):
    def greet(name: str) -> None:
        \"\"\"Greet somebody.\"\"\"
        print(f"Good day, {name}.")

    commands.add("greet", greet)
    commands.add("store greet", greet)
"""

RUNTIME = """
from cacheclip_rag.plugins import ModelLoader
from cacheclip_rag.testing.fake import FakeRuntime


class WordsLoader(ModelLoader):
    @classmethod
    def matches(cls, name):
        return name.endswith(".words")

    @property
    def context_tokens(self):
        return 4096

    def load(self, *, dtype, device):
        return FakeRuntime(self.name, dtype=dtype)


class Blind(WordsLoader):
    can_score = reads_kv = False
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with a module ``guest_of_a_test`` and these entry points by group."""

    def put(name: str = "guest-of-a-test", source: str = SOURCE, **groups: dict[str, str]) -> None:
        folder = tmp_path / name
        about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir(parents=True)
        (folder / "guest_of_a_test.py").write_text(source)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [
            f"[cacheclip.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in own.items()) for group, own in groups.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
        module.guests.cache_clear()

    yield put
    monkeypatch.undo()
    sys.modules.pop("guest_of_a_test", None)
    module.guests.cache_clear()
    module._loaded.cache_clear()


def test_a_method_is_a_preset_by_its_name(install: Install, tiny_models: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="got 'everything'"):
        CacheClipEngine(primary=tiny_models["llama"], method="everything")
    install(methods={"everything": "guest_of_a_test:ALL"})
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="everything", chunk_context="prefix")
    engine.precompute(CHUNKS)
    stats = engine.generate(rag_prompt(CHUNKS)).stats
    assert (stats.method, stats.nominal_ratio) == ("everything", 1.0)


def test_a_runtime_takes_names(install: Install) -> None:
    with pytest.raises(UnknownModelError, match=r"no model is called 'of-a-test\.words'"):
        CacheClipEngine(primary="of-a-test.words", auxiliary=None).precompute(CHUNKS)
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:WordsLoader"})
    assert known_context("of-a-test.words") == 4096 and not is_here("of-a-test.words")
    engine = CacheClipEngine(primary="of-a-test.words", auxiliary="other.words", method="epic")
    engine.precompute(CHUNKS)
    assert engine.generate(rag_prompt(CHUNKS), max_tokens=2).stats.hits == len(CHUNKS)
    assert engine.primary is load_any("of-a-test.words", dtype="auto") and engine.auxiliary is not engine.primary
    with pytest.raises(ConfigurationError, match=r"none of an installed distribution \(.*words.*\), got 'words'"):
        register_runtime("words", FakeRuntime)


def test_a_runtime_that_cannot_be_imported_is_left_out(
    install: Install, tiny_models: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:GoneLoader"})
    for _ in range(2):
        assert known_context(tiny_models["llama"])
    assert [each.message for each in caplog.records if "no attribute 'GoneLoader'" in each.message]
    with pytest.raises(UnknownModelError):
        check_name("of-a-test.words")


def test_a_runtime_says_what_it_cannot_do(install: Install) -> None:
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:Blind"})
    with pytest.raises(ConfigurationError, match=r"what runs 'a\.words' does not show it"):
        _ = CacheClipEngine(primary="a.words", auxiliary="a.words").auxiliary


def test_a_method_of_another_name_is_refused(install: Install) -> None:
    install(methods={"other": "guest_of_a_test:ALL"})
    with pytest.raises(ConfigurationError, match="expected a Method with the name 'other'"):
        preset("other")


def test_an_observer_sees_answers(install: Install, tiny_models: dict[str, str]) -> None:
    install(observers={"seen": "guest_of_a_test:observer"})
    engine = CacheClipEngine(primary=tiny_models["llama"])
    text = engine.generate("A question.").text
    observer = engine.observers[-1]
    assert isinstance(observer, Observer) and observer.answers == [text]
    others = CacheClipEngine(primary=tiny_models["llama"], shadow_rate=0.5).observers
    assert type(observer) not in map(type, others), "it wanted none for this engine"


def test_what_is_no_observer_is_refused(install: Install, tiny_models: dict[str, str]) -> None:
    install(observers={"wrong": "guest_of_a_test:wrong"})
    with pytest.raises(ConfigurationError, match="expected an Observer or None of 'wrong'"):
        CacheClipEngine(primary=tiny_models["llama"])


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cacheclip_rag.cli import main; main()", *args], capture_output=True, text=True
    )


def test_commands(install: Install) -> None:
    install(source=COMMANDS, commands={"own": "guest_of_a_test:register"})
    assert run("greet", "Ada").stdout == "Good day, Ada.\n"
    assert run("store", "greet", "Ada").stdout == "Good day, Ada.\n"
    assert "greet" in run("--help").stdout


def test_a_broken_distribution_is_named_and_other_commands_work(install: Install) -> None:
    install(source="import a_module_that_is_not_there", commands={"own": "guest_of_a_test:register"})
    found = run("--help")
    assert found.returncode == 0 and "store" in found.stdout
    assert "cannot load 'own' (guest_of_a_test:register) of guest-of-a-test" in found.stderr


def test_one_name_of_two_distributions_is_refused(install: Install) -> None:
    install(methods={"everything": "guest_of_a_test:ALL"})
    install("another-guest", methods={"everything": "another_guest:ALL"})
    with pytest.raises(ConfigurationError, match="two distributions bring 'everything'") as refused:
        preset("everything")
    assert "another-guest" in str(refused.value) and "guest-of-a-test" in str(refused.value)
