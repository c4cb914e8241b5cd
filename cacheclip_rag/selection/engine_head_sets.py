"""All head sets (:mod:`.heads`) that the auxiliary model of one engine has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import cast

from ..base.errors import ConfigurationError, ModelError
from ..chunks.caches import ChunkCaches
from ..runtime.base import Runtime
from ..runtime.transformers.model import ModelRuntime
from .auxiliary_pass import AuxiliaryPass
from .heads import HeadSet, find_head_set, load_named


class HeadSets:
    """Head sets of one engine's auxiliary model, each read once. Safe to share between threads.

    Models are asked for outside the lock, because whoever loads them may hold a lock of their own.
    """

    def __init__(self, primary: Callable[[], Runtime], auxiliary: Callable[[], ChunkCaches | None]) -> None:
        """Functions that load the primary model, and the auxiliary model's chunk caches, None if there is none."""
        self._primary, self._auxiliary = primary, auxiliary
        self._lock = threading.Lock()
        self._default: tuple[HeadSet | None] | None = None
        self._named: dict[str, HeadSet] = {}

    @property
    def auxiliary(self) -> ModelRuntime | None:
        """The auxiliary model, if there is one whose attention can score; loads it."""
        caches = self._auxiliary()
        if caches is None or not caches.runtime.can_score:
            return None
        return cast("ModelRuntime", caches.runtime)

    @property
    def default(self) -> HeadSet | None:
        """The auxiliary's head set, for methods that name none."""
        if self._default is None:
            auxiliary, primary = self.auxiliary, self._primary().fingerprint
            with self._lock:
                if self._default is None:
                    self._default = (None if auxiliary is None else find_head_set(auxiliary, primary),)
        return self._default[0]

    @property
    def has_default(self) -> bool:
        """Whether a head set can be used. False if the auxiliary cannot be loaded. A head set that cannot be read
        raises an error."""
        try:
            auxiliary = self._auxiliary()
        except ModelError:
            return False
        return auxiliary is not None and self.default is not None

    def use(self, heads: HeadSet | None) -> None:
        """Use these heads as the default from now on; None: the auxiliary's last layer. Raises ConfigurationError: no
        auxiliary model is set; ModelError: the heads were made for another model."""
        if heads is not None:
            auxiliary = self._auxiliary()
            if auxiliary is None:
                raise ConfigurationError("a head set needs an auxiliary model, and none is set. Set auxiliary.")
            heads.check(auxiliary.runtime)
        with self._lock:
            self._default = (heads,)

    def named(self, names: Collection[str]) -> dict[str, HeadSet]:
        """The head sets that a method names; empty if no auxiliary model can score. Raises ModelError: a head set is
        missing, cannot be read, or was made for another model."""
        auxiliary = self.auxiliary
        if auxiliary is None:
            return {}
        with self._lock:
            for name in names:
                if name not in self._named:
                    heads = load_named(name)
                    heads.check(auxiliary, name)
                    self._named[name] = heads
            return {name: self._named[name] for name in names}

    def auxiliary_pass(self, names: Collection[str]) -> AuxiliaryPass | None:
        """The auxiliary model with its default head set and those of these names; None if there is no auxiliary."""
        caches = self._auxiliary()
        return None if caches is None else AuxiliaryPass(caches, self.default, self.named(names))
