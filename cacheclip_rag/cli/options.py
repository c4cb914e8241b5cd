"""Settings of a command: from its options, and from the file of ``--settings``.

Options of the engine are made from :class:`~cacheclip_rag.config.EngineConfig`: names, types and help are those of its
fields. A command shows the few that people type (:func:`engine_options`); the file takes all of them by name.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from ..base.checks import by_real_names, check_store_url, did_you_mean, store_place
from ..base.errors import ConfigurationError, MissingExtraError, StoreError
from ..base.names import OPTIONS, refuse_removed
from ..base.paths import expanded, is_url
from ..base.urls import shown_url
from ..config import EngineConfig
from .companions import COMPANIONS
from .tables import BROUGHT, TABLES, Table

_SPELLED = {"recompute_ratio": "--ratio"}
"""Options whose name is not the setting's."""
_FIELDS = {each.name: each for each in fields(EngineConfig)}
_MAY_BE_NONE = {name for name, each in _FIELDS.items() if "None" in each.metadata["help"]} - {"system_prompt"}
"""Settings for which ``none`` is written where Python has None."""
_FIXED = ("primary", "auxiliary", "dtype", "namespace")
"""Options that the first ingestion fixes for the documents of a store."""
_MODELS = ("primary", "auxiliary")
_VLLM = "vllm"
"""Table of arguments of vLLM's ``LLM``, which checks them itself."""

_TableT = TypeVar("_TableT", bound=Table)
_Run = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """What was given to a command, checked: an option counts more than the file."""

    engine: Mapping[str, Any]
    """Settings of the engine by name; only those that were given."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Tables of the file, by command."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's ``LLM``."""

    def table(self, kind: type[_TableT]) -> _TableT:
        """The table of one kind; its defaults if the file has none."""
        return next((each for each in self.tables.values() if isinstance(each, kind)), kind())

    @property
    def store(self) -> str:
        """Folder of the store, as it was given.

        Raises:
            ConfigurationError: none was given.
        """
        if not self.engine.get("store"):
            raise ConfigurationError('expected a store. Give --store DIR, or store = "DIR" in the file of --settings.')
        return str(self.engine["store"])

    def config(self, **own: Any) -> EngineConfig:
        """Settings of an engine without documents.

        Args:
            own: settings that the command chooses itself.
        """
        return EngineConfig.from_options(None, {**self.engine, **own})

    def store_config(self) -> EngineConfig:
        """Settings of an engine on the given store: those of the documents there, if it has any, and the given ones."""
        for companion in COMPANIONS:
            if (config := companion.config(self.store, self.engine)) is not None:
                return config
        if is_url(self.store):
            return self.config()
        return self.config(**{name: model_place(self.engine[name]) for name in _MODELS if name in self.engine})


def engine_options(*names: str) -> Callable[[_Run], _Run]:
    """Declare options of a command for these settings of the engine, and ``--settings``. The command's parameter
    ``settings`` gets a :class:`CommandSettings`."""

    def declare(command: _Run) -> _Run:
        signature = inspect.signature(command)
        types = get_type_hints(command, include_extras=True)
        types |= {
            **{name: _option(name, reads_documents="store" in names) for name in names},
            "settings": _SettingsOption,
        }
        own = {name: each.default for name, each in signature.parameters.items() if name != "settings"}
        defaults = {**own, **dict.fromkeys((*names, "settings"))}

        @wraps(command)
        def run(**values: Any) -> None:
            typed = {name: value for name in names if (value := values.pop(name)) is not None}
            chosen = read_settings(values.pop("settings"), typed, may_name_variant=values.get("variants") is not None)
            command(settings=chosen, **values)

        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {name: types[name] for name in defaults}
        return run

    return declare


