"""What else stands beside a weight's codes: tensors that might well change it, and those that are known not to."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

_OWN = re.compile(r"(?:(.*?)\.)?((?:_?weight|\w+_quantizer)\..+|[^.]+)")
"""A module and what is its own in it: a parameter, or a part of its weight's or of a quantiser's."""
_HARMLESS = re.compile(
    r"weight|(?!(?:\w+_)?weight_bias$)(?:\w+_)?bias(?:es)?"
    # of what goes in and comes out, and of the cache
    r"|(?:\w+_)?(?:input|output|act|activation)_(?:scale(?:_inv|_ub)?|global_scale|zero_point|offset|g_idx)"
    r"|scale_input|qscale_act|[kqv](?:_cache)?_(?:scale|zero_point|global_scale)|(?:input|output|\w_bmm)_quantizer\._amax"
    r"|_?weight_act_quant_(?:scale|zero_point)"
    # read beforehand, or of use to a kernel alone
    r"|weight_shape|weight_format|comfy_quant|weight\.quant_state\.\w+|(?:\w+_)?g_idx|qzeros|workspace"
    # of a norm
    r"|running_(?:mean|var)|num_batches_tracked"
)


class Beside:
    """The names of all tensors that are known to be there, by the module whose they are."""

    def __init__(self) -> None:
        self._own: dict[str, dict[str, None]] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Takes in names; twice the same does no harm."""
        for name in names:
            found = _OWN.fullmatch(name)
            if found is not None and not _HARMLESS.fullmatch(found[2]):
                self._own.setdefault(found[1] or "", {})[name] = None

    def unknown(self, base: str, weight: str, used: Collection[str]) -> str:
        """The name of what may well change the weight ``base + weight`` and isn't among its parts, `used`; empty where
        there is none."""
        return next((name for name in self._candidates(base, weight) if name not in used), "")

    def _candidates(self, base: str, weight: str) -> Iterator[str]:
        yield from self._own.get(base, ())
        module, _, _ = base.rpartition(".")
        for name in self._own.get(module, ()):
            # Beside a module, another's parameter may begin alike; one that speaks of scales hardly does by chance.
            if name.startswith(f"{base}_") and (not weight or "scal" in name.removeprefix(base)):
                yield name
