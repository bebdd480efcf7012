"""A live `torch.nn.Module` or a state dict as a checkpoint of one shard, in memory."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardesd.checkpoint import quantised
from shardesd.checkpoint.elements import TORCH_WORDS, raw_dtype
from shardesd.checkpoint.header import DTYPE_BITS
from shardesd.errors import MatrixError, NotFound, NoWeights, OptionError
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    import torch

    from shardesd.source.base import Progress

_SHARD = "memory"
_SAMPLED_ELEMENTS = 4096
"""Of each tensor, for `LiveCheckpoint.identity`."""


def open_live(model: torch.nn.Module | Mapping[str, torch.Tensor], name: str | None = None) -> LiveCheckpoint:
    """A checkpoint over tensors in memory; nothing is copied until it is read, and then one tensor at a time.

    `name` becomes the model_id, instead of the config's name_or_path or the class's name. Tensors that are the same
    memory are in `ties`. numpy arrays will do too. Raises `OptionError` for anything but a module or a mapping,
    `NoWeights` where it holds no tensor.
    """
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(model, torch.nn.Module | Mapping):
        raise OptionError(f"expected a repo, a torch.nn.Module or a state dict, not {type(model).__name__}")
    state: Mapping[str, Any]
    if isinstance(model, torch.nn.Module):
        module: torch.nn.Module | None = model
        _check_unpacked(model)
        # keep_vars: the parameters themselves, so that a tied one is seen to be the same memory.
        state = model.state_dict(keep_vars=True)
    else:
        module, state = None, model
    config, model_id = _describe(module)
    model_id = name or model_id
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, list[str]] = {}
    for key, value in state.items():
        tensor = _as_tensor(value)
        if tensor is not None and isinstance(key, str) and not is_lazy(tensor):
            tensors[key] = tensor
        else:
            others.setdefault(_why_ignored(key, value, tensor), []).append(repr(key))
    notes = tuple(
        f"ignored {', '.join(keys[:5])}{' and more' if len(keys) > 5 else ''}: {why}" for why, keys in others.items()
    )
    if not tensors:
        raise NoWeights("; ".join([f"{model_id} holds no tensors under names", *notes]))
    hints = _hints(module) if module is not None else {}
    return LiveCheckpoint(model_id, tensors, config=config, hints=hints, notes=notes)


class LiveSource:
    """The `source.Source` of what is no file."""

    revision: str | None = None
    commit: str | None = None
    partial = False
    file: str | None = None

    def __init__(self, model_id: str, nbytes: int) -> None:
        self.model_id = model_id
        self.location = _SHARD
        self._shard = ShardRef(name=_SHARD, size=nbytes)

    def files(self) -> tuple[ShardRef, ...]:
        """The one pseudo-shard."""
        return (self._shard,)

    def local(self, name: str) -> Path | None:
        """A path that stands for the pseudo-shard; there is no such file."""
        return Path(name) if name == _SHARD else None

    def remote(self, name: str) -> None:
        """There is no server."""

    def cost(self, name: str) -> int:
        """Nothing: there are no files."""
        return 0

    def free(self) -> None:
        """Of no interest: nothing is downloaded."""

    def evict(self, name: str) -> None:
        """Nothing was downloaded."""

    def remove_unfinished(self, name: str) -> None:
        """Nothing was downloaded."""

    def path(self, name: str, progress: Progress | None = None) -> Path:
        """As `local`; raises `NotFound` for any other name."""
        if name != _SHARD:
            raise NotFound(f"{self.model_id} is in memory: there is no file '{name}'")
        return Path(name)


class LiveShard:
    """All tensors of a live model: a `Shard`."""

    def __init__(
        self, ref: ShardRef, stored: tuple[TensorRef, ...], values: Mapping[str, torch.Tensor], header_sha256: str
    ) -> None:
        """`stored`: the tensors as they lie in memory."""
        self.ref = ref
        self.path = Path(ref.name)
        self.nbytes = ref.size or 0
        self.metadata: dict[str, str] = {}
        self.header_sha256 = header_sha256
        self.on_server = False
        self._starts = {tensor.name: tensor.start for tensor in stored}
        self._values = values
        self.tensors = stored

    @contextmanager
    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `Shard.read`. A tensor that lies contiguous in main memory is not copied."""
        import torch

        if tensor.encoding is not None:
            yield quantised.elements(tensor, self.read, into)
            return
        value = self._values[tensor.name]
        why = _unreadable(value)
        if why is None and tensor.dtype not in DTYPE_BITS:
            why = f"elements of {value.dtype} can't be read"
        if why:
            raise MatrixError(f"tensor '{tensor.name}': {why}")
        start = tensor.start - self._starts[tensor.name]
        data = _flat(value).view(torch.uint8)[start : start + tensor.nbytes].cpu().numpy()
        yield data.view(raw_dtype(tensor.dtype)).reshape(tensor.shape)

    def delta(self, tensor: TensorRef) -> str:
        """See `Shard.delta`."""
        return ""

    def in_blocks(self, tensor: TensorRef) -> bool:
        """False: it is in memory already, and a part of it may cost a copy from a device."""
        return False

    def factors(self, tensor: TensorRef) -> None:
        """None."""
        return

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> LiveShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class LiveCheckpoint:
    """Tensors in memory as one pseudo-shard; made by `open_live`. A `Checkpoint`."""

    complete = True
    distinct: frozenset[str] = frozenset()

    def __init__(
        self,
        model_id: str,
        values: Mapping[str, torch.Tensor],
        *,
        config: dict[str, Any],
        hints: Mapping[str, str],
        notes: tuple[str, ...],
    ) -> None:
        self.config = config
        self.ties = _ties(values, hints)
        self.notes = notes
        self.values = values
        """Tensor name → the tensor itself."""
        self._tensors: tuple[TensorRef, ...] = ()
        self._stored = _references(values, self.ties)
        self.source = LiveSource(model_id, max(tensor.end for tensor in self._stored))
        self.shards = self.source.files()
        shard = self.open(self.shards[0], Path(_SHARD))
        modules = quantised.Modules(config)
        self._tensors = tuple(modules.learn(self._stored, shard.read, promised=None, complete=True))
        turned = {one.name: "conv1d" for one in self._tensors if isinstance(one.encoding, quantised.Turned)}
        self.hints = {**hints, **turned}  # as the model keeps them, not as its quantised module does
        self.names = frozenset(tensor.name for tensor in self._tensors)

    def close(self) -> None:
        """Nothing to let go of."""

    def tensors(self) -> tuple[TensorRef, ...]:
        """See `Checkpoint.tensors`; those in `ties` have the bytes of the tensor they repeat."""
        return self._tensors

    def is_needed_later(self, shard: str) -> bool:
        """See `Checkpoint.is_needed_later`; there is one shard only."""
        return False

    def open(self, shard: ShardRef, path: Path) -> LiveShard:
        """See `Checkpoint.open`; there is one shard only, and no file."""
        live = LiveShard(shard, self._stored, self.values, self._header_sha256())
        live.tensors = self._tensors
        return live

    def peek(self, shard: ShardRef) -> None:
        """See `Checkpoint.peek`: there is no server."""

    def identity(self) -> dict[str, Any]:
        """See `Checkpoint.identity`: by a sample of the elements of every tensor, so that a training step shows."""
        import torch

        sample = hashlib.sha256()
        for name, value in self.values.items():
            if name not in self.ties and _unreadable(value) is None:
                flat = _flat(value)[:: max(1, value.numel() // _SAMPLED_ELEMENTS)]
                sample.update(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return {"model_id": self.source.model_id, "tensors": self._header_sha256(), "sample": sample.hexdigest()}

    def digests(self) -> dict[str, dict[str, Any]]:
        """See `Checkpoint.digests`."""
        shard = self.shards[0]
        return {shard.name: {"size": shard.size, "sha256": None, "header_sha256": self._header_sha256()}}

    def _header_sha256(self) -> str:
        lines = (f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\n" for tensor in self._stored)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _check_unpacked(module: torch.nn.Module) -> None:
    """Raises `OptionError` where bitsandbytes has packed 4-bit weights anew for the CPU, as a forward pass does where
    it has AVX512-BF16: its state_dict() would unpack them wrongly, and keep that in the caller's model."""
    for name, value in module.named_parameters():
        if getattr(getattr(value, "quant_state", None), "packing_format_for_cpu", False):
            raise OptionError(f"'{name}' was packed anew by bitsandbytes when the model ran on the CPU: load it anew")


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or a numpy array as one (the same memory); None for anything else."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, np.ndarray):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an array is read-only: nothing is written to it
            return torch.from_numpy(value)
    except (TypeError, ValueError):
        return None


def _why_ignored(key: Any, value: Any, tensor: torch.Tensor | None) -> str:
    if tensor is not None:
        return "not initialised" if isinstance(key, str) else f"names must be strings, not {type(key).__name__}"
    if isinstance(value, Mapping) and any(_as_tensor(inner) is not None for inner in value.values()):
        return "it is a dict of tensors itself; pass that one"
    if isinstance(value, np.ndarray):
        return f"torch can't take this array of {value.dtype}"
    return "no tensor"


def _describe(module: torch.nn.Module | None) -> tuple[dict[str, Any], str]:
    """A module's config as a dict, and what to call it."""
    config: Any = getattr(module, "config", None)
    as_dict = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    values = dict(as_dict) if isinstance(as_dict, Mapping) else {}
    for candidate in (getattr(config, "name_or_path", None), values.get("_name_or_path"), values.get("name_or_path")):
        if isinstance(candidate, str) and candidate:
            path = Path(candidate)
            return values, path.name if path.is_absolute() or candidate.startswith(".") else candidate
    return values, "state_dict" if module is None else type(module).__name__


def _hints(module: torch.nn.Module) -> dict[str, str]:
    hints = {}
    for path, part in module.named_modules(remove_duplicate=False):
        kind = _kind(part)
        if kind:
            for name, _ in part.named_parameters(recurse=False, remove_duplicate=False):
                hints[f"{path}.{name}" if path else name] = kind
    return hints


def _kind(module: torch.nn.Module) -> str | None:
    from torch import nn

    name = type(module).__name__
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if name == "Conv1D" or isinstance(module, nn.Conv1d | nn.ConvTranspose1d):  # Conv1D: transformers' linear layer
        return "conv1d"
    if isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return "conv"
    return "norm" if "Norm" in name else None


def _ties(values: Mapping[str, torch.Tensor], hints: Mapping[str, str]) -> dict[str, str]:
    """Tensors that are the same memory, seen in the same way. The one that stands for the others is an embedding, if
    there is one (as in files, where the head is the copy), or else the first."""
    groups: dict[Any, list[str]] = {}
    for name, value in values.items():
        plain = _unreadable(value) is None and value.numel() > 0
        key = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride()) if plain else id(value)
        groups.setdefault(key, []).append(name)
    ties = {}
    for names in groups.values():
        original = next((name for name in names if hints.get(name) == "embedding"), names[0])
        ties.update({name: original for name in names if name != original})
    return ties


def _references(values: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> tuple[TensorRef, ...]:
    """As if the tensors lay one behind the other in a file."""
    at = 0
    ranges: dict[str, tuple[int, int]] = {}
    for name, value in values.items():
        if name not in ties:
            ranges[name] = (at, at := at + value.numel() * value.element_size())
    references = []
    for name, value in values.items():
        word = str(value.dtype).removeprefix("torch.")
        start, end = ranges[ties.get(name, name)]
        references.append(
            TensorRef(
                name=name,
                dtype=TORCH_WORDS.get(word, word.upper()),
                shape=_shape(value),
                shard=_SHARD,
                start=start,
                end=end,
            )
        )
    return tuple(references)


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    """That of a nested tensor is what it would be if it were padded."""
    if not value.is_nested:
        return tuple(value.shape)
    parts = [tuple(part.shape) for part in value.unbind()]
    return len(parts), *(max(sides) for sides in zip(*parts, strict=True))


def _unreadable(value: torch.Tensor) -> str | None:
    """Why a tensor's elements aren't plain memory, or None."""
    import torch

    kind = type(value)
    if value.is_nested:
        return "it is nested: give its parts under names of their own"
    if value.is_meta:
        return "it is on the meta device and holds no numbers: load the weights first"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__} is not plain memory: dequantize or gather it first"
    if value.is_quantized:
        return f"it is quantised ({value.dtype}): dequantize it first"
    if value.layout != torch.strided:
        return f"it is sparse ({value.layout}): call to_dense() first"
    return None


def _flat(value: torch.Tensor) -> torch.Tensor:
    """The elements in C order, as one dimension; a view where they lie so already."""
    return value.detach().resolve_conj().resolve_neg().reshape(-1)