class SettingsCommand(TyperCommand):
    """A command. An option that became a setting of the file is refused with the line to write there, and one that is
    gone among those that it passes on."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        names = (each.partition("=")[0] for each in takewhile(lambda each: each != "--", args))
        for option in names:
            if option.startswith("--") and option not in known and (instead := _instead(self.name, option)):
                raise ConfigurationError(instead)
        left: list[str] = super().parse_args(ctx, args)
        refuse_removed([each.partition("=")[0] for each in ctx.args], OPTIONS)
        return left


def _instead(command: str | None, option: str) -> str | None:
    """What to write instead of an option that a command does not take; None if there is no such setting."""
    name = option[2:].replace("-", "_")
    if command in TABLES and name in [each.name for each in fields(TABLES[command])]:  # type: ignore[arg-type]
        return f"{option} is gone: write {name} = ... under [{command}] in the file of --settings."
    if option in OPTIONS:
        return OPTIONS[option]
    if name in _FIELDS:
        return f"{option} is no option of {command}: write {name} = ... in the file of --settings."
    return None


def _option(name: str, reads_documents: bool) -> Any:
    """The option of a setting, as typer declares one."""
    declared = _FIELDS[name]
    kinds = str(declared.type).replace("|", " ").split()
    kind = next((each for each in (str, bool, int, float) if each.__name__ in kinds), str)
    flag = _SPELLED.get(name, f"--{name.replace('_', '-')}")
    default = None if declared.default is None else str(declared.default)
    if default and reads_documents and name in _FIXED:
        default = f"the store's, else {default}"
    return Annotated[kind | None, typer.Option(flag, help=_help_of(declared), show_default=default or False)]


def _help_of(setting: Field[Any]) -> str:
    """The help text of a setting, without markup, and with None as it is written here."""
    return re.sub(r":\w+:`~?[\w.]*?(\w+)`|`", r"\1", setting.metadata["help"]).replace("None", "none")


def read_settings(file: Path | None, typed: Mapping[str, Any], *, may_name_variant: bool = False) -> CommandSettings:
    """The settings of a file, overridden by those that were typed.

    Raises:
        ConfigurationError: the file cannot be read, a name is unknown, or a value is wrong.
    """
    read = {} if file is None else _read(file)
    tables = {name: value for name, value in read.items() if isinstance(value, dict)}
    engine = by_real_names({name: value for name, value in read.items() if name not in tables}, _FIELDS)
    try:
        _checked(engine, may_name_variant)
        checked = {name: _table(name, value) for name, value in tables.items() if name != _VLLM}
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from error
    engine |= {name: _as_declared(name, value) for name, value in typed.items()}
    return CommandSettings(_checked(engine, may_name_variant), checked, tables.get(_VLLM, {}))


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(expanded(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor TOML
        raise ConfigurationError(f"cannot read the settings file {file}: {error}.") from error


def _checked(engine: dict[str, Any], may_name_variant: bool) -> dict[str, Any]:
    """Settings of the engine, refused before anything is imported or loaded. ``none`` means None."""
    engine |= {name: None for name in _MAY_BE_NONE if str(engine.get(name)).lower() == "none" and name in engine}
    for name in _MODELS:
        checked_model(engine.get(name))
    EngineConfig.from_options(None, {n: v for n, v in engine.items() if not (may_name_variant and n == "method")})
    return engine


def _table(name: str, values: Mapping[str, Any]) -> Table:
    if name not in TABLES:
        if name in BROUGHT:
            raise MissingExtraError(f"what checks [{name}]", BROUGHT[name])
        hint, tables = did_you_mean(name, (*TABLES, _VLLM)), ", ".join((*TABLES, _VLLM))
        raise ConfigurationError(f"unknown table [{name}].{hint} Known: {tables}.")
    known = [each.name for each in fields(TABLES[name])]  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        hint = did_you_mean(unknown, known)
        raise ConfigurationError(f"[{name}]: unknown setting {', '.join(unknown)}.{hint} Known: {', '.join(known)}.")
    try:
        return TABLES[name](**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"[{name}]: {error}") from error


def _as_declared(name: str, value: Any) -> Any:
    """An option's value; as a number if it is one and the setting may be one."""
    try:
        return float(value) if "float" in str(_FIELDS[name].type) else value
    except ValueError:
        return value


def checked_model(name: str | None) -> str | None:
    """Refuse a name that no model can have before anything is imported or loaded."""
    if name is not None:
        from ..models.load import check_name

        check_name(name)
    return name


def model_place(name: str | None) -> str | None:
    """The absolute path of a model that is a folder or file, because the next command may run in another folder; any
    other name as it is."""
    from ..models.load import loader_of

    path = loader_of(name).path if name else None
    return name if path is None else str(path)


def existing_store(store: str) -> str:
    """Refuse a folder that does not exist, before anything is imported or loaded. What is at a URL is seen later."""
    if not is_url(store):
        return existing_folder(store)
    check_store_url(store)
    return store


def existing_folder(store: str) -> str:
    """Refuse what is no folder that exists, for commands that need one."""
    if is_url(store_place(store)):
        raise ConfigurationError(
            f"expected a store folder, got {shown_url(store)!r}: this command works on a folder of this machine. For a "
            "shared store there are cacheclip ingest, serve, and store create, stats, gc, verify, remove and compact."
        )
    if not expanded(store).is_dir():
        raise no_store(store)
    return store


def no_store(store: str) -> StoreError:
    """The error about a folder that holds no store."""
    return StoreError(
        f"there is no store at {store}. Give the folder that ingest or the engine used, or make one: cacheclip "
        f"ingest PATH --store {store}"
    )


_SettingsOption = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE.toml", help="All settings of the engine by name; options override it."),
]
