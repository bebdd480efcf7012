"""Rows and events of a made-up scan, and consoles that write into memory."""

from __future__ import annotations

import io
from dataclasses import asdict

import polars as pl
from rich.console import Console

from shardesd.events import ScanFinished, ScanStarted
from shardesd.records import Row

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"


def row(longname="model.layers.0.self_attn.q_proj", **values) -> Row:
    measured = {
        "block_type": "q_proj",
        "dtype": "BF16",
        "M": 4096,
        "N": 4096,
        "alpha": 3.21,
        "D": 0.0456,
        "n_tail": 2048,
        "fit_status": "ok",
        "spectral_norm": 12.345,
        "stable_rank": 98.76,
        "entropy": 0.912,
        "seconds": 1.25,
        "device": "cuda:0",
    }
    return Row(model_id=MODEL, longname=longname, **(measured | values))


def failed(longname="model.layers.1.mlp.up_proj", reason="3 of 9 elements are NaN", **values) -> Row:
    return Row(model_id=MODEL, longname=longname, block_type="up_proj", status="failed", reason=reason, **values)


def skipped(longname="model.norm", reason="norm", **values) -> Row:
    return Row(model_id=MODEL, longname=longname, status="skipped", reason=reason, **values)


def started(**values) -> ScanStarted:
    given = {
        "model_id": MODEL,
        "revision": None,
        "commit": "8afb486c1db24fe5011ec46dfbe5b5dccdb575c2",
        "shards": 4,
        "total_bytes": 16_000_000_000,
        "matrices": 225,
        "exact": True,
        "devices": ("cuda:0", "cuda:1"),
        "out": "results",
    }
    return ScanStarted(**(given | values))


def finished(**values) -> ScanFinished:
    return ScanFinished(**({"model_id": MODEL, "analysed": 2, "failed": 0, "seconds": 9.24} | values))


def frame(*rows: Row) -> pl.DataFrame:
    empty = asdict(row())
    return pl.DataFrame([asdict(r) for r in rows], infer_schema_length=None, schema=None if rows else list(empty))


def console(width=80, height=24, *, terminal=False, encoding="utf-8", color="256") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
    return Console(
        file=file,
        width=width,
        height=height,
        force_terminal=terminal,
        force_interactive=terminal,
        color_system=color if terminal else None,
        legacy_windows=False,
    )


def written(target: Console) -> str:
    target.file.flush()
    return target.file.buffer.getvalue().decode(target.file.encoding)


def show(renderable, width=80, **kwargs) -> str:
    target = console(width, **kwargs)
    target.print(renderable)
    return written(target)
