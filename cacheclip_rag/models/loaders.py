"""Models by name, before they are loaded. Loaders of other distributions come by entry point."""

from __future__ import annotations

import inspect
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import ConfigurationError
from ..base.guests import ask_guest, guests
from ..base.paths import expanded
from .devices import choose_device
from .fingerprint import FileState, states_in

if TYPE_CHECKING:
    from ..runtime.base import Runtime

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

RUNTIMES = "cacheclip.runtimes"
"""Entry points of loaders."""


class ModelLoader(ABC):
    """One model by its name, before it is loaded. Made for every question about the name, so that its module must be
    light: it imports neither torch nor an engine before :meth:`load`."""

    can_score: bool = True
    """Whether attention weights of the loaded model can be read: an auxiliary model needs this, and fine-tuning."""
    takes_dtype: bool = True
    """Whether the loaded model has the dtype of the settings. If not, one serves all dtypes."""

    choice: str = ""
    """What is said once about a chosen device and dtype, as "{name} runs on {device} in {dtype}."; empty: the same in
    general words."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    @abstractmethod
    def matches(cls, name: str) -> bool:
        """Whether this loader is asked about a name. Looks at the name, not for the model."""

    @classmethod
    def names(cls) -> Sequence[str]:
        """Names of models that can be fetched without a model hub, for messages."""
        return ()

    def check(self) -> None:  # noqa: B027 (a name may need no check)
        """Raise UnknownModelError if no model can have this name, MissingExtraError if something must be installed.
        Takes milliseconds: loads nothing, opens no connection."""

    @property
    def is_here(self) -> bool:
        """Whether the model's files are on this machine."""
        return self.path is not None

    @property
    def path(self) -> Path | None:
        """The absolute path of a folder or file, if the name is a path of one that exists: settings are used in other
        working directories. Not where a link leads: the name may tell whose model it is. None if :meth:`matches` does
        not take the path: the name is none."""
        path = expanded(self.name).absolute()
        return path if os.path.exists(path) and self.matches(str(path)) else None

    @property
    def bare_name(self) -> str:
        """By what the name is compared with that of another time: files may have been moved since."""
        path = expanded(self.name)
        is_path = path.is_absolute() or self.name.startswith(".") or self.path is not None
        return path.name if is_path else self.name

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt in tokens, if it is known without fetching the model. Raises OSError, ValueError: a file
        of the model cannot be read."""
        return None

    @property
    def knows_tools(self) -> bool | None:
        """Whether the chat template uses tools; None if that is not known without fetching the model."""
        return None

    def choose_device(self, device: str) -> str:
        """The device for a setting of it, which may be ``auto``. Nothing is fetched. Raises ConfigurationError,
        MissingExtraError, UnsupportedModelError: the model cannot be loaded there, as far as that is known by now."""
        return choose_device(device)

    @cached_property
    def place(self) -> str:
        """The model's folder or file, fetched at first use; the name, if there is none. A loader that hands models on
        sets it. Raises UnknownModelError, DownloadError."""
        return self.name if self.path is None else str(self.path.resolve())

    @property
    def files(self) -> tuple[FileState, ...]:
        """States of the files that are loaded (:func:`~cacheclip_rag.models.states_of`), fetched at first use. Engines
        share a loaded model while they stay, and none is taken if they change while it is loaded. Default: of the file
        that :attr:`place` names, or of weights, configs and tokenizers right in the folder, by their suffixes."""
        return () if self.path is None and self.place == self.name else states_in(Path(self.place))

    @property
    def own_dtype(self) -> str:
        """What ``auto`` means for the dtype, if the device has it. May fetch the model."""
        return "float32"

    def tokenizer(self) -> Callable[[str], list[int]] | None:
        """What makes token ids of a text, without special tokens, and loads no weights; None: the loaded model does."""
        return None

    @abstractmethod
    def load(self, *, dtype: str, device: str) -> Runtime:
        """The loaded model. ``dtype`` and ``device`` are none of them ``auto``. Raises UnsupportedModelError: its KV
        cannot be reused exactly; ModelError: files are missing or damaged, or memory is too small."""


_unusable: dict[str, str] = {}
"""Why loaders of other distributions cannot be used, by the names of their entry points."""


def _ask_each(question: Callable[[type[ModelLoader]], _T]) -> Iterator[_T]:
    """What loaders of other distributions answer, by the names of their entry points. One that cannot be used is left
    out with a warning: models of the others work."""
    for name in guests(RUNTIMES):
        try:
            answer = ask_guest(RUNTIMES, name, question, "a subclass of ModelLoader with matches and load", _is_loader)
        except ConfigurationError as error:
            if _unusable.get(name) != str(error):
                logger.warning("%s", error)
            _unusable[name] = str(error)
        else:
            yield answer


def _is_loader(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, ModelLoader) and not inspect.isabstract(kind)


def guest_loader(name: str) -> type[ModelLoader] | None:
    """The loader of another distribution that takes a model's name."""
    return next((loader for loader, takes in _ask_each(lambda each: (each, each.matches(name))) if takes), None)


def offered_names() -> list[str]:
    """Names of all models that can be fetched without a model hub, for messages."""
    return [name for names in _ask_each(lambda each: list(each.names())) for name in names]


def unusable_loaders() -> str:
    """What to add to the message that no loader takes a name."""
    return "".join(f" It may be of a distribution that could not be asked: {each}" for each in _unusable.values())


def uses_tools(template: object) -> bool:
    """Whether a chat template uses tools."""
    return re.search(r"\btools\b", str(template)) is not None
