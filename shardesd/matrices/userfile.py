"""``--layout FILE``: rows that a user adds to the table, in TOML or JSON. The format: docs/layouts.md."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardesd.errors import OptionError
from shardesd.matrices import expressions
from shardesd.matrices.layouts import BLOCK_TYPE_OF_SUFFIX, Layout, Part
from shardesd.matrices.names import BLOCK_TYPES, ends_with

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST_FILE = 1_000_000
_TEXTS = ("names", "when", "experts", "groups", "heads", "note")
_COUNTS = ("experts", "groups", "heads", "size")
_FLAGS = ("transposed", "flatten", "conv")
_KEYS = (*_TEXTS, *_FLAGS, "models", "parts")
_PART_KEYS = ("suffix", "size", "type", "heads")


def read_layouts(path: str) -> tuple[Layout, ...]:
    """The rows in a user's file, in its order. Raises `OptionError` that names the file, the row and what is wrong."""
    try:
        return tuple(_layout(row, f"layout {i}") for i, row in enumerate(_rows(Path(path)), start=1))
    except ValueError as error:
        raise OptionError(f"--layout {path}: {error}") from None


def _rows(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"can't be read: {(error.strerror or str(error)).lower()}") from None
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"larger than {_LARGEST_FILE / 1e6:.0f} MB")
    is_json = path.suffix.lower() == ".json"
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not {'JSON' if is_json else 'TOML'}: {' '.join(str(error).split())}") from None
    rows = value.get("layout") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows or set(value) != {"layout"}:
        raise ValueError(
            f"expected a list of tables called layout{'' if is_json else ' ([[layout]])'}, and nothing else"
        )
    return rows


def _layout(row: Any, where: str) -> Layout:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no table")
    _only(row, _KEYS, where)
    for key in _FLAGS:
        if type(row.get(key, False)) is not bool:
            raise ValueError(f"{where}: {key} must be true or false")
    texts = {key: _text(row, key, where) for key in _TEXTS if key in row}
    if not texts.get("names"):
        raise ValueError(f"{where} has no names")
    try:
        ends_with(texts["names"])
    except re.error as error:
        raise ValueError(f"{where}: names '{texts['names']}' is no regular expression: {error}") from None
    for key in ("when", "experts", "groups", "heads"):
        _expression(texts.get(key, ""), f"{where}: {key}")
    models = row.get("models", [])
    models = [models] if isinstance(models, str) else models
    if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
        raise ValueError(f"{where}: models must be a list of model types")
    found = row.get("parts", [])
    if not isinstance(found, list):
        raise ValueError(f"{where}: parts must be a list")
    parts = tuple(_part(part, f"{where}: part {i}") for i, part in enumerate(found, start=1))
    if row.get("conv") and ("experts" in texts or "heads" in texts or row.get("flatten")):
        raise ValueError(f"{where}: conv goes with neither experts nor heads nor flatten")
    suffixes = [part.suffix for part in parts]
    if len(set(suffixes)) < len(suffixes):
        raise ValueError(f"{where}: two parts have the same suffix")
    return Layout(
        names=texts["names"],
        models=tuple(models),
        when=texts.get("when", ""),
        transposed=row.get("transposed", False),
        experts=texts.get("experts", ""),
        groups=texts.get("groups", "1"),
        parts=parts,
        heads=texts.get("heads", ""),
        flatten=row.get("flatten", False),
        conv=row.get("conv", False),
        note=texts.get("note", ""),
    )


def _part(part: Any, where: str) -> Part:
    if isinstance(part, str):
        suffix, _, size = (word.strip() for word in part.partition(":"))
        part = {"suffix": suffix, "size": size}
    if not isinstance(part, dict):
        raise ValueError(f"{where} is neither a text nor a table")
    _only(part, _PART_KEYS, where)
    values = {key: _text(part, key, where) for key in part}
    suffix = values.get("suffix", "")
    if not re.fullmatch(r"[A-Za-z0-9]\w*", suffix, re.ASCII):
        raise ValueError(f"{where}: the suffix '{suffix}' must be letters, digits and underscores")
    kind = values.get("type", BLOCK_TYPE_OF_SUFFIX.get(suffix, "other"))
    if kind not in BLOCK_TYPES:
        raise ValueError(f"{where}: the type '{kind}' is unknown (expected one of: {', '.join(BLOCK_TYPES)})")
    for key in ("size", "heads"):
        _expression(values.get(key, ""), f"{where}: {key}")
    return Part(suffix=suffix, block_type=kind, size=values.get("size", ""), heads=values.get("heads", ""))


def _only(row: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in row:
        if key not in known:
            raise ValueError(f"{where}: '{key}' is unknown (expected one of: {', '.join(known)})")


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row[key]
    if type(value) is int and key in _COUNTS:  # heads = 1
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a text")
    return value


def _expression(text: str, where: str) -> None:
    if text:
        try:
            expressions.parse(text)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
