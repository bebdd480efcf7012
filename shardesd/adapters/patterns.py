"""The regular expressions in a config, matched without backtracking.

Some take `re` a time that is exponential in the length of a module's name, and `re` knows no time limit: a line in a
file could make a scan last for ever. So a pattern that leaves a choice is taken apart into steps, and every step is
tried once at each place of a name. What a single character or an anchor matches is still `re`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Matcher = Callable[[str], object]
"""A module's name → something true where it matches."""

_MOST = 5000
"""Characters of a pattern, and steps once its counted repeats are written out."""
_CHOICE = re.compile(r"[*+?{|(\[]")
_ANCHOR = re.compile(r"\\[AZbB]|[\^$]")
# Escapes that are one character or class, a set, or a plain character. What `re` warns of in a set (its meaning may
# change) is no part of one here.
_CHARACTER = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSafnrtv]|[^0-9A-Za-z])"
    r"|\[\^?\]?(?:(?!--|&&|~~|\|\|)(?:\\.|[^\]\\\[]))*\]"
    r"|[^\\()\[|*+?^$]",
    re.DOTALL,
)
_REPEAT = re.compile(r"([*+?])\??|\{(?=[0-9,])([0-9]*)(?:(,)([0-9]*))?\}\??")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")

_Place = tuple[int, int]
_Step = Callable[[str, int], "list[_Place]"]
"""(name, position in it) → the steps, and positions, that may come next."""
_Build = Callable[[int], int]
"""The step that comes after a part of a pattern → the part's first step."""
_END = -1


def tail(key: str) -> Matcher:
    """Matches a name, or its tail after a dot, as peft.utils.other.get_pattern_key does. Raises ValueError."""
    return _matcher(key, rf"(.*\.)?({key})$")


def whole(pattern: str) -> Matcher:
    """Matches as `re.fullmatch` does. Raises ValueError with a reason."""
    return _matcher(pattern, rf"(?:{pattern})\Z")


def _matcher(given: str, pattern: str) -> Matcher:
    if len(given) > _MOST:
        raise ValueError(f"it has more than {_MOST:,} characters")
    if _CHOICE.search(given) is None:
        # A module's name, as most are: `re` is faster, and has next to nothing to go back to.
        return _compiled(pattern)
    try:
        parser = _Parser(pattern)
        start = parser.parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return lambda name: _reaches_end(parser.steps, start, name, 0)


def _compiled(pattern: str) -> Callable[..., re.Match[str] | None]:
    try:
        return re.compile(pattern).match
    except re.error as error:
        raise ValueError(str(error)) from None


def _reaches_end(steps: list[_Step], start: int, name: str, at: int) -> bool:
    todo = [(start, at)]
    seen = set(todo)
    while todo:
        step, at = todo.pop()
        if step == _END:
            return True
        for place in steps[step](name, at):
            if place not in seen:
                seen.add(place)
                todo.append(place)
    return False


class _Parser:
    """A pattern → `steps`, built from its end to its start."""

    def __init__(self, pattern: str) -> None:
        self.steps: list[_Step] = []
        self._pattern = pattern
        self._at = 0
        self._ahead = False

    def parse(self) -> int:
        """The first step. Raises ValueError with a reason."""
        build = self._choice()
        if self._at < len(self._pattern):
            raise ValueError("a ')' has no '('")
        return build(_END)

    def _choice(self) -> _Build:
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else lambda then: self._any_of([way(then) for way in ways])

    def _sequence(self) -> _Build:
        parts: list[_Build] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._part())

        def build(then: int) -> int:
            for part in reversed(parts):
                then = part(then)
            return then

        return build

    def _part(self) -> _Build:
        if anchor := self._match(_ANCHOR):
            return self._one(anchor[0])
        if self._take("(?=") or self._take("(?!"):
            return self._repeated(self._look_ahead(self._pattern[self._at - 1] == "="))
        if self._match(_GROUP):
            return self._repeated(self._closed())
        if repeat := self._match(_REPEAT):
            raise ValueError(f"there is nothing that '{repeat[0]}' could repeat")
        if character := self._match(_CHARACTER):
            return self._repeated(self._one(character[0]))
        raise ValueError(f"'{self._pattern[self._at : self._at + 3]}' can't be matched")

    def _closed(self) -> _Build:
        inner = self._choice()
        if not self._take(")"):
            raise ValueError("a '(' has no ')'")
        return inner

    def _look_ahead(self, wanted: bool) -> _Build:
        if self._ahead:  # each multiplies the time that a match may take
            raise ValueError("it looks ahead while looking ahead")
        self._ahead = True
        inner = self._closed()
        self._ahead = False

        def build(then: int) -> int:
            start = inner(_END)
            return self._add(
                lambda name, at: [(then, at)] if _reaches_end(self.steps, start, name, at) == wanted else []
            )

        return build

    def _one(self, text: str) -> _Build:
        match = _compiled(text)

        def step(then: int) -> _Step:
            return lambda name, at: [(then, found.end())] if (found := match(name, at)) else []

        return lambda then: self._add(step(then))

    def _repeated(self, part: _Build) -> _Build:
        repeat = self._match(_REPEAT)
        if repeat is None:
            return part
        sign, low, comma, high = repeat.groups()
        least = int(low or 0) if sign is None else int(sign == "+")
        most = (int(high) if high else None) if comma else {"?": 1, None: least}.get(sign)
        if most is not None and most < least:
            raise ValueError(f"'{repeat[0]}' asks for at least {least} and at most {most}")

        def build(then: int) -> int:
            if most is None:
                ways = [then]
                first = self._any_of(ways)
                ways.append(part(first))
            else:
                first = then
                for _ in range(most - least):
                    first = self._any_of([part(first), then])
            for _ in range(least):
                first = self._any_of([part(first)])
            return first

        return build

    def _any_of(self, ways: list[int]) -> int:
        return self._add(lambda name, at: [(way, at) for way in ways])

    def _add(self, step: _Step) -> int:
        if len(self.steps) == _MOST:
            raise ValueError(f"it takes more than {_MOST:,} steps")
        self.steps.append(step)
        return len(self.steps) - 1

    def _take(self, text: str) -> bool:
        taken = self._pattern.startswith(text, self._at)
        self._at += len(text) if taken else 0
        return taken

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._pattern, self._at)
        self._at = found.end() if found else self._at
        return found
