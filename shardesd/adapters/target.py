"""Where the tensors of one adapter module go, and in which orientation: what all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardesd.adapters.config import AdapterConfig
from shardesd.adapters.edits import Edit, Read, Scale, Turned
from shardesd.adapters.match import Fits, Index
from shardesd.adapters.names import Group
from shardesd.conv1d import is_conv1d
from shardesd.errors import MalformedAdapter, UnmatchedAdapter
from shardesd.records import TensorRef

Placed = list[tuple[str, Edit]]
"""(base tensor, what is done to it)."""


@dataclass(slots=True, kw_only=True)
class Setting:
    """One adapter, and the base it is planned against."""

    where: str
    config: AdapterConfig
    index: Index
    read: Read
    shared: Mapping[str, TensorRef]
    model: Mapping[str, Any]
    """The base's config.json."""
    hints: Mapping[str, str]
    """Tensor → ``conv1d`` or ``embedding``, where the live model's classes say so."""
    tied: dict[str, str] = field(default_factory=dict)
    """Heads that are not stored → the embedding whose weight they share."""

    def common(self, group: Group) -> dict[str, Any]:
        """The arguments that every `Edit` takes."""
        return {"adapter": self.where, "module": group.module, "read": self.read}

    def take(self, group: Group, *roles: str) -> list[TensorRef]:
        """The tensors of these roles, removed from the group. Raises `MalformedAdapter` where one is missing."""
        for role in roles:
            if role not in group.tensors:
                raise MalformedAdapter(
                    f"{self.where}: {group.module} has {', '.join(sorted(group.tensors))} but no {role}"
                )
        return [group.tensors.pop(role) for role in roles]

    def factors(self, group: Group, a: str, b: str) -> tuple[TensorRef, TensorRef]:
        """A (r, in…) and B (out, r…) taken from the group, and checked against each other and the config's rank."""
        A, B = self.take(group, a, b)
        for ref in (A, B):
            if len(ref.shape) < 2 or 0 in ref.shape:
                raise MalformedAdapter(
                    f"{self.where}: {ref.name} has shape {list(ref.shape)}, but a factor needs two dimensions and "
                    "elements; a run under DeepSpeed ZeRO-3 or FSDP saved it without gathering the shards"
                )
        if B.shape[1] != A.shape[0]:
            raise MalformedAdapter(
                f"{self.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit: ranks "
                f"{A.shape[0]} and {B.shape[1]}"
            )
        return A, B

    def check_rank(self, group: Group, ref: TensorRef, rank: int, name: str | None = None) -> None:
        """Raise `MalformedAdapter` where the config gives another rank than the tensor has: α/r would be a guess."""
        told = self.config.rank_of(name or group.module)
        if told is not None and told != rank:
            raise MalformedAdapter(
                f"{self.where}: {ref.name} has rank {rank}, but the config says r={told} for {group.module}"
            )

    def scale(self, group: Group, rank: int, name: str | None = None) -> Scale:
        """The scale of one module's delta. Raises `MalformedAdapter` where neither config nor tensors give α."""
        if self.config.scale is not None:
            return Scale(alpha=self.config.scale)
        alpha_ref = group.tensors.pop("alpha", None)
        alpha = self.config.alpha_of(name or group.module)
        if alpha_ref is None and alpha is None and self.config.dialect in ("peft", "mlx"):
            raise MalformedAdapter(
                f"{self.where}: α is unknown for {group.module}: the config is missing or has no lora_alpha; "
                "give it with --lora-alpha"
            )
        # Without α, kohya's and diffusers' tools take α = r.
        return Scale(rank=rank, alpha=None if alpha_ref else alpha, alpha_ref=alpha_ref, root=self.config.use_rslora)

    def weight(self, group: Group, fits: Fits, *, source: TensorRef, needs: str, outputs_first: bool = False) -> str:
        """The base tensor that holds this module's weight; where `fits` knows outputs × inputs alone (`outputs_first`),
        its edit is to be given `as_stored`. Raises `UnmatchedAdapter`."""
        module = self.index.unflatten(group.module, source) if group.flattened else group.module
        name = f"{module}.weight"
        if outputs_first and self._inputs_first(self.index.find(name) or name):
            as_meant = fits

            def fits(shape: tuple[int, ...]) -> bool:
                return as_meant(shape[::-1] if len(shape) == 2 else shape)

        if self.index.find(name) is None:
            # The tensor of a torch MultiheadAttention that q, k and v share has a name of its own.
            if (joint := self.index.find(f"{module}.in_proj_weight")) and fits(self.index.shape(joint)):
                return joint
            if embedding := self._tied(module, fits):
                self.tied[name] = embedding
                return name
        return self.index.tensor(name, fits, source=source, needs=needs)

    def bias(self, group: Group, weight: str, source: TensorRef) -> str:
        """The bias beside a weight. Raises `UnmatchedAdapter` where the base has none."""
        name = f"{weight.rpartition('.')[0]}.bias"
        if weight.endswith(".in_proj_weight"):
            name = weight.removesuffix("_weight") + "_bias"
        if name not in self.index:
            raise UnmatchedAdapter(
                f"{self.where}: {source.name} is added to a bias, but the base's {group.module} has none"
            )
        return name

    def has_joint_attention(self, module: str) -> bool:
        """Whether a module lies in a torch MultiheadAttention whose q, k and v share one weight."""
        return self.index.find(f"{module.rpartition('.')[0]}.in_proj_weight") is not None

    def is_tied_head(self, module: str) -> bool:
        """Whether a module is an output head that has no weight but the input embedding's."""
        return bool(self.model.get("tie_word_embeddings")) and self._tied(module, lambda shape: True) is not None

    def transposed(self, group: Group, name: str, rows: int, cols: int) -> bool:
        """Whether `name` stores (in, out) for a delta of `rows` × `cols` = out × in.

        The shape decides; for a square tensor the model's class does, as in peft; last, the config's `fan_in_fan_out`.
        """
        shape = self.index.shape(name)
        if len(shape) != 2 or rows != cols:
            return shape != (rows, cols) and shape == (cols, rows)
        return self._inputs_first(name)

    def _inputs_first(self, name: str) -> bool:
        """Whether the model stores a linear layer as (in, out)."""
        if self.hints:
            return self.hints.get(name) == "conv1d"
        model_type = self.model.get("model_type")
        return is_conv1d(name, model_type) if model_type else self.config.fan_in_fan_out

    def as_stored(self, group: Group, name: str, edit: Edit) -> Edit:
        """`edit`, which means outputs × inputs, for a tensor that may be stored the other way round."""
        if len(self.index.shape(name)) == 2 and self._inputs_first(name):
            return Turned(edit=edit, **self.common(group))
        return edit

    def place_tied(self, head: str) -> None:
        """Make a head that shares the embedding's weight a tensor of its own, for a replacement."""
        embedding = self._tied(head.removesuffix(".weight"), lambda shape: True)
        if embedding:
            self.tied[head] = embedding

    def _tied(self, module: str, fits: Fits) -> str | None:
        if self.model.get("tie_word_embeddings") is False:
            return None
        return self.index.tied_embedding(module, fits)


def linear_fits(rows: int, cols: int) -> Fits:
    """Fits a matrix stored either way round, or a convolution whose filters have `cols` elements."""

    def fits(shape: tuple[int, ...]) -> bool:
        if len(shape) == 2:
            return shape in ((rows, cols), (cols, rows))
        return len(shape) > 2 and shape[0] == rows and columns(shape) == cols

    return fits


def columns(shape: tuple[int, ...]) -> int:
    """The elements in one row of the stored tensor."""
    count = 1
    for size in shape[1:]:
        count *= size
    return count
