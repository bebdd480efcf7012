"""LoRA and what differs from it only in how A and B come about: DoRA, AdaLoRA, VeRA, DeLoRA, BD-LoRA, kohya, MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardesd.adapters.edits import AddVector, LowRank, Scale
from shardesd.adapters.names import Group
from shardesd.adapters.target import Placed, Setting, columns, linear_fits
from shardesd.errors import MalformedAdapter, UnsupportedAdapter
from shardesd.records import TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(LowRank):
    """s·B·A (peft lora/layer.py)."""

    A: TensorRef
    B: TensorRef
    scale: Scale
    stored_transposed: bool = False
    """A is stored (in, r) and B (r, out), as MLX does."""
    blocks_a: int = 1
    blocks_b: int = 1
    """BD-LoRA: A or B holds only the blocks on its diagonal (peft lora/variants.py)."""
    mid: TensorRef | None = None
    """kohya's `lora_mid`: the kernel of a convolution whose outer factors are 1×1 (CP form)."""

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return tuple(ref for ref in (self.A, self.B, self.mid, self.magnitude, self.scale.alpha_ref) if ref is not None)

    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        A, B = self.read(self.A).astype(dtype, copy=False), self.read(self.B).astype(dtype, copy=False)
        if self.stored_transposed:
            A, B = A.T, B.T
        A, B = A.reshape(A.shape[0], -1), B.reshape(B.shape[0], -1)
        if self.mid is not None:
            mid = self.read(self.mid).astype(dtype, copy=False)
            A = np.tensordot(mid, A, axes=(1, 0)).transpose(0, 3, 1, 2).reshape(mid.shape[0], -1)
        A, B = _block_diagonal(A, self.blocks_a), _block_diagonal(B, self.blocks_b)
        return A, B * dtype.type(self.scale.value(self.read))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaLora(LowRank):
    """B·(A⊙E)·lora_alpha/(init_r + 1e-5): not α/r (peft adalora/layer.py)."""

    A: TensorRef
    B: TensorRef
    E: TensorRef
    scale: float

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.A, self.B, self.E)

    @property
    def rounds_delta(self) -> bool:
        return False

    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        A, B, E = (self.read(ref).astype(dtype, copy=False) for ref in (self.A, self.B, self.E))
        return A * E.reshape(-1, 1) * dtype.type(self.scale), B


@dataclass(frozen=True, slots=True, kw_only=True)
class Vera(LowRank):
    """(λ_b⊙B[:out])·(λ_d⊙A[:, :in]) with one A and B for the whole model (peft vera/layer.py)."""

    A: TensorRef
    B: TensorRef
    lambda_b: TensorRef
    lambda_d: TensorRef
    size: tuple[int, int]
    """(out, in) of the module."""

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.A, self.B, self.lambda_b, self.lambda_d)

    @property
    def rounds_delta(self) -> bool:
        return False

    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        out, in_ = self.size
        A, B = self.read(self.A)[:, :in_].astype(dtype, copy=False), self.read(self.B)[:out].astype(dtype, copy=False)
        return A * self.read(self.lambda_d).reshape(-1, 1), B * self.read(self.lambda_b).reshape(-1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delora(LowRank):
    """B·diag(λ/(r·‖A_i‖·‖B_i‖))·A, each input scaled by its saved norm (peft delora/layer.py)."""

    A: TensorRef
    B: TensorRef
    strength: TensorRef
    norms: TensorRef

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.A, self.B, self.strength, self.norms)

    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        A, B = self.read(self.A).astype(dtype, copy=False), self.read(self.B).astype(dtype, copy=False)
        A_norm = np.maximum(np.linalg.norm(A, axis=1), dtype.type(1e-4))
        B_norm = np.maximum(np.linalg.norm(B, axis=0), dtype.type(1e-4))
        strength = self.read(self.strength).reshape(-1)[0] / A.shape[0] / (A_norm * B_norm)
        return A * self.read(self.norms).astype(dtype, copy=False), B * strength.astype(dtype)


def plan_lora(group: Group, setting: Setting) -> Placed:
    """Linear, Conv1D, convolution or embedding, with DoRA and a bias where there are any."""
    if "lora_E" in group.tensors:
        return _plan_adalora(group, setting)
    if "lora_embedding_A" in group.tensors or "lora_embedding_B" in group.tensors:
        A, B = setting.factors(group, "lora_embedding_A", "lora_embedding_B")
        return _place(group, setting, A, B, rows=B.shape[0], cols=A.shape[1], embedding=True)
    if "mlx_a" in group.tensors or "mlx_b" in group.tensors:
        B, A = setting.factors(group, "mlx_b", "mlx_a")
        return _place_mlx(group, setting, A, B)
    if "lora_mid" in group.tensors:
        return _plan_mid(group, setting)
    if setting.config.raw.given("use_bdlora"):
        return _plan_blocks(group, setting)
    A, B = setting.factors(group, "lora_A", "lora_B")
    return _place(group, setting, A, B, rows=B.shape[0], cols=columns(A.shape))


