"""One file per strategy. ``README.md`` here says how to add one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from harness.errors import ConfigError
from strategies.base import Strategy


def registry() -> dict[str, type[Strategy]]:
    """Every strategy in this package by name: ``plain`` first, which the others compare with.

    Raises:
        ConfigError: two share a name.
    """
    modules = [each for each in pkgutil.iter_modules(__path__, f"{__name__}.") if not each.ispkg]
    found = by_name([each for module in modules for each in _strategies_of(module.name)])
    return dict(sorted(found.items(), key=lambda item: (item[0] != "plain", item[0])))


def by_name(found: Iterable[type[Strategy]]) -> dict[str, type[Strategy]]:
    """Strategies by the name that their options, rows and tables go by.

    Raises:
        ConfigError: two share a name, as a copy does at first.
    """
    named: dict[str, type[Strategy]] = {}
    for each in found:
        if (other := named.setdefault(each.name, each)) is not each:
            one, two = (f"{cls.__module__}:{cls.__name__}" for cls in (other, each))
            raise ConfigError(
                f"strategy: {one} and {two} are both called {each.name!r}; rename one"
            )
    return named


def find(name: str) -> type[Strategy]:
    """The strategy called ``name`` here, or ``module:Class`` of the user's own code.

    Raises:
        ConfigError: there is none.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        known = registry()
        if name not in known:
            raise ConfigError(
                f"strategy: {name!r} is none of {', '.join(known)}; "
                "name one of them, or module:Class for your own"
            )
        return known[name]
    try:
        strategy = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever the user's module raises as it is imported
        raise ConfigError(
            f"strategy: {name!r} cannot be imported ({type(error).__name__}: {error}); "
            f"`python -c 'import {module_name}'` shows where"
        ) from None
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise ConfigError(f"strategy: {name!r} is no subclass of strategies.base.Strategy")
    if not isinstance(getattr(strategy, "name", None), str):
        raise ConfigError(f"strategy: {name!r} has no name; give the class a name attribute")
    return strategy


def _strategies_of(module_name: str) -> list[type[Strategy]]:
    module = importlib.import_module(module_name)
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Strategy)
        and value.__module__ == module_name
        and value is not Strategy
    ]
