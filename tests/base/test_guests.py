"""Entry points of other distributions, each installed for one test as a folder on the path."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.fake import FakeRuntime
from typer import Typer
from typer.main import get_command

from cacheclip_rag import (
    CacheClipEngine,
    ConfigurationError,
    EngineConfig,
    ModelError,
    UnknownModelError,
    UnsupportedModelError,
)
from cacheclip_rag.base import guests as module
from cacheclip_rag.cli.plugins import GROUP, CommandLine
from cacheclip_rag.guards import Observer
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import (
    check_name,
    concrete,
    is_here,
    known_context,
    load_any,
    loader_of,
    register_runtime,
)
from cacheclip_rag.planning import PlanningEngine
from cacheclip_rag.store import open_chunk_store
from tests.conftest import CHUNKS, rag_prompt

Install = Callable[..., None]
CommandsAndText = Callable[[], tuple[dict[str, Any], str]]

SOURCE = """
from dataclasses import replace
from cacheclip_rag.guards import Observer
from cacheclip_rag.methods import preset

ALL = replace(preset("epic").at(1.0), name="everything")


class Seen(Observer):
    answers = []

    def on_answer(self, answered):
        self.answers.append(answered.answer.text)


class Doubting(Observer):
    closed = 0

    def on_plan(self, plan, kv_sources):
        return replace(plan, bypass="the observer doubts it")

    def close(self):
        self.closed += 1


def doubting(config):
    return Doubting()


def observer(config):
    return Seen() if config.shadow_rate == 0 else None


def wrong(*given):
    return "no observer"


def failing(*given):
    raise KeyError("nothing")
"""

COMMANDS = """
def register(commands):
    def greet(name: str) -> None:
        \"\"\"Greet somebody.\"\"\"
        print(f"Good day, {name}.")

    commands.add("greet", greet)
    commands.add("store greet", greet)


def taking(commands):
    commands.add("early", lambda: print("Early."))
    commands.add("store stats", lambda: None)


def again(commands):
    commands.add("greet", lambda: None)


def grouped(commands):
    commands.add("word count", lambda: None)


def typed(commands):
    def strange(words: list[list[str]]) -> None: ...

    commands.add("strange", strange)


def beside(commands):
    commands.keep_beside(commands)


def leaving(commands):
    raise SystemExit("no more")
"""

RUNTIME = """
from cacheclip_rag.plugins import ModelLoader
from cacheclip_rag.planning import PlanningEngine
from cacheclip_rag.store import open_chunk_store
from cacheclip_testing.fake import FakeRuntime


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
    can_score = takes_dtype = False


class FileLoader(WordsLoader):
    def load(self, *, dtype, device):
        runtime = FakeRuntime(self.name, dtype=dtype)
        runtime.says = (self.path / "words.txt" if self.path.is_dir() else self.path).read_bytes().decode("ascii")
        return runtime


class NoPaths(WordsLoader):
    @classmethod
    def matches(cls, name):
        return name.startswith("words-")


class Unfinished(ModelLoader):
    @classmethod
    def matches(cls, name):
        return True


class Failing(WordsLoader):
    @classmethod
    def matches(cls, name):
        raise KeyError("nothing")

    names = matches
"""

NAMED = r"'own' \(guest_of_a_test:?\w*\) of guest-of-a-test 1\.0 as cacheclip\."
"""How a message names what is installed for a test."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with a module ``guest_of_a_test`` and these entry points by group."""

    def put(name: str = "guest-of-a-test", source: str = SOURCE, **groups: dict[str, str]) -> None:
        folder = tmp_path / name
        about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir(parents=True)
        (folder / "guest_of_a_test.py").write_text(source)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        with (about / "entry_points.txt").open("w") as file:
            for group, own in groups.items():
                print(f"[cacheclip.{group}]", *(f"{k} = {v}" for k, v in own.items()), sep="\n", file=file)
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


