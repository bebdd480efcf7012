"""The regular expressions in a config, matched within a limit of time.

Some take `re` a time that is exponential in the length of a module's name: a line in a file could make a scan last for
ever. The package regex, which understands the same, gives up when it is told to.
"""

from __future__ import annotations

from collections.abc import Callable

Matcher = Callable[[str], bool]
"""A module's name → whether it matches. Raises TimeoutError after `SECONDS`."""

SECONDS = 2.0


def tail(key: str) -> Matcher:
    """Matches a name, or its tail after a dot, as peft.utils.other.get_pattern_key does. Raises ValueError."""
    return _matcher(rf"(.*\.)?({key})$")


def whole(pattern: str) -> Matcher:
    """Matches as `re.fullmatch` does. Raises ValueError with a reason."""
    return _matcher(rf"(?:{pattern})\Z")


def _matcher(pattern: str) -> Matcher:
    import regex  # few adapters have any

    try:
        match = regex.compile(pattern).match
    except regex.error as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return lambda name: match(name, timeout=SECONDS) is not None
