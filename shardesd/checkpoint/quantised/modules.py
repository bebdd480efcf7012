"""Which stored tensors make up one quantised weight: told by their names, over the headers of all shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardesd.checkpoint.quantised import bitsandbytes, comfy, fp4, packed, scaled
from shardesd.checkpoint.quantised.beside import Beside, owner
from shardesd.checkpoint.quantised.codes import FLOAT8
from shardesd.checkpoint.quantised.encoding import Encoding, Read, Undecodable, decoded, turned
from shardesd.checkpoint.quantised.families import ENDS, FAMILIES, INTEGERS, REFUSED, Family, owners
from shardesd.checkpoint.quantised.settings import Settings, torchao_types
from shardesd.conv1d import is_conv1d
from shardesd.errors import MatrixError
from shardesd.records import TensorRef

_ToCome = Callable[[str], bool]
"""Whether a tensor of this name may be in a shard whose header isn't known yet."""
_MOST_GROUP_BYTES = 1 << 20
_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
"""torchao's tensors that keep one code an element."""
_UNNAMED = tuple(family for family in FAMILIES if family.codes in ("", ".weight"))
"""Whose codes are called as any weight is."""
_CODES = tuple(family.codes for family in FAMILIES if family not in _UNNAMED)
_WORDS_OF = ("", "unknown", "gptq", "awq")
_WORDS_ARE = "only gptq's and awq's are, and auto-round's in their formats"