def test_a_model_whose_file_changed_is_loaded_again(install: Install, tmp_path: Path) -> None:
    """By a loader that says nothing of files, and where a runtime is registered. Engines that have it keep it."""
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:FileLoader"})
    (folder := tmp_path / "b.words").mkdir()
    for name, file in ((tmp_path / "a.words", tmp_path / "a.words"), (folder, folder / "words.txt")):
        file.write_text("one")
        first = load_any(name)
        (tmp_path / "link.words").unlink(missing_ok=True)
        (tmp_path / "link.words").symlink_to(name)
        assert load_any(name) is load_any(tmp_path / "link.words") is first and is_here(str(name))
        file.write_text("another")
        assert (first.says, load_any(name).says) == ("one", "another")
    register_runtime("fake", FakeRuntime)
    first = load_any(f"fake:{tmp_path / 'a.words'}")
    (tmp_path / "a.words").write_text("a third")
    assert load_any(f"fake:{tmp_path / 'a.words'}") is not first
    for each in (".git/b.json", "logs/b.json", "b.log"):
        (folder / each).parent.mkdir(exist_ok=True)
        (folder / each).touch()
    for name in (str(folder), f"fake:{folder}"):
        assert [Path(state[0]).name for state in loader_of(name).files] == ["words.txt"], name
    assert loader_of(f"fake:{'a' * 300}").files == loader_of("fake:a\0b").files == ()


def test_a_name_that_is_no_path_stays_one(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder has the same name: its path would be refused."""
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:NoPaths"})
    (tmp_path / "words-a" / "b").mkdir(parents=True)
    (tmp_path / "words-a" / "b" / "words.txt").touch()
    monkeypatch.chdir(tmp_path)
    loader = loader_of(name := "words-a/b")
    assert (loader.path, loader.place, loader.bare_name, loader.files) == (None, name, name, ())
    assert loader_of(f"words-{'a' * 300}").path is None


def test_an_error_that_a_loader_did_not_foresee_names_it(install: Install, tmp_path: Path) -> None:
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:FileLoader"})
    (tmp_path / "a.words").write_bytes(b"\xff")
    message = r"expected guest_of_a_test\.FileLoader to load model .*a\.words', got Unicode.*: .* authors of guest_o"
    with pytest.raises(ModelError, match=message) as refused:
        load_any(tmp_path / "a.words")
    assert isinstance(refused.value.__cause__, UnicodeDecodeError)


NO_LOADER = "expected a subclass of ModelLoader with matches and load, got <"


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (":GoneLoader", "AttributeError: .* no attribute 'GoneLoader'"),
        ("", f"{NO_LOADER}module"),
        (":FakeRuntime", f"{NO_LOADER}class"),
        (":Unfinished", f"{NO_LOADER}class"),
        (":Failing", "KeyError: 'nothing'"),
    ],
)
def test_a_runtime_that_cannot_be_used_is_left_out(
    install: Install, tiny_models: Any, caplog: Any, named: str, why: str
) -> None:
    """With a warning, and in the error about a name that could be its own."""
    install(source=RUNTIME, runtimes={"own": f"guest_of_a_test{named}"})
    for _ in range(2):
        assert known_context(tiny_models["llama"])
    [warned] = [each.message for each in caplog.records if "guest-of-a-test" in each.message]
    assert re.search(f"^cannot use {NAMED}runtimes: {why}.*uninstall it", warned)
    for name in ("of-a-test.words", "packaged:of-a-test"):
        with pytest.raises(UnknownModelError, match=f"no model is called.*could not be asked: cannot use {NAMED}"):
            check_name(name)


def test_a_runtime_says_what_it_cannot_do(install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its prompts are not planned for another process."""
    install(source=RUNTIME, runtimes={"words": "guest_of_a_test:Blind"})
    concrete(EngineConfig(primary="no-dtype.words"))
    assert re.search(r"^no-dtype\.words runs on \w+\. To choose another one: device\.$", caplog.messages[-1])
    with pytest.raises(ConfigurationError, match=r"what runs 'a\.words' does not show it"):
        _ = CacheClipEngine(primary="a.words", auxiliary="a.words").auxiliary
    planner = PlanningEngine(primary="a.words", auxiliary=None, method="epic", store=tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"expected a checkpoint of transformers, .*, got 'a\.words'"):
        planner.plan("A question.")


def test_an_observer_sees_answers(install: Install, tiny_models: dict[str, str]) -> None:
    install(observers={"seen": "guest_of_a_test:observer"})
    engine = CacheClipEngine(primary=tiny_models["llama"])
    text = engine.generate("A question.").text
    observer = engine.observers[-1]
    assert isinstance(observer, Observer) and observer.answers == [text]
    others = CacheClipEngine(primary=tiny_models["llama"], shadow_rate=0.5).observers
    assert type(observer) not in map(type, others), "it wanted none for this engine"


def test_an_observer_sees_plans_for_another_process(install: Install, tiny_models: Any, tmp_path: Path) -> None:
    """What it says of a plan counts as in an engine with the weights."""
    options: dict[str, Any] = {"primary": tiny_models["llama"], "auxiliary": None, "store": tmp_path, "method": "epic"}
    CacheClipEngine(**options).precompute(CHUNKS)
    assert PlanningEngine(**options).plan(rag_prompt(CHUNKS)).fusion is not None
    install(observers={"doubting": "guest_of_a_test:doubting"})
    engine, planner = CacheClipEngine(**options), PlanningEngine(**options)
    assert engine.generate(rag_prompt(CHUNKS), max_tokens=1).stats.bypassed
    planned = planner.plan(rag_prompt(CHUNKS))
    assert (planned.fusion, planned.reason) == (None, "the observer doubts it")
    planner.close()
    [observer] = [each for each in planner.observers if isinstance(each, Observer) and hasattr(each, "closed")]
    assert observer.closed == 1


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("group", "needed"),
    [
        ("observers", lambda folder: CacheClipEngine(primary=folder)),
        ("observers", lambda folder: PlanningEngine(primary=folder, store="a-store", method="epic")),
        ("methods", lambda folder: preset("own")),
        ("stores", lambda folder: open_chunk_store("own://place")),
    ],
    ids=["engine", "planner", "method", "store"],
)
@pytest.mark.parametrize(
    ("named", "why"),
    [
        (":gone", "AttributeError: .* no attribute 'gone'"),
        ("", "expected an? .*, got <module 'guest_of_a_test'"),
        (":failing", "expected an? .*, got <function failing|KeyError: 'nothing'"),
        (":wrong", "expected an? .*, got <function wrong|expected an Observer or None, got 'no observer'"),
    ],
)
def test_what_is_needed_and_cannot_be_used_is_named(
    install: Install, tiny_models: Any, group: str, needed: Any, named: str, why: str
) -> None:
    install(**{group: {"own": f"guest_of_a_test{named}"}})
    with pytest.raises(ConfigurationError, match=f"^cannot use {NAMED}{group}: ({why}).*uninstall it"):
        needed(tiny_models["llama"])


