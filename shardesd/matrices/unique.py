"""Longnames that are each one tensor's, whatever the tensors are called.

Names can be made to meet: ``m.a`` and ``m.a.weight``; ``c_attn`` cut into ``c_attn_q`` … beside a tensor of that
name; a stack ``experts.w`` beside ``experts.w.experts.1``. Decided by names alone, so that shards and their order don't
count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from shardesd.matrices.names import is_stack, natural_key, parse_name, role

_RESERVED = "__metadata__"
_FUSED = ("qkv", "kv", "gate_up")
_PART = re.compile(r"_(?:q|k|v|kv|z|gate|up|input)$")
_EXPERT = re.compile(r"\.experts\.[0-9]+$")


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Tensor name → what stands in place of its longname, for those whose longname another tensor has, or may have.

    Of such tensors the first in natural order of their full names keeps the longname; a later one is called by its full
    name (``m.a.weight``), with ``#2``, ``#3`` … behind it where that is taken too. No tensor is called what the
    spectra's file, like any safetensors file, keeps for itself.
    """
    longnames = {name: parse_name(name).longname for name in names}
    distinct = set(longnames.values())
    meet = len(distinct) < len(longnames) or any(_part_of(longname, distinct) for longname in distinct)
    if not (meet or _RESERVED in distinct):
        return {}
    taken = {_RESERVED}
    wholes: set[str] = set()
    """What the taken ones would be parts of."""
    found = {}
    for name in sorted(longnames, key=natural_key):
        chosen, number = longnames[name], 1
        while chosen in taken or (chosen in wholes and _is_cut(chosen)) or _part_of(chosen, taken):
            number += 1
            chosen = name if chosen != name and number == 2 else f"{name}#{number}"
        if chosen != longnames[name]:
            found[name] = chosen
        taken.add(chosen)
        wholes.update(_wholes(chosen))
    return found


def _part_of(longname: str, others: Collection[str]) -> bool:
    return any(whole in others and _is_cut(whole) for whole in _wholes(longname))


def _wholes(longname: str) -> Iterator[str]:
    """The longnames of tensors of which `longname` may be a part."""
    without = _PART.sub("", longname)
    for rest in dict.fromkeys((longname, without)):
        if rest != longname:
            yield rest
        if _EXPERT.search(rest):
            yield _EXPERT.sub("", rest)


def _is_cut(longname: str) -> bool:
    return is_stack(longname) or role(longname) in _FUSED
