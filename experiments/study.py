"""What the studies share: settings from the command line, and where results go."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import ConfigError, exit_status
from harness.results.manifest import manifest
from harness.results.table import Table, print_tables, to_markdown

WHOLE = re.compile(r"\d+(,\d+)*")
NUMBERS = re.compile(r"\d+(\.\d+)?(e-?\d+)?(,\d+(\.\d+)?(e-?\d+)?)*")
"""Settings of one number or several: whole ones, or any that are not negative."""


def run_study(main: Callable[[list[str]], None]) -> NoReturn:
    """The command line of a study: what the user can correct is one line, and exit status 2."""

    def command() -> int:
        main(sys.argv[1:])
        return 0

    sys.exit(exit_status(command))


@dataclass(frozen=True)
class Study:
    """One run of a study.

    Attributes:
        name: of its files.
        settings: defaults and what the user gave, without ``out``.
        out: folder of the results.
    """

    name: str
    settings: dict[str, str]
    out: Path

    @classmethod
    def begin(
        cls, name: str, arguments: Sequence[str], defaults: Mapping[str, str], parsed: bool = False
    ) -> Study:
        """Read ``setting=value`` words. A default of numbers wants numbers, with commas between,
        and one of whole numbers whole ones.

        Args:
            name: of the study; results go to ``runs/<name>``, or to ``out=…``.
            arguments: the words of the command line.
            defaults: all settings but ``out``.
            parsed: the study checks the values itself.

        Raises:
            ConfigError: there is no such setting, or its value is none.
        """
        given = dict(word.partition("=")[::2] for word in arguments)
        out = Path(given.pop("out", f"runs/{name}"))
        if unknown := sorted(set(given) - set(defaults)):
            known = ", ".join([*defaults, "out"])
            raise ConfigError(f"{unknown[0]}: no such setting; name one of {known}")
        for setting, value in given.items() if not parsed else ():
            default = defaults[setting]
            for kind, what in ((WHOLE, "whole number"), (NUMBERS, "number")):
                if kind.fullmatch(default) and not kind.fullmatch(value):
                    raise ConfigError(
                        f"{setting}: {value!r} is no {what}; give one such as {default}"
                    )
        out.mkdir(parents=True, exist_ok=True)  # now: what was measured must not be lost to it
        return cls(name, {**defaults, **given}, out)

    def write(self, tables: Sequence[Table], results: Mapping[str, Any]) -> None:
        """Write ``<name>.md`` and ``<name>.json``, the manifest in it."""
        command = [word for word in sys.orig_argv if not word.startswith("out=")]
        values = {"settings": self.settings, "manifest": manifest(command), **results}
        text = json.dumps(values, indent=1, allow_nan=False)
        (self.out / f"{self.name}.json").write_text(text)
        (self.out / f"{self.name}.md").write_text("\n".join(map(to_markdown, tables)))

    def by_slots(
        self,
        measure: Callable[[int], dict[str, Any]],
        tables: Sequence[Callable[[int, dict[str, Any]], Table]],
    ) -> None:
        """Measure each number of ``slots``; after each one print its tables, and write all so far.

        Args:
            measure: returns what was measured at so many slots.
            tables: makers of tables of that.
        """
        results: dict[str, Any] = {}
        known: list[Table] = []
        for slots in numbers(self.settings["slots"]):
            results[f"slots_{slots}"] = measured = measure(slots)
            known += (latest := [table(slots, measured) for table in tables])
            print_tables(latest)
            self.write(known, results)


def numbers(text: str) -> list[int]:
    """``1,2`` as numbers."""
    return [int(word) for word in text.split(",")]


def failure(error: Exception) -> str:
    """Type and first sentence of an error; of one without a message, the statement it is from."""
    message = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line or ""
    sentence, _, _ = message.partition("\n")[0].partition(". ")
    return f"{type(error).__name__}: {sentence}"