def test_what_measures_is_named(install: Install, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_rag.base.guests.MEASUREMENTS", "cacheclip.measures")
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="epic", recompute_ratio="auto")
    for name, named, kind in (("one", "", "module"), ("two", ":wrong", "function wrong")):
        install(name, measures={"ratios": f"guest_of_a_test{named}"})
        why = f"expected a subclass of RatioChooser, got <{kind}"
        with pytest.raises(ConfigurationError, match=rf"cannot use 'ratios' .* of {name} 1\.0.*{why}"):
            engine.profile_machine()
        monkeypatch.setattr("sys.path", sys.path[1:])


@pytest.mark.long
def test_what_is_not_needed_is_not_imported(install: Install, tmp_path: Path) -> None:
    groups = ("observers", "methods", "stores", "measurements", "runtimes")
    install(source="raise RuntimeError('never')", **dict.fromkeys(groups, {"own": "guest_of_a_test"}))
    done = run("store", "stats", "--store", str(tmp_path))
    assert "is not a store" in done.stderr and "guest" not in done.stderr


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cacheclip_rag.cli import main; main()", *args], capture_output=True, text=True
    )


def stats() -> None:
    """A command."""


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandsAndText:
    """What a command line has that is made with the distribution of a test alone, and what it says."""

    def made() -> tuple[dict[str, Any], str]:
        known = {name: own for name, own in module.guests(GROUP).items() if "guest_of_a_test" in own[0].value}
        monkeypatch.setattr("cacheclip_rag.cli.plugins.guests", lambda group: known)
        return commands(), capsys.readouterr().err

    return made