class Modules:
    """Gathers headers as they come, and gives the tensors that a scan sees: weights as they are when decoded."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the model's config.json."""
        self._settings = Settings(config)
        self._stored: dict[str, TensorRef] = {}
        self._waiting: list[TensorRef] = []
        self._crossing: set[str] = set()
        self._types: dict[str, str] = {}
        self._comfy: dict[str, Any] = {}
        self._beside = Beside()
        self._promised: Collection[str] | None = None
        """Names that have been taken in already."""
        self._model_type = config.get("model_type")

    def learn(
        self,
        tensors: Iterable[TensorRef],
        read: Read,
        *,
        promised: Collection[str] | None,
        complete: bool,
        metadata: Mapping[str, str] | None = None,
    ) -> list[TensorRef]:
        """The tensors that are known for good once the header of one more shard is: its own, and those of earlier
        shards that lacked a part till now.

        `promised` are the names that an index lists, None without one; `complete`: no more shards follow. `read` is
        used on small parts alone, whose content says how the others are laid out; where it raises, nothing has been
        learned. `metadata` is the header's.
        """
        self._types.update(torchao_types(metadata or {}))
        self._comfy.update(comfy.layers(metadata or {}))
        new = list(tensors)
        self._stored.update((tensor.name, tensor) for tensor in new)
        self._beside.learn(tensor.name for tensor in new)
        if promised is not None and promised is not self._promised:
            self._promised = promised
            self._beside.learn(promised)
        before = self._waiting
        todo, self._waiting = [*before, *new], []

        def to_come(name: str) -> bool:
            return name not in self._stored and not complete and (promised is None or name in promised)

        try:
            found = [
                self._undistorted(seen)
                for tensor in todo
                if not self._is_transform(tensor.name)
                for seen in self._judge(tensor, read, to_come, complete)
            ]
        except BaseException:
            self._waiting = before
            for tensor in new:
                self._stored.pop(tensor.name, None)
            raise
        for seen in found:
            if seen.encoding is not None and len(shards := {part.shard for part in seen.encoding.parts}) > 1:
                self._crossing |= shards
        return found

    def is_needed_later(self, shard: str) -> bool:
        """Whether a tensor that this shard holds a part of lacks another part, or has one in another shard."""
        return shard in self._crossing or any(tensor.shard == shard for tensor in self._waiting)

    def _is_transform(self, name: str) -> bool:
        """Whether a tensor is the matrix of one of compressed-tensors' transforms, a part of another weight."""
        if not self._settings.transforms:
            return False
        module, _, leaf = name.rpartition(".")
        return leaf == "weight" and module.rpartition(".")[2] in self._settings.transforms

    def _undistorted(self, tensor: TensorRef) -> TensorRef:
        """A tensor, refused where it may be a weight that was multiplied by what is no rotation."""
        how = self._settings.distorts
        if not how or len(tensor.shape) < 2 or tensor.problem:
            return tensor
        return replace(tensor, problem=f"weights were multiplied by the transform {how}, which is no rotation")

    def _judge(self, tensor: TensorRef, read: Read, to_come: _ToCome, complete: bool) -> Iterator[TensorRef]:
        if tensor.encoding is not None or tensor.problem:  # the file's own format knows better
            yield tensor
            return
        if tensor.name.endswith(ENDS):
            for family, base in owners(tensor.name):
                codes = self._stored.get(base + family.codes)
                if codes is not None and self._is_codes(codes, family, base, to_come):
                    return
                if to_come(base + family.codes):
                    self._waiting.append(tensor)
                    return
        found = self._family(tensor, to_come)
        if found is None or not found[0].weight:
            if self._stands_by_codes(tensor, lambda _: False):
                yield replace(tensor, problem="it stands beside a weight's codes, and may be a part of that weight")
                return
            # Nothing is waited for on mere suspicion, where it isn't known what the other shards hold.
            if (found is not None or self._promised is not None) and self._stands_by_codes(tensor, to_come):
                self._waiting.append(tensor)
                return
        if found is None and self._may_be_cast(tensor):
            if complete:
                yield replace(decoded(scaled.plain(tensor), tensor.name), shape=tensor.shape)
            else:
                self._waiting.append(tensor)
            return
        if found is None:
            yield tensor
            return
        family, base = found
        if any(to_come(base + end) for end in family.others):
            self._waiting.append(tensor)
            return
        parts = {end: part for end in family.others if (part := self._stored.get(base + end)) is not None}
        try:
            encoding = self._encoding(family, tensor, parts, read)
            if encoding is not None:
                self._check_alone(encoding, family, base)
        except (Undecodable, MatrixError) as error:
            if complete:
                why = f"quantised weight can't be decoded: {error}"
                yield replace(tensor, name=family.name(base), problem=why)
            else:  # an index need not list all that its shards hold
                self._waiting.append(tensor)
            return
        if encoding is None:
            yield tensor
        elif not parts and not complete:
            self._waiting.append(tensor)
        else:
            if family.kind == "words" or isinstance(encoding, bitsandbytes.Blockwise4) or ".SCB" in parts:
                # Whose layers are linear ones, whatever the model's own are.
                encoding = turned(encoding) if is_conv1d(family.name(base), self._model_type) else encoding
            seen = decoded(encoding, family.name(base))
            kernel = len(tensor.shape) > 2 and seen.numel == tensor.numel and family.kind == "codes"
            yield replace(seen, shape=tensor.shape) if kernel else seen

    def _may_be_cast(self, tensor: TensorRef) -> bool:
        """Whether it is FP8 of one dimension (a norm, a bias) that nothing known is the scale of."""
        if tensor.dtype not in FLOAT8 or len(tensor.shape) != 1 or not tensor.numel or self._settings.method:
            return False
        for family in _UNNAMED:
            base = tensor.name.removesuffix(family.codes)
            if tensor.name.endswith(family.codes) and (
                any(base + end in self._stored for end in family.others)
                or any(name != tensor.name for name in self._beside.of(base, family.weight))
            ):
                return False
        return True

    def _stands_by_codes(self, tensor: TensorRef, to_come: _ToCome) -> bool:
        """Whether a matrix is a part of a weight whose codes are there, or may be, whatever its name."""
        module = owner(tensor.name) if len(tensor.shape) > 1 else None
        if module is None:
            return False
        for family in FAMILIES:
            name = module + family.codes
            codes = self._stored.get(name)
            if family.weight and (to_come(name) if codes is None else self._is_codes(codes, family, module, to_come)):
                return True
        return False

    def _family(self, tensor: TensorRef, to_come: _ToCome) -> tuple[Family, str] | None:
        for family in FAMILIES if tensor.name.endswith(_CODES) else _UNNAMED:
            if tensor.name.endswith(family.codes):
                base = tensor.name.removesuffix(family.codes)
                if family.names(base) and self._is_codes(tensor, family, base, to_come):
                    return family, base
        return None

    def _is_codes(self, tensor: TensorRef, family: Family, base: str, to_come: _ToCome) -> bool:
        # What most tensors fail by comes first: there are tens of thousands.
        if family.kind == "codes":
            if len(tensor.shape) < 2:
                return False
            if tensor.dtype in family.dtypes:
                return True
            # bitsandbytes' 4-bit codes lie in words of any type
            states = (base + end for end in family.others if ".quant_state." in end)
            return tensor.shape[-1] == 1 and any(state in self._stored or to_come(state) for state in states)
        if family.dtypes and tensor.dtype not in family.dtypes:
            return False
        if family.kind in REFUSED:
            mask = self._stored.get(base + ".bitmask") if family.kind == "sparse" else None
            if len(tensor.shape) != 2 or (mask is not None and mask.dtype != "U8"):
                return False
        return all(base + end in self._stored or to_come(base + end) for end in family.needs)

    def _check_alone(self, encoding: Encoding, family: Family, base: str) -> None:
        """Raises `Undecodable` where something stands beside a weight that may change it and isn't decoded with it."""
        codes, *others = encoding.parts
        used = {part.name for part in others}
        for name in self._beside.of(base, family.weight):
            part = self._stored.get(name)
            # A parameter that is called alike, as LTX-2's scale_shift_table_a2v is.
            alike = (
                part is not None and part.dtype == codes.dtype and len(part.shape) > 1 and name.startswith(f"{base}_")
            )
            if name not in used and name != codes.name and not alike:
                raise Undecodable(f"what '{name}' does to it isn't known")

    def _encoding(self, family: Family, codes: TensorRef, parts: dict[str, TensorRef], read: Read) -> Encoding | None:
        """How the weight is decoded; None for a tensor that is none of a quantised weight. Raises `Undecodable`."""
        kind = family.kind
        if kind in REFUSED:
            raise Undecodable(REFUSED[kind])
        if kind == "words":
            return self._words(codes, parts)
        if kind == "packed":
            return self._packed(codes, {end.removeprefix(".weight_"): part for end, part in parts.items()}, read)
        if kind == "blocks":
            return fp4.gpt_oss(codes, parts["_scales"])
        if kind == "torchao":
            kind = self._types.get(family.name(codes.name.removesuffix(family.codes)), "unknown tensor")
            if kind not in _TORCHAO:
                raise Undecodable(f"torchao's {kind} is not supported (only {', '.join(_TORCHAO)} are)")
            scale, zero = (f"{family.codes.removesuffix('qdata')}{end}" for end in ("scale", "zero_point"))
            return scaled.scaled(codes, _required(parts, scale), zero=parts.get(zero))
        prefix = family.weight or "_weight"  # ModelOpt's experts have X_weight_scale beside X
        return self._codes(codes, {end.removeprefix(prefix): part for end, part in parts.items()}, read)

    def _words(self, codes: TensorRef, parts: dict[str, TensorRef]) -> Encoding:
        scale, zero, group_of = _required(parts, ".scales"), _required(parts, ".qzeros"), parts.get(".g_idx")
        settings = self._settings
        if settings.method not in _WORDS_OF:
            raise Undecodable(f"qweight of quant_method '{settings.method}' is not supported ({_WORDS_ARE})")
        if len(codes.shape) != 2 or len(scale.shape) != 2:
            raise Undecodable(f"qweight has {len(codes.shape)} dimensions, scales {len(scale.shape)}")
        if settings.method == "awq" or (settings.method != "gptq" and codes.shape[1] != scale.shape[1]):
            if settings.layout not in ("", "gemm", "exllama", "ipex"):
                raise Undecodable(f"AWQ's '{settings.layout}' layout is not supported (only gemm is)")
            return packed.awq(codes, scale, zero)
        if settings.layout not in ("", "gptq", "gptq_v2"):
            raise Undecodable(f"GPTQ's '{settings.layout}' layout is not supported (only gptq and gptq_v2 are)")
        v2 = settings.layout == "gptq_v2"
        return packed.gptq(codes, scale, zero, group_of, v2=v2, group_size=settings.group_size)

    def _packed(self, codes: TensorRef, parts: dict[str, TensorRef], read: Read) -> Encoding:
        scale = _required(parts, "scale")
        if codes.dtype == "U8":
            if any(kind.startswith("mx_int") for kind in self._settings.data_types):
                raise Undecodable("auto-round's MXINT is not supported")
            if "zero_point" in parts or "g_idx" in parts:
                raise Undecodable("4-bit floats with zero points or groups of their own are not supported")
            return fp4.packed(codes, scale, factor=parts.get("global_scale"), divides=True)
        content = _content(_required(parts, "shape"), read)
        zero, index, bits = parts.get("zero_point"), parts.get("g_idx"), self._settings.bits
        return packed.compressed(codes, scale, zero, index, shape=content, bits=bits, read=read)

    def _codes(self, codes: TensorRef, parts: dict[str, TensorRef], read: Read) -> Encoding | None:
        state = next((part for end, part in parts.items() if end.startswith(".quant_state")), None)
        if state is not None:
            content = _bytes(state, read, bitsandbytes.MAX_STATE_BYTES)
            rest = {end.removeprefix("."): part for end, part in parts.items()}
            return bitsandbytes.blockwise4(codes, rest, content)
        if ".comfy_quant" in parts:
            comfy.check(_bytes(parts[".comfy_quant"], read, comfy.MAX_BYTES))
        if (said := comfy.of(codes.name.removesuffix(".weight"), self._comfy)) is not None:
            comfy.check(said)
        if ".SCB" in parts:
            order = _content(parts["_format"], read) if "_format" in parts else (0,)
            if codes.dtype != "I8" or order != (0,):
                raise Undecodable(f"bitsandbytes' int8 in {codes.dtype} and order {order} is not supported")
            return scaled.bnb_int8(codes, parts[".SCB"])
        ends = ("_scale_inv", "_scale", ".scale", ".scale_weight", ".qscale_weight")
        scales = [parts[end] for end in ends if end in parts]
        if len(scales) > 1:
            raise Undecodable(f"it has several scales: {', '.join(scale.name for scale in scales)}")
        factor, zero = parts.get("_scale_2"), parts.get("_zero_point")
        if scales and codes.dtype == "U8":
            if zero is not None:
                raise Undecodable("packed U8 codes with zero points are not supported")
            packed4 = fp4.packed(codes, scales[0], factor=factor)
            _check_order(parts, packed4.shape[-1], packed4.shape[-1] // scales[0].shape[-1], read)
            return packed4
        if codes.dtype == "I8" and self._settings.own_bits not in (0, 8):
            raise Undecodable(f"ChatGLM's own {self._settings.own_bits} bits (quantization_bit) are not supported")
        if scales:
            says, sizes = self._settings.scales_are, self._settings.blocks
            if says not in ("", "inverse"):
                raise Undecodable(f"weight_scale_semantics '{says}' is not supported (only inverse is)")
            grid = scaled.scaled(codes, scales[0], zero=zero, factor=factor, sizes=sizes, divides=says == "inverse")
            _check_order(parts, grid.shape[-1], grid.block[1], read)
            return grid
        if codes.dtype not in FLOAT8:
            return None
        if self._settings.method:
            raise Undecodable(f"{codes.dtype} codes of quant_method '{self._settings.method}' without scales")
        return scaled.plain(codes)


def _check_order(parts: Mapping[str, TensorRef], inputs: int, group: int, read: Read) -> None:
    """Raises `Undecodable` where inputs are said to be in other groups than `group` after `group` of them.

    They are in those where nothing is said (-1).
    """
    index = parts.get("_g_idx")
    if index is None:
        return
    if index.dtype in INTEGERS and index.numel == inputs and index.nbytes <= _MOST_GROUP_BYTES:
        with read(index) as raw:
            values = raw.reshape(-1).astype(np.int64)
        if (values < 0).all() or (values == np.arange(inputs) // group).all():
            return
    raise Undecodable(f"its groups are not of {group} inputs each, in order ('{index.name}')")


def _required(parts: Mapping[str, TensorRef], end: str) -> TensorRef:
    part = parts.get(end)
    if part is None:
        raise Undecodable(f"its {end.lstrip('._')} is missing")
    return part


def _bytes(tensor: TensorRef, read: Read, most: int) -> bytes:
    """What a small tensor of bytes holds."""
    if tensor.dtype != "U8" or tensor.nbytes > most:
        raise Undecodable(f"'{tensor.name}' is {tensor.dtype} of {tensor.nbytes} bytes")
    with read(tensor) as raw:
        return raw.tobytes()


def _content(tensor: TensorRef, read: Read) -> tuple[int, ...]:
    """The integers of a tiny tensor."""
    if tensor.dtype not in INTEGERS or not 0 < tensor.numel <= 8:
        raise Undecodable(f"'{tensor.name}' is {tensor.dtype} of shape {tensor.shape}")
    with read(tensor) as raw:
        return tuple(int(value) for value in raw.reshape(-1))