def _place(
    group: Group,
    setting: Setting,
    A: TensorRef,
    B: TensorRef,
    *,
    rows: int,
    cols: int,
    embedding: bool = False,
    **more: Any,
) -> Placed:
    rank = A.shape[0]
    setting.check_rank(group, A, rank)
    fits = _embedding_fits(rows, cols) if embedding else linear_fits(rows, cols)
    needs = f"{cols}×{rows}" if embedding else f"{rows}×{cols}"
    name = setting.weight(group, fits, source=A, needs=needs)
    shape = setting.index.shape(setting.tied.get(name, name))
    transposed = embedding or (name not in setting.tied and setting.transposed(group, name, rows, cols))
    scale = setting.scale(group, rank)
    if group.inside and group.module.endswith(".out_proj") and setting.has_joint_attention(group.module):
        # peft's MultiheadAttention adds out_proj's delta twice, in merge and in forward alike (to 0.21 at least), so
        # twice is what the adapter was trained with.
        scale = replace(scale, times=2)
    magnitude, axis = _magnitude(group, setting, shape, axis=1 if transposed else 0)
    lora = Lora(
        A=A,
        B=B,
        scale=scale,
        transposed=transposed,
        magnitude=magnitude,
        norm_axis=axis,
        **more,
        **setting.common(group),
    )
    placed: Placed = [(name, lora)]
    if bias := group.tensors.pop("lora_B.bias", None):
        added = AddVector(tensor=bias, scale=replace(scale, times=1), **setting.common(group))
        placed.append((setting.bias(group, name, bias), added))
    return placed


def _place_mlx(group: Group, setting: Setting, A: TensorRef, B: TensorRef) -> Placed:
    if len(A.shape) != 2:
        raise UnsupportedAdapter(
            f"{setting.where}: {A.name} has {len(A.shape)} dimensions; MLX's experts can't be merged yet"
        )
    cols, rank = A.shape
    rows = B.shape[1]
    base = setting.index.find(f"{group.module}.weight")
    shape = setting.index.shape(base) if base else (rows, cols)
    # mlx-lm's LoRAEmbedding keeps a (V, r) and b (r, d) for a weight (V, d).
    embedding = shape == (cols, rows) and (rows != cols or group.module.rsplit(".", 1)[-1] in ("embed_tokens", "wte"))
    name = setting.weight(group, linear_fits(rows, cols), source=A, needs=f"{rows}×{cols}")
    magnitude, axis = _magnitude(group, setting, shape, axis=0)
    lora = Lora(
        A=A,
        B=B,
        scale=setting.scale(group, rank),
        stored_transposed=True,
        transposed=embedding,
        magnitude=magnitude,
        norm_axis=axis,
        **setting.common(group),
    )
    return [(name, lora)]


def _plan_mid(group: Group, setting: Setting) -> Placed:
    A, B = setting.factors(group, "lora_A", "lora_B")
    (mid,) = setting.take(group, "lora_mid")
    if len(mid.shape) != 4 or mid.shape[:2] != (A.shape[0], A.shape[0]):
        raise MalformedAdapter(f"{setting.where}: {mid.name} {list(mid.shape)} doesn't fit rank {A.shape[0]}")
    cols = A.shape[1] * mid.shape[2] * mid.shape[3]
    return _place(group, setting, A, B, rows=B.shape[0], cols=cols, mid=mid)