def commands() -> dict[str, Any]:
    groups = {"models": Typer(), "store": Typer()}
    app = CommandLine(add_completion=False)
    for name, group in groups.items():
        group.command("stats")(stats)
        app.add_typer(group, name=name)
    app.command("explain-miss")(stats)
    app.load_later(groups)
    known: dict[str, Any] = dict(get_command(app).commands)  # type: ignore[attr-defined]
    known["store stats"] = known["store"].commands["stats"].callback.__wrapped__
    return known


@pytest.mark.long
def test_commands(install: Install) -> None:
    install(source=COMMANDS, commands={"own": "guest_of_a_test:register"})
    assert run("greet", "Ada").stdout == "Good day, Ada.\n"
    assert run("store", "greet", "Ada").stdout == "Good day, Ada.\n"
    assert "greet" in run("--help").stdout


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "named", "why"),
    [
        ("import a_module_that_is_not_there", ":register", "ModuleNotFoundError: No module named 'a_module_that"),
        ("raise SystemExit('no more')", ":register", "SystemExit: no more"),
        (COMMANDS, ":gone", "AttributeError: .* no attribute 'gone'"),
        (COMMANDS, "", "expected a function that gets Commands .*, got <module"),
        (SOURCE, ":failing", "KeyError: 'nothing'"),
        (COMMANDS, ":leaving", "SystemExit: no more"),
        (COMMANDS, ":typed", "AssertionError: List types with complex"),
        (COMMANDS, ":grouped", "expected a command of its own, or of one of the groups models, store, got 'word"),
        (COMMANDS, ":beside", "expected a Companion, got .* without config, counts, problems, repair, texts"),
        (COMMANDS, ":taking", "cacheclip store stats is a command of cacheclip-rag already. Give that of g"),
    ],
)
def test_a_distribution_whose_commands_fail_is_named(
    install: Install, source: str, named: str, why: str, command_line: CommandsAndText
) -> None:
    install(source=source, commands={"own": f"guest_of_a_test{named}"})
    known, said = command_line()
    assert {*known} - {"early"} == {"models", "store", "store stats", "explain-miss"} and known["store stats"] is stats
    assert re.fullmatch(f"cacheclip: (cannot use )?{NAMED}commands: {why}.*are missing.\n", said), said
    assert ("early" in known) == (named == ":taking"), "what it added before"


def test_a_broken_distribution_stops_no_command(install: Install) -> None:
    install(source="import a_module_that_is_not_there", commands={"own": "guest_of_a_test:register"})
    done = run("--help")
    assert done.returncode == 0 and "models" in done.stdout
    assert re.match(f"cacheclip: cannot use {NAMED}commands: ModuleNotFoundError: ", done.stderr)


def test_a_command_of_two_distributions(install: Install, command_line: CommandsAndText) -> None:
    install(source=COMMANDS, commands={"own": "guest_of_a_test:register", "own-too": "guest_of_a_test:again"})
    known, said = command_line()
    assert "greet" in known
    assert "'own-too' (guest_of_a_test:again) of guest-of-a-test 1.0 as cacheclip.commands: cacheclip greet is" in said
    assert "is a command of guest-of-a-test 1.0 already. Give that of guest-of-a-test 1.0 another name" in said


def test_a_command_of_a_broken_distribution_is_not_said_to_be_missing(install: Install) -> None:
    """It is installed."""
    install(source="import nothing_there", commands={"serve": "guest_of_a_test"}, command={"own": "guest_of_a_test"})
    done = run("serve")
    assert done.stderr.count("cacheclip.command of guest-of-a-test 1.0. Did you mean cacheclip.commands?") == 1
    assert done.returncode == 2 and "is not installed" not in done.stderr
    assert "cacheclip: cacheclip serve is missing: two distributions bring 'serve'" in done.stderr


def test_methods_that_are_refused(install: Install) -> None:
    """Of another name, and of two distributions."""
    install(methods={"other": "guest_of_a_test:ALL", "everything": "guest_of_a_test:ALL"})
    with pytest.raises(ConfigurationError, match="expected a Method with the name 'other'"):
        preset("other")
    install("another-guest", methods={"everything": "another_guest:ALL"})
    with pytest.raises(ConfigurationError, match="two distributions bring 'everything'") as refused:
        preset("everything")
    assert "another-guest" in str(refused.value) and "guest-of-a-test" in str(refused.value)
