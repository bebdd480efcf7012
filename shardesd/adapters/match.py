"""Adapter module → base tensor: exact, then a base prefix, then transformers' renames, then a unique suffix.

peft names follow the class that was trained; a checkpoint on disk may name the same tensor otherwise (``h.0`` for
``transformer.h.0``, ``block_sparse_moe`` for ``mlp``). A name that leads nowhere, to two tensors, or to one of another
shape is an error that says what is nearest: leaving such a module out would give wrong numbers in silence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

from shardesd.adapters.names import unflatten_prefix
from shardesd.errors import UnmatchedAdapter
from shardesd.records import TensorRef

Fits = Callable[[tuple[int, ...]], bool]

# transformers.conversion_mapping, where names in memory differ from names on disk; each pair is tried both ways.
_RENAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.language_model\.", "model."),
    (r"^lm_head$", "language_model.lm_head"),
    (r"^model\.(vision_tower|multi_modal_projector|visual|audio_tower)\.", r"\1."),
    (r"\.mlp\.(experts|gate|shared_experts)(?=\.|$)", r".block_sparse_moe.\1"),
    (r"\.mlp\.(experts|gate|router|shared_expert)(?=\.|$)", r".feed_forward.\1"),
    (r"^embed_out$", "lm_head"),
    (r"(^|\.)LayerNorm\.weight$", r"\1LayerNorm.gamma"),
    (r"(^|\.)LayerNorm\.bias$", r"\1LayerNorm.beta"),
)
_RENAMES_BACK = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^model\.(?!language_model\.)", "model.language_model."),
    (r"^language_model\.lm_head$", "lm_head"),
    (r"^(vision_tower|multi_modal_projector|visual|audio_tower)\.", r"model.\1."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.feed_forward\.", ".mlp."),
    (r"^lm_head$", "embed_out"),
    (r"(^|\.)LayerNorm\.gamma$", r"\1LayerNorm.weight"),
    (r"(^|\.)LayerNorm\.beta$", r"\1LayerNorm.bias"),
)
# ViT and its kin were renamed wholesale in transformers 5, in memory only; of some (DINOv2) the leaves alone.
_VIT = (
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
)
_RENAMES_VIT = (
    *((rf"(^|\.)layers\.(\d+)\.{re.escape(new)}$", rf"\1encoder.layer.\2.{old}") for new, old in _VIT),
    *((rf"(^|\.)encoder\.layer\.(\d+)\.{re.escape(old)}$", rf"\1layers.\2.{new}") for new, old in _VIT),
    *((rf"(layers?\.\d+)\.{re.escape(a)}$", rf"\1.{b}") for new, old in _VIT for a, b in ((new, old), (old, new))),
)
_HEADS = ("lm_head", "embed_out", "output_layer", "proj_out", "predictions.decoder", "lm_head.decoder", "output")
_EMBEDDINGS = re.compile(
    r"(^|\.)(embed_tokens|wte|tokens_embed|shared|word_embeddings|embed_in|tok_embeddings|word_embedding|embeddings)"
    r"\.weight$"
)


class Index:
    """The names and shapes that adapter modules are looked up in."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        self._shapes = dict(shapes)
        self._where = where
        self._by_leaf: dict[str, list[str]] = {}
        self._modules: dict[str, list[str]] | None = None
        self._flat: dict[str, list[str]] | None = None
        for name in self._shapes:
            self._by_leaf.setdefault(_tail(name), []).append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def put(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that the adapter itself brings, or leaves in another shape."""
        if name not in self._shapes:
            self._by_leaf.setdefault(_tail(name), []).append(name)
            self._modules = self._flat = None
        self._shapes[name] = shape

    def names(self) -> Iterable[str]:
        return self._shapes

    def tensor(self, name: str, fits: Fits, *, source: TensorRef, needs: str) -> str:
        """The base tensor that the adapter's tensor `source` calls `name`; `needs` says which shape it asks for.

        Raises `UnmatchedAdapter`.
        """
        hits = self._lookup(name, self._shapes.__contains__, self._ending_with)
        fitting = [hit for hit in hits if fits(self._shapes[hit])]
        if len(fitting) == 1:
            return fitting[0]
        if len(fitting) > 1:
            raise UnmatchedAdapter(
                f"{self._where}: {source.name} fits more than one base tensor: {', '.join(sorted(fitting)[:4])}"
            )
        if hits:
            hit = hits[0]
            raise UnmatchedAdapter(
                f"{self._where}: {source.name} needs {needs}, but the base's {hit} is {_shape(self._shapes[hit])}; "
                "is this another size of the base, or another model?"
            )
        raise UnmatchedAdapter(f"{self._where}: {source.name} finds no tensor {name} in the base{self.nearest(name)}")

    def find(self, name: str) -> str | None:
        """The one base tensor that `name` leads to, or None."""
        hits = self._lookup(name, self._shapes.__contains__, self._ending_with)
        return hits[0] if len(hits) == 1 else None

    def module(self, name: str) -> str | None:
        """The base's own name of a module that holds tensors or modules, or None."""
        if self._modules is None:
            self._modules = {}
            seen: set[str] = set()
            for tensor in self._shapes:
                parts = tensor.split(".")
                seen.update(".".join(parts[:stop]) for stop in range(1, len(parts)))
            for module in seen:
                self._modules.setdefault(module.rsplit(".", 1)[-1], []).append(module)
        modules = self._modules

        def known(name: str) -> bool:
            return name in modules.get(name.rsplit(".", 1)[-1], ())

        def ending_with(tail: str) -> list[str]:
            return [module for module in modules.get(tail.rsplit(".", 1)[-1], ()) if module.endswith(f".{tail}")]

        hits = self._lookup(name, known, ending_with)
        return hits[0] if len(hits) == 1 else None

    def unflatten(self, module: str, source: TensorRef) -> str:
        """The dotted module that kohya's underscored name stands for. Raises `UnmatchedAdapter`."""
        if self._flat is None:
            self._flat = {}
            for name in self._shapes:
                bare = name.rpartition(".")[0] or name
                modules = self._flat.setdefault(bare.replace(".", "_"), [])
                if bare not in modules:
                    modules.append(bare)
        flat = unflatten_prefix(module)
        hits = self._flat.get(flat) or [
            bare for key, found in self._flat.items() if key.endswith(f"_{flat}") for bare in found
        ]
        if len(hits) != 1:
            what = f"fits more than one base module: {', '.join(sorted(hits)[:4])}" if hits else "finds no base module"
            near = difflib.get_close_matches(flat, self._flat, n=2, cutoff=0.6) if not hits else ()
            nearest = f"; nearest: {', '.join(self._flat[key][0] for key in near)}" if near else ""
            raise UnmatchedAdapter(f"{self._where}: {source.name} {what}{nearest}")
        return hits[0]

    def tied_embedding(self, module: str, fits: Fits) -> str | None:
        """The input embedding that the output head `module` shares its weight with, or None."""
        if not any(module == head or module.endswith(f".{head}") for head in _HEADS):
            return None
        hits = [name for name, shape in self._shapes.items() if _EMBEDDINGS.search(name) and fits(shape)]
        return hits[0] if len(hits) == 1 else None

    def input_embedding(self) -> str | None:
        """The token embedding, where its name is one of the usual ones and there is only one."""
        hits = [name for name in self._shapes if _EMBEDDINGS.search(name)]
        return hits[0] if len(hits) == 1 else None

    def nearest(self, name: str) -> str:
        """A phrase that names the nearest candidates, with their shapes; empty where nothing is near."""
        near = difflib.get_close_matches(name, self._by_leaf.get(_tail(name), ()), n=2, cutoff=0.5)
        near = near or difflib.get_close_matches(name, list(self._shapes)[:20000], n=2, cutoff=0.5)
        return f"; nearest: {', '.join(f'{hit} {_shape(self._shapes[hit])}' for hit in near)}" if near else ""

    def _ending_with(self, tail: str) -> list[str]:
        return [name for name in self._by_leaf.get(_tail(tail), ()) if name.endswith(f".{tail}")]

    def _lookup(self, name: str, known: Callable[[str], bool], ending_with: Callable[[str], list[str]]) -> list[str]:
        if known(name):
            return [name]
        if hits := _with_prefix(name, known, ending_with):
            return hits
        for renamed in _renamed(name):
            if known(renamed):
                return [renamed]
        for renamed in _renamed(name):
            if hits := _with_prefix(renamed, known, ending_with):
                return hits
        for tail in _from_layer_index(name):
            if hits := ending_with(tail):
                return hits
        return []


def _with_prefix(name: str, known: Callable[[str], bool], ending_with: Callable[[str], list[str]]) -> list[str]:
    parts = name.split(".")
    for start in range(1, min(4, len(parts) - 1)):
        if parts[start - 1].isdigit():
            break
        if known(shorter := ".".join(parts[start:])):
            return [shorter]
    # A lone word such as `classifier.weight` may end the name of something else altogether.
    return ending_with(name) if len(parts) > 2 or name == "lm_head.weight" or _EMBEDDINGS.search(name) else []


def _renamed(name: str) -> list[str]:
    """Every name that the renames lead to, in the order in which they are written down."""
    found: list[str] = []
    module, dot, leaf = name.rpartition(".")
    for pattern, replacement in (*_RENAMES, *_RENAMES_BACK, *_RENAMES_VIT):
        for whole in (name, *([module] if dot else [])):
            new = re.sub(pattern, replacement, whole)
            if new != whole:
                found.append(new if whole is name else f"{new}.{leaf}")
    # A renamed container may hold a renamed part: language_model.model.layers.0.block_sparse_moe.
    for first in tuple(found):
        for pattern, replacement in (*_RENAMES[4:6], *_RENAMES_BACK[4:6]):
            if (new := re.sub(pattern, replacement, first)) != first:
                found.append(new)
    return list(dict.fromkeys(found))


def _from_layer_index(name: str) -> list[str]:
    """`a.b.layers.0.c.weight` → `layers.0.c.weight`, `0.c.weight`."""
    parts = name.split(".")
    at = next((number for number, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        tail = ".".join(parts[-2:])
        return [tail] if _EMBEDDINGS.search(name) or tail == "lm_head.weight" else []
    tails = [".".join(parts[start:]) for start in (at - 1, at) if start >= 0]
    return [tail for tail in tails if tail.count(".") >= 2]


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"
