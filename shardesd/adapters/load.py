"""An adapter as files: which they are, what they say, and their tensors one at a time."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from shardesd.adapters.config import AdapterConfig, parse_config
from shardesd.adapters.names import looks_like_adapter
from shardesd.adapters.values import CONFIG_NAME
from shardesd.checkpoint import StoredMatrix, StoredShard, is_integer, open_shard
from shardesd.errors import AdapterError, MalformedAdapter, MatrixError, UnsupportedAdapter
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    import torch

    from shardesd.source import Source

SAFETENSORS = ("adapter_model.safetensors", "adapters.safetensors", "pytorch_lora_weights.safetensors")
PICKLES = ("adapter_model.bin", "pytorch_lora_weights.bin")
_WORDS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
_METADATA = "lora_adapter_metadata"


@dataclass(slots=True, kw_only=True)
class Adapter:
    """One adapter: its config, its tensors' headers, and a way to read them."""

    name: str
    """As messages name it: the source's model id, with the subfolder where there is one."""
    config: AdapterConfig
    tensors: tuple[TensorRef, ...]
    source: Source | None = None
    file: str = ""
    path: Path | None = None
    _sha256: str | None = None
    _values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _shard: StoredShard | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def digest(self) -> str | None:
        """sha256 of the weights' file; None for tensors that were never in one."""
        if self._sha256 is None and self.path is not None:
            with self.path.open("rb") as file:
                self._sha256 = _sha256(file)
        return self._sha256

    def read(self, tensor: TensorRef) -> np.ndarray:
        """One tensor's elements, float32 (float64 where they are stored so), in its own shape.

        Raises `MatrixError` where it holds NaN or infinity.
        """
        if tensor.name in self._values:
            values = _numbers(self._values[tensor.name])
        else:
            with self._open().read(tensor) as raw:
                if is_integer(tensor.dtype):  # a batch norm's counter, saved with its module
                    return raw.astype(np.float64)
                wide = np.dtype(np.float64 if tensor.dtype == "F64" else np.float32)
                flat = raw.reshape(1, -1)
                values = StoredMatrix(flat, tensor.dtype).block(0, 0, 1, wide).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise MatrixError(f"adapter {self.name}: {tensor.name} holds NaN or infinity")
        return values

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._shard is not None:
                self._shard.close()
                self._shard = None

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self) -> StoredShard:
        with self._lock:
            if self._shard is None:
                if self.path is None:
                    raise MalformedAdapter(f"{self.name}: its tensors are in no file")
                self._shard = open_shard(ShardRef(name=self.file), self.path)
            return self._shard


def is_adapter(files: Iterable[str]) -> bool:
    """Whether a place with these file names is an adapter: it has one's config or weights, and no model's weights."""
    top = {name for name in files if "/" not in name}
    marks = {CONFIG_NAME, *SAFETENSORS, *PICKLES} - {"adapters.safetensors"}
    weights = {
        name
        for name in top
        if (name.endswith(".safetensors") and name not in SAFETENSORS)
        or (name.startswith("pytorch_model") and name.endswith(".bin"))
    }
    return bool(top & marks) and not weights


def load_adapter(
    source: Source,
    *,
    subfolder: str | None = None,
    lora_alpha: float | None = None,
    allow_residual_base: bool = False,
) -> Adapter:
    """The adapter of a place, from its config and the header of its weights.

    `subfolder` names the folder in it; without it, the top folder or the only subfolder that holds an adapter.
    `lora_alpha` is α for weights without a config. `.bin` weights are loaded with ``weights_only=True`` or not at all.
    Raises `MalformedAdapter`, `UnsupportedAdapter`, `CheckpointError` or `SourceError`.
    """
    files = {file.name: file for file in source.files()}
    folder = _folder(files, subfolder, source.model_id)
    name = f"{source.model_id}/{folder}".rstrip("/") if folder else source.model_id
    config = _read_config(source, f"{folder}{CONFIG_NAME}", name)
    weights = _weights(files, folder, source, name, config is not None)
    path = source.path(weights.name)
    values: Mapping[str, Any] = {}
    if weights.name.endswith(".bin"):
        values = _unpickle(path, name)
        tensors, metadata = _references(values, weights.name), {}
    else:
        with open_shard(weights, path) as shard:
            tensors, metadata = shard.tensors, shard.metadata
    data = config if config is not None else _from_metadata(metadata, name)
    if data is None:
        parsed = _guessed(tensors, name, weights.name, lora_alpha)
    else:
        parsed = parse_config(
            data,
            where=name,
            file=CONFIG_NAME if config is not None else f"the metadata of {weights.name}",
            lora_alpha=lora_alpha,
            allow_residual_base=allow_residual_base,
        )
        if config is None:
            parsed = replace(parsed, dialect="diffusers")
    return Adapter(
        name=name,
        config=parsed,
        tensors=tensors,
        source=source,
        file=weights.name,
        path=path,
        _sha256=weights.sha256,
        _values=values,
    )


def adapter_from_tensors(
    name: str,
    config: Mapping[str, Any] | AdapterConfig,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    *,
    allow_residual_base: bool = False,
) -> Adapter:
    """An adapter whose tensors are in memory: a `PeftModel`'s, say."""
    if not isinstance(config, AdapterConfig):
        config = parse_config(config, where=name, allow_residual_base=allow_residual_base)
    return Adapter(name=name, config=config, tensors=_references(tensors, name), _values=tensors)


