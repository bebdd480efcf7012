"""What else stands beside a weight's codes: tensors that might well change it, and those that are known not to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_OWN = re.compile(r"(?:(.*?)\.)?((?:_?weight|\w+_quantizer)\..+|[^.]+)")
"""A module and what is its own in it: a parameter, or a part of its weight's or of a quantiser's."""
_HARMLESS = re.compile(
    r"weight|(?!(?:\w+_)?weight_bias$)(?:\w+_)?bias(?:es)?"
    # of what goes in and comes out, and of the cache
    r"|(?:\w+_)?(?:input|output|act|activation|bias)_(?:scale(?:_inv|_ub)?|global_scale|zero_point|offset|g_idx)"
    r"|scale_input|(?:\w+_quantizer\.)?qscale_act|[kqv](?:_cache)?_(?:scale|zero_point|global_scale)"
    r"|(?:input|output|\w_bmm)_quantizer\._amax|_?weight_act_quant_(?:scale|zero_point)"
    # read beforehand, or of use to a kernel alone
    r"|weight_shape|weight_format|comfy_quant|weight\.quant_state\.\w+|(?:\w+_)?g_idx|qzeros|workspace"
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
        self._own: dict[str, dict[str, None]] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Takes in names; twice the same does no harm."""
        for name in names:
            module = owner(name)
            if module is not None:
                self._own.setdefault(module, {})[name] = None

    def of(self, base: str, weight: str) -> Iterator[str]:
        """The names of what may well change the weight ``base + weight``, its parts among them."""
        yield from self._own.get(base, ())
        module, _, _ = base.rpartition(".")
        for name in self._own.get(module, ()):
            # Beside a module, another's parameter may begin alike; one that speaks of scales hardly does by chance.
            if name.startswith(f"{base}_") and (not weight or "scal" in name.removeprefix(base)):
                yield name