def _plan_blocks(group: Group, setting: Setting) -> Placed:
    blocks = setting.config.raw.part("use_bdlora").count("nblocks") or 1
    A, B = setting.take(group, "lora_A", "lora_B")
    if len(A.shape) != 2 or len(B.shape) != 2 or 0 in A.shape + B.shape:
        raise MalformedAdapter(f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} are no factors")
    blocks_b = blocks if B.shape[1] * blocks == A.shape[0] else 1
    if B.shape[1] * blocks_b != A.shape[0]:
        raise MalformedAdapter(f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit")
    base = setting.index.find(f"{group.module}.weight")
    blocks_a = blocks if base and A.shape[1] * blocks == setting.index.shape(base)[1] else 1
    return _place(
        group, setting, A, B, rows=B.shape[0], cols=A.shape[1] * blocks_a, blocks_a=blocks_a, blocks_b=blocks_b
    )


def _plan_adalora(group: Group, setting: Setting) -> Placed:
    A, B, E = setting.take(group, "lora_A", "lora_B", "lora_E")
    group.tensors.pop("ranknum", None)
    if len(A.shape) != 2 or len(B.shape) != 2 or B.shape[1] != A.shape[0]:
        raise MalformedAdapter(f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit")
    rows, cols = B.shape[0], A.shape[1]
    name = setting.weight(group, linear_fits(rows, cols), source=A, needs=f"{rows}×{cols}")
    if A.shape[0] == 0:  # AdaLoRA has pruned this module away
        return []
    alpha, ranknum = setting.config.alpha, setting.config.r or 12
    if alpha is None:
        setting.scale(group, A.shape[0])
    strength = (alpha if alpha and alpha > 0 else float(A.shape[0])) / (ranknum + 1e-5)
    transposed = setting.transposed(group, name, rows, cols)
    return [(name, AdaLora(A=A, B=B, E=E, scale=strength, transposed=transposed, **setting.common(group)))]


def plan_vera(group: Group, setting: Setting) -> Placed:
    lambda_b, lambda_d = setting.take(group, "vera_lambda_b", "vera_lambda_d")
    A, B = setting.shared.get("vera_A"), setting.shared.get("vera_B")
    if A is None or B is None:
        raise UnsupportedAdapter(
            f"{setting.where}: VeRA was saved without its projections (save_projection=False), and what a seed draws "
            "differs between systems; save it with save_projection=True"
        )
    out, rank = lambda_b.shape[0], lambda_d.shape[0]

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and out in shape

    name = setting.weight(group, fits, source=lambda_b, needs=f"a matrix with {out} outputs")
    shape = setting.index.shape(name)
    transposed = shape[0] != out or (shape[0] == shape[1] and setting.transposed(group, name, out, out))
    in_ = shape[0] if transposed else shape[1]
    if A.shape[0] != rank or B.shape[1] != rank or A.shape[1] < in_ or B.shape[0] < out:
        raise MalformedAdapter(
            f"{setting.where}: vera_A {list(A.shape)} and vera_B {list(B.shape)} are too small for {name} {list(shape)}"
        )
    edit = Vera(
        A=A, B=B, lambda_b=lambda_b, lambda_d=lambda_d, size=(out, in_), transposed=transposed, **setting.common(group)
    )
    return [(name, edit)]


def plan_delora(group: Group, setting: Setting) -> Placed:
    A, B = setting.factors(group, "delora_A", "delora_B")
    strength, norms = setting.take(group, "delora_lambda", "delora_w_norm")
    rows, cols = B.shape[0], A.shape[1]
    setting.check_rank(group, A, A.shape[0])
    name = setting.weight(group, lambda shape: shape == (rows, cols), source=A, needs=f"{rows}×{cols}")
    return [(name, Delora(A=A, B=B, strength=strength, norms=norms, **setting.common(group)))]


def _magnitude(group: Group, setting: Setting, shape: tuple[int, ...], *, axis: int) -> tuple[TensorRef | None, int]:
    """DoRA's magnitudes, and the axis they run along."""
    ref = group.tensors.pop("lora_magnitude_vector", None)
    if ref is None:
        if setting.config.use_dora:
            raise MalformedAdapter(f"{setting.where}: the config says DoRA, but {group.module} has no magnitude vector")
        return None, 0
    if len(ref.shape) == 2 and ref.shape[0] == 1 and setting.config.dialect == "kohya":
        axis = 1  # LyCORIS before 2.0 normalised along the inputs
    if ref.numel != shape[axis]:
        raise MalformedAdapter(
            f"{setting.where}: {ref.name} {list(ref.shape)} doesn't fit {group.module} {list(shape)}: "
            f"{shape[axis]} magnitudes expected"
        )
    return ref, axis


def _embedding_fits(rows: int, cols: int) -> Any:
    return lambda shape: shape == (cols, rows)


def _block_diagonal(blocks: np.ndarray, count: int) -> np.ndarray:
    if count == 1:
        return blocks
    height, width = blocks.shape[0] // count, blocks.shape[1]
    full = np.zeros((blocks.shape[0], width * count), dtype=blocks.dtype)
    for at in range(count):
        full[at * height : (at + 1) * height, at * width : (at + 1) * width] = blocks[at * height : (at + 1) * height]
    return full