def adapters_from_peft(model: Any) -> tuple[Adapter, ...]:
    """The active adapters of a live `peft.PeftModel`, in order; `names.base_name` tells its base's tensors from them.

    Raises as `load_adapter` does, and `AdapterError` where an adapter is merged into the base already.
    """
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise AdapterError(
                f"{name} holds its adapter merged already; call unmerge_adapter() first, or scan the base"
            )
    from peft import get_peft_model_state_dict  # a PeftModel can't be here without it

    active = model.active_adapters
    names = active() if callable(active) else active
    found = []
    for name in names:
        config = {
            key: value.value if hasattr(value, "value") else sorted(value) if isinstance(value, set) else value
            for key, value in model.peft_config[name].to_dict().items()
        }
        tensors = get_peft_model_state_dict(model, adapter_name=name)
        # The base in memory has been through the initialisation already: it is the residual one.
        found.append(adapter_from_tensors(name, config, tensors, allow_residual_base=True))
    return tuple(found)


def _folder(files: Mapping[str, ShardRef], subfolder: str | None, place: str) -> str:
    """The adapter's folder, with its slash; empty for the top."""
    if subfolder:
        return f"{subfolder.strip('/')}/"
    marks = (CONFIG_NAME, *SAFETENSORS, *PICKLES)
    folders = sorted({name.rpartition("/")[0] for name in files if PurePosixPath(name).name in marks})
    if not folders or "" in folders or len(files) == 1:
        return ""
    if len(folders) > 1:
        raise MalformedAdapter(
            f"{place} holds {len(folders)} adapters, in {', '.join(folders[:4])}; name one of these folders"
        )
    return f"{folders[0]}/"


def _weights(files: Mapping[str, ShardRef], folder: str, source: Source, name: str, has_config: bool) -> ShardRef:
    for candidate in (*SAFETENSORS, *PICKLES):
        if found := files.get(folder + candidate):
            return found
    # A lone file of any name (kohya's).
    others = [file for file in files if file.endswith(".safetensors") and file.rpartition("/")[0] == folder.rstrip("/")]
    if len(others) == 1:
        with open_shard(files[others[0]], source.path(others[0])) as shard:
            if looks_like_adapter(tensor.name for tensor in shard.tensors):
                return files[others[0]]
    what = f"has {CONFIG_NAME} but no weights" if has_config else "holds no adapter"
    raise MalformedAdapter(f"{name} {what} (expected one of {', '.join((*SAFETENSORS, *PICKLES))})")


def _read_config(source: Source, file: str, name: str) -> dict[str, Any] | None:
    if file not in {ref.name for ref in source.files()}:
        path = source.local(file)
        if path is None or not path.is_file():
            return None
    else:
        path = source.path(file)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MalformedAdapter(f"{name}: {file} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise MalformedAdapter(f"{name}: {file} is not a JSON object")
    return data


def _from_metadata(metadata: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """diffusers writes each component's LoraConfig into the file's metadata, its keys after the component's name."""
    if _METADATA not in metadata:
        return None
    try:
        flat = json.loads(metadata[_METADATA])
        components: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            component, _, option = key.partition(".")
            components.setdefault(component, {})[option] = value
        differ = any(config != next(iter(components.values())) for config in components.values())
    except (ValueError, AttributeError, RecursionError) as error:
        raise MalformedAdapter(f"{name}: the metadata {_METADATA} can't be read: {error}") from error
    if not components or differ:
        raise UnsupportedAdapter(
            f"{name}: its components ({', '.join(components)}) have different LoRA options; split it into one file each"
        )
    return {"peft_type": "LORA", **next(iter(components.values()))}


def _guessed(tensors: Iterable[TensorRef], name: str, file: str, lora_alpha: float | None) -> AdapterConfig:
    """What weights without a config still tell."""
    names = [tensor.name for tensor in tensors]
    if not looks_like_adapter(names):
        raise MalformedAdapter(
            f"{name}: {file} holds no tensor that an adapter's name marks, and there is no {CONFIG_NAME}"
        )
    components = ("unet.", "transformer.", "text_encoder.", "text_encoder_2.", "text_encoder_3.", "prior.")
    pipeline = all(n.startswith(components) for n in names) and not any("base_model." in n for n in names)
    old = any(".lora.down." in n or "_lora.down." in n for n in names)
    return AdapterConfig(dialect="diffusers" if pipeline or old else "peft", alpha=lora_alpha)


def _unpickle(path: Path, name: str) -> dict[str, Any]:
    import pickle

    import torch

    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MalformedAdapter(
            f"{name}: {path.name} is not a plain dictionary of tensors, so it is not loaded: {why}"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise MalformedAdapter(f"{name}: {path.name} is not a plain dictionary of tensors")
    return values


def _references(values: Mapping[str, Any], shard: str) -> tuple[TensorRef, ...]:
    references = []
    for name, value in values.items():
        word = str(value.dtype).removeprefix("torch.")
        references.append(
            TensorRef(name=name, dtype=_WORDS.get(word, word.upper()), shape=tuple(value.shape), shard=shard)
        )
    return tuple(references)


def _numbers(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    wide = value.detach().cpu()
    numbers: np.ndarray = (
        wide.double() if str(value.dtype) in ("torch.float64", "torch.int64") else wide.float()
    ).numpy()
    return numbers


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
