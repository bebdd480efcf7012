"""The values of a config, each of the kind that it has to be: what a file says is JSON that nobody vouches for."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shardesd.adapters.patterns import SECONDS, Matcher, tail, whole
from shardesd.errors import MalformedAdapter

CONFIG_NAME = "adapter_config.json"

_MOST = 2**31 - 1
LARGEST = 1e30
"""Of a number: a weight that it scales is to remain one in float32."""

_V = TypeVar("_V")
Patterns = tuple[tuple[Matcher, _V], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A config, or a section of one. What is null or missing is None, or empty; another kind is `MalformedAdapter`."""

    where: str
    """Whose it is, as messages name it."""
    data: Mapping[str, Any] = field(default_factory=dict)
    file: str = CONFIG_NAME
    """Where it stands, as messages name it."""
    section: str = ""
    """Keys in front of these, with their dots."""

    def given(self, key: str) -> bool:
        """Whether the config says anything by this key."""
        return bool(self.data.get(key))

    def text(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value or None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return bool(value)

    def number(self, key: str) -> float | None:
        value = self.data.get(key)
        return None if value is None else self._number(key, value)

    def count(self, key: str, most: int = _MOST) -> int | None:
        """From 1 to `most`."""
        value = self.data.get(key)
        return None if value is None else self._count(key, value, most)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.refusal(key, value, "a list of names")
        return tuple(value)

    def part(self, key: str) -> Values:
        """The object that stands there."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, value, "an object")
        return replace(self, data=value or {}, section=f"{self.section}{key}.")

    def numbers_by_pattern(self, key: str) -> Patterns[float]:
        return self._by_pattern(key, self._number)

    def ranks_by_pattern(self, key: str) -> Patterns[int]:
        return self._by_pattern(key, self._count)

    def pattern(self, key: str, pattern: str, kind: Callable[[str], Matcher] = whole) -> Matcher:
        """What matches by a regular expression of this key. Raises `MalformedAdapter`, as what it gives does."""
        said = f"{self.where}: {reprlib.repr(pattern)} of {self.section}{key} in {self.file}"
        try:
            match = kind(pattern)
        except ValueError as error:
            raise MalformedAdapter(f"{said} is no regular expression: {error}") from None

        def matches(name: str) -> bool:
            try:
                return match(name)
            except TimeoutError:
                raise MalformedAdapter(
                    f"{said} takes more than {SECONDS:.0f} s to match '{name}'; write it without nested repeats"
                ) from None

        return matches

    def refusal(self, key: str, value: Any, expected: str) -> MalformedAdapter:
        """What to raise for a value that is not what was expected."""
        return MalformedAdapter(
            f"{self.where}: {self.section}{key} {reprlib.repr(value)} in {self.file} is invalid (expected {expected})"
        )

    def _by_pattern(self, key: str, kind: Callable[[str, Any], _V]) -> Patterns[_V]:
        section = self.part(key)
        return tuple(
            (self.pattern(key, name, tail), kind(f"{key}.{name}", value)) for name, value in section.data.items()
        )

    def _number(self, key: str, value: Any) -> float:
        # NaN is not below anything, and an int of 400 digits can be compared, but not converted.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise self.refusal(key, value, f"a number below {LARGEST:.0e}")
        return float(value)

    def _count(self, key: str, value: Any, most: int = _MOST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refusal(key, value, f"a whole number from 1 to {most}")
        return value
