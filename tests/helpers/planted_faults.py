"""Failures that are planted in a program, one at a time."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


class Broken(Exception):
    """A planted failure."""


class Fault:
    """Fails at one call of a function; the calls before and after it are as always."""

    def __init__(self, patch: Any, owner: Any, name: str, at: int, error: type[BaseException] = Broken) -> None:
        self.calls, called = 0, getattr(owner, name)

        def failing(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise error(f"{name} failed at call {at}")
            return called(*arguments, **options)

        patch.setattr(owner, name, failing)
        self._at = at

    @property
    def has_failed(self) -> bool:
        return self.calls >= self._at
