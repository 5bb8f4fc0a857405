"""A name → function table with clear errors; the policy losses and the advantage estimators each have one."""

from collections.abc import Callable
from importlib import import_module
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Generic[F]):
    """Functions by name. A name belongs to one function for good; registering the same function again is harmless."""

    def __init__(self, kind: str):
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator that files a function under each name and returns it unchanged."""

        def decorate(function: F) -> F:
            for name in names:
                if self._functions.setdefault(name, function) is not function:
                    raise ValueError(f"{self.kind} {name!r} is already registered to {self._functions[name]!r}")
            return function

        return decorate

    def __getitem__(self, name: str) -> F:
        try:
            return self._functions[name]
        except KeyError:
            raise ValueError(f"unknown {self.kind} {name!r}; registered are {self.names()}") from None

    def find(self, name: str) -> F:
        """A registered function, or the `function` of a user's module: `package.module:function`."""
        module, colon, function = name.partition(":")
        if not colon:
            return self[name]
        try:
            return import_module(module).__dict__[function]
        except (ImportError, KeyError) as error:
            raise ValueError(f"{self.kind} {name!r} cannot be imported: {type(error).__name__}: {error}") from error

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._functions)
