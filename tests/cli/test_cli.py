"""The command as scripts use it: JSON alone on stdout, exit codes, one-line errors."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from cacheclip_testing import fake_models, run_without_torch

from cacheclip_rag import CacheClipEngine, __version__
from cacheclip_rag.base.errors import ConfigurationError, MissingExtraError, UnknownModelError
from cacheclip_rag.base.guests import guests, load_guest
from cacheclip_rag.cli import app, options
from cacheclip_rag.cli.common import parse_bytes
from cacheclip_rag.cli.options import CommandSettings, _help_of, engine_options
from cacheclip_rag.cli.plugins import GROUP
from cacheclip_rag.cli.tables import BROUGHT, Table
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.store import LEARNED
from tests.store.samples import failing


@pytest.fixture
def stored(engine: CacheClipEngine, tmp_path: Path, chunks: list[str]) -> Path:
    """A store without documents."""
    engine.precompute(chunks[:3])
    engine.close()
    return tmp_path / "store"


def settings(folder: Path, text: str) -> list[str]:
    """``--settings`` with a file of this text."""
    file = folder / f"{len(list(folder.glob('*.toml')))}.toml"
    file.write_text(text)
    return ["--settings", str(file)]


def test_errors_of_usage(cacheclip: Any) -> None:
    """An unknown name lists the known ones."""
    result = cacheclip("models", "pull", "smollm3", "--json")
    assert (result.code, result.out) == (2, "")
    assert "smollm2-135m" in result.err and "Traceback" not in result.err
    assert cacheclip("models", "pull").code == cacheclip("frobnicate").code == 2


def test_store_stats(cacheclip: Any, stored: Path, tmp_path: Path) -> None:
    stats = cacheclip("store", "stats", "--store", stored, "--json").json
    assert stats["documents"] == stats["passages"] == 0
    assert stats["entries"] == 2 * 3 + 2  # both models, and a shared prefix for each
    assert stats["bytes"] > 0
    missing = cacheclip("store", "stats", "--store", tmp_path / "nothing")
    assert missing.code == 1 and not (tmp_path / "nothing").exists()


REFUSED = [
    (("explain-miss", "prompt.txt", "--store", "{none}"), 1, "there is no store at"),
    (("store", "verify", "--store", "{none}"), 1, "there is no store at"),
    (("store", "verify", "--store", "~gone/s"), 1, "there is no store at ~gone/s"),
    (("store", "gc", "--store", "~gone/s"), 1, "there is no store at ~gone/s"),
    (("profile", "--settings", "~gone/a.toml"), 2, "~gone/a.toml"),
    (("profile", "--primary", "~gone/m"), 2, "no model is called"),
    (("profile", "--auxiliary", "smollm-135m"), 2, "mean 'packaged:smollm2-135m'?"),
    (("profile", "--method", "caheclip"), 2, "Did you mean 'cacheclip'?"),
    (("profile", "--settings", "{file}"), 2, "other.toml: unknown table [wrong]. Known: "),
    (("profile", "--codec", "int8"), 2, "write codec = ... in the file of --settings"),
]


def test_what_cannot_work_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[wrong]\nchat = 1")
    commands = [[each.format(none=tmp_path / "none", file=file) for each in arguments] for arguments, *_ in REFUSED]
    for (_, code, message), done in zip(REFUSED, run_without_torch(*commands), strict=True):
        assert (done.code, done.out) == (code, ""), done.err
        assert message in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "none").exists()


class TestSettingsFile:
    """Options and the file of ``--settings`` are made from the settings of the engine."""

    def test_options_win_over_the_file(self, tmp_path: Path) -> None:
        text = 'primary = "a/b"\nmethod = "full"\nrecompute_ratio = 0.3\nauxiliary = "none"\ncodec = "int8"'
        [given] = self.given(tmp_path, text, "--ratio", "0.5", "--dtype", "bfloat16")
        config = given.config()
        assert (config.primary, config.method, config.auxiliary, config.codec) == ("a/b", "full", None, "int8")
        assert (config.recompute_ratio, config.dtype) == (0.5, "bfloat16")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("primry = 'a/b'", "unknown option primry. Did you mean 'primary'?"),
            ("recompute_ratio = 2", "recompute_ratio must be between 0"),
            ("primary = 'smollm-135m'", "Did you mean 'packaged:smollm2-135m'?"),
            ("[wrong]", "unknown table [wrong]. Known: "),
            ("[finetune]\nsamples = -1", "samples must be a whole number, 0 or more"),
            ("primary =", "cannot read the settings file"),
        ],
    )
    def test_what_it_refuses(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises((ConfigurationError, UnknownModelError), match=re.escape(words)):
            self.given(tmp_path, text)

    def test_tables_of_modules_that_evaluate_annotations(self) -> None:
        """As modules do without ``from __future__ import annotations``."""
        own: dict[str, Any] = {"most": 3, "share": 0.5, "is_strict": True, "name": None}
        types: dict[str, Any] = {"most": int, "share": float | None, "is_strict": bool, "name": str | None}
        kind: Any = make_dataclass("Own", [(name, types[name], own[name]) for name in own], bases=(Table,))
        assert vars(kind(**own)) == own
        for name, wrong in (("most", "3"), ("share", "x"), ("is_strict", 1), ("name", 3)):
            with pytest.raises(ConfigurationError, match=name):
                kind(**{name: wrong})

    def test_none_is_written_as_the_help_says(self, tmp_path: Path) -> None:
        """A text may be called so."""
        told = {each.name for each in fields(EngineConfig) if "None" in each.metadata["help"]} - {"system_prompt"}
        assert told >= {"auxiliary", "store", "recompute_ratio"}
        for each in fields(EngineConfig):
            assert "None" not in options._help_of(each)
        for written in ("none", "None"):
            read = options.read_settings(None, dict.fromkeys(told, written)).engine
            assert read == dict.fromkeys(told), written
        (tmp_path / "a.toml").write_text('system_prompt = "None"\nauxiliary = "None"')
        assert options.read_settings(tmp_path / "a.toml", {}).engine == {"system_prompt": "None", "auxiliary": None}

    def test_every_setting_of_the_engine_has_a_help_text(self) -> None:
        texts = {each.name: _help_of(each) for each in fields(EngineConfig)}
        assert all(texts.values()) and texts["device"] == "Device of the models: cpu, cuda, cuda:1, mps."

    def given(self, tmp_path: Path, text: str, *arguments: str) -> list[CommandSettings]:
        """What a command gets."""
        found: list[CommandSettings] = []

        @engine_options("recompute_ratio", "dtype")
        def command(settings: CommandSettings) -> None:
            found.append(settings)

        app = typer.Typer()
        app.command()(command)
        app([*settings(tmp_path, text), *arguments], standalone_mode=False)
        return found


def commands(group: Any = None) -> Iterator[Any]:
    for each in (group or typer.main.get_command(app)).commands.values():
        yield from commands(each) if hasattr(each, "commands") else [each]


def test_options_do_not_become_more() -> None:
    """Options of all commands together, `--help` not counted, a command with two names once. Lower the number when one
    goes; see the settings file before adding one."""
    once = {command.name: command for command in commands() if command.name != "calibrate"}.values()
    assert len([each for command in once for each in command.params if each.param_type_name == "option"]) <= 140
    assert all("as_json" in [each.name for each in command.params] for command in commands())


def test_version(cacheclip: Any) -> None:
    assert cacheclip("--version").out == f"cacheclip {__version__}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("8GiB", 2**33), ("8 gib", 2**33), ("1.5kB", 1500), ("200G", 200 * 10**9), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_json_knows_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    from cacheclip_rag.cli.common import print_json

    print_json({"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (float("-inf"), 2)}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": {"d": [None, 2]}}


class TestWithoutGuests:
    """Commands where no other distribution is installed."""

    @staticmethod
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        hide = "import importlib.metadata as found; found.entry_points = lambda **_: found.EntryPoints()"
        program = f"{hide}; from cacheclip_rag.cli import main; main()"
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("command", "owner"), [("ingest", "ingest"), ("store verify", "care")])
    def test_a_command_of_one_says_what_to_install(self, command: str, owner: str) -> None:
        done = self.run(*command.split(), "--help")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"cacheclip {command} is not installed" in done.stderr
        assert f"integrations/cacheclip-{owner}" in done.stderr

    def test_no_command_of_one_is_forgotten(self) -> None:
        """Each that the distributions of this repository bring is known with what installs it."""

        names = set[str]()
        brought = SimpleNamespace(add=lambda name, *_, **__: names.add(name), keep_beside=lambda companion: None)
        for name in guests(GROUP):
            load_guest(GROUP, name, "a function")(brought)
        assert len(names) > 10 and names == {*BROUGHT}

    def test_a_table_of_one_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "TABLES", {})
        (tmp_path / "a.toml").write_text("[ingest]\noverlap_tokens = 1")
        with pytest.raises(MissingExtraError, match=r"what checks \[ingest\] is not installed"):
            options.read_settings(tmp_path / "a.toml", {})


class TestStoreCommands:
    def test_limits_of_store_and_tenant(self, cacheclip: Any, stored: Path) -> None:
        before = cacheclip("store", "stats", "--store", stored, "--json").json
        assert before["tenant_bytes"] == {"default": before["bytes"]} and before["quotas"] == {}
        half = before["bytes"] // 2
        limited = cacheclip("store", "limit", half, "--store", stored, "--namespace", "default", "--json").json
        assert limited["evicted"] > 0
        after = cacheclip("store", "stats", "--store", stored, "--json").json
        assert after["bytes"] <= half and after["quotas"] == {"default": half} and after["max_bytes"] is None
        assert cacheclip("store", "limit", 4096, "--store", stored).code == 0
        shown = cacheclip("store", "stats", "--store", stored).out
        assert "limit 4.1 kB" in shown
        assert cacheclip("store", "limit", 0, "--store", stored, "--json").json["max_bytes"] is None
        for wrong in ("-1", "12x", "1e9", "GiB"):
            assert cacheclip("store", "limit", "--store", stored, "--", wrong).code == 2

    def test_what_was_learned_is_counted_and_cleared(self, cacheclip: Any, stored: Path) -> None:
        with CacheClipEngine(**fake_models(), store=stored) as engine:
            engine.precompute(["It recurred in some prompts.", "So did this one."], source=LEARNED)
            engine.precompute(["So did this one."])
        before = cacheclip("store", "stats", "--store", stored, "--json").json
        assert before["learned"] == 1
        cleared = cacheclip("store", "clear", LEARNED, "--store", stored, "--yes", "--json").json
        after = cacheclip("store", "stats", "--store", stored, "--json").json
        assert (cleared["removed"], after["learned"]) == (1, 0) and after["entries"] < before["entries"]
        wrong = cacheclip("store", "clear", "lerned", "--store", stored, "--yes")
        assert wrong.code == 1 and "expected 'cacheclip:learned' or a source of stored texts, got 'lerned'" in wrong.err

    def test_verify_and_repair(self, cacheclip: Any, stored: Path) -> None:
        clean = cacheclip("store", "verify", "--store", stored, "--json")
        assert clean.code == 0 and clean.json["entries"] > 0
        assert not any(clean.json[name] for name in ("damaged", "missing", "unknown_files", "problems"))
        path = next(iter(stored.glob("kv/*/*")))
        path.write_bytes(path.read_bytes()[:-1])
        found = cacheclip("store", "verify", "--store", stored, "--json")
        assert found.code == 1 and found.json["damaged"] == [path.stem] and found.json["problems"] == []
        told = cacheclip("store", "verify", "--store", stored)
        assert told.code == 1 and "cacheclip store repair" in told.out and path.stem in told.out
        repaired = cacheclip("store", "repair", "--store", stored, "--json")
        assert repaired.code == 0 and repaired.json["deleted"] == 1 and repaired.json["library"] == []
        assert cacheclip("store", "verify", "--store", stored).code == 0

    def test_what_cannot_be_read_is_told_and_stays(self, cacheclip: Any, stored: Path) -> None:
        path = next(iter(stored.glob("kv/*/*")))
        with failing("open", lambda: OSError(5, "Input/output error"), lambda name: name == path.name):
            for command in ("verify", "repair"):
                found = cacheclip("store", command, "--store", stored, "--json")
                assert found.code == 1 and found.json["unreadable"] == [path.stem]
                told = cacheclip("store", command, "--store", stored)
                assert told.code == 1 and path.stem in told.out and "cannot be read now" in told.out
        assert path.exists() and cacheclip("store", "verify", "--store", stored).code == 0

    def test_gc_and_clear(self, cacheclip: Any, stored: Path) -> None:
        assert cacheclip("store", "gc", "--store", stored, "--json").json["payloads"] == 0
        refused = cacheclip("store", "clear", "--store", stored, "--json")
        assert refused.code == 2 and "--yes" in refused.err
        removed = cacheclip("store", "clear", "--store", stored, "--yes", "--json").json["removed"]
        assert removed > 0 and cacheclip("store", "stats", "--store", stored, "--json").json["entries"] == 0

    @pytest.mark.parametrize("command", ["stats", "verify", "repair", "gc"])
    def test_what_is_no_store_is_refused(self, cacheclip: Any, tmp_path: Path, command: str) -> None:
        result = cacheclip("store", command, "--store", tmp_path)
        assert result.code == 1 and "cacheclip ingest PATH --store" in result.err and list(tmp_path.iterdir()) == []
