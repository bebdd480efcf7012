"""What else stands beside a weight's codes: tensors that might well change it, and those that are known not to."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator

_OWN = re.compile(r"(?:(.*?)\.)?((?:_?weight|\w+_quantizer)\..+|[^.]+)")
"""A module and what is its own in it: a parameter, or a part of its weight's or of a quantiser's."""
_HARMLESS = re.compile(
    r"weight|(?!(?:\w+_)?weight_bias$)(?:\w+_)?bias(?:es)?"
    # of what goes in and comes out, and of the cache
    r"|(?:\w+_)?(?:input|output|act|activation|bias)_(?:scale(?:_inv|_ub)?|global_scale|zero_point|offset|g_idx)"
    r"|(?:input|output|act)_(?:a?max|min)|scale_input|in_scale|deq_scale|prob_scale|(?:\w+_quantizer\.)?qscale_act"
    r"|(?:[kqv]|kv)(?:_cache)?_(?:scale|zero_point|offset|global_scale)"
    r"|(?:input|output|\w_bmm)_quantizer\._amax|\w+_act_quant_(?:scale|zero_point)"
    # read beforehand, or of use to a kernel alone
    r"|weight_shape|weight_format|comfy_quant|weight\.quant_state\.\w+|(?:\w+_)?g_idx|qzeros|workspace"
    r"|_extra_state"
    # of a norm, of a router
    r"|running_(?:mean|var)|num_batches_tracked|tid2eid"
)


def owner(name: str) -> str | None:
    """The module whose weight a tensor of this name may change; None where it is known that it doesn't."""
    if name.endswith((".weight", ".bias")) and ".weight." not in name and "_quantizer." not in name:
        return None  # as of nearly all
    found = _OWN.fullmatch(name)
    return None if found is None or _HARMLESS.fullmatch(found[2]) else found[1] or ""


class Beside:
    """The names of all tensors that are known to be there, by the module whose they are."""

    def __init__(self) -> None:
        self._own: dict[str, set[str]] = {}
        self._sorted: dict[str, list[str]] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Takes in names; twice the same does no harm."""
        for name in names:
            module = owner(name)
            if module is not None:
                self._own.setdefault(module, set()).add(name)
                self._sorted.pop(module, None)

    def of(self, base: str, weight: str) -> Iterator[str]:
        """The names of what may well change the weight ``base + weight``, its parts among them."""
        yield from self._in_order(base)
        names, begins = self._in_order(base.rpartition(".")[0]), f"{base}_"
        for at in range(bisect_left(names, begins), len(names)):
            name = names[at]
            if not name.startswith(begins):
                return
            # Beside a module, another's parameter may begin alike; one that speaks of scales hardly does by chance.
            if not weight or "scal" in name.removeprefix(base):
                yield name

    def _in_order(self, module: str) -> list[str]:
        found = self._sorted.get(module)
        if found is None:
            found = self._sorted[module] = sorted(self._own.get(module, ()))
        return found
