"""What `inspect` found, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardesd.show.text import count, printable, size


def inspection_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of an `inspector.Inspection`'s values."""
    commit = f" {found['commit'][:7]}" if found["commit"] else ""
    yield f"{printable(found['model_id'])}{commit}  {count(found['shards'], 'shard')}, {size(found['nbytes'])}"
    if adapter := found["adapter"]:
        names = ", ".join(printable(name) for name in adapter["names"])
        added = f" and adds {adapter['added']}" if adapter["added"] else ""
        yield (f"adapter {names} changes {count(adapter['tensors'], 'tensor')}{added} of {printable(adapter['base'])}")
    yield ""
    yield from _table(
        ("dtype", "tensors", "bytes"),
        [(dtype, f"{row['tensors']:,}", size(row["nbytes"])) for dtype, row in found["dtypes"].items()],
    )
    yield ""
    types = found["block_types"]
    rows: list[Sequence[str]] = [
        (printable(k), f"{r['matrices']:,}", f"{r['params']:,}", f"{r['kept']:,}") for k, r in types.items()
    ]
    if len(rows) > 1:
        total = {name: sum(row[name] for row in types.values()) for name in ("matrices", "params", "kept")}
        rows.append(("all", *(f"{total[name]:,}" for name in ("matrices", "params", "kept"))))
    yield from _table(("matrices of type", "number", "parameters", "kept"), rows)
    for title, reasons in (("skipped", found["skipped"]), ("would fail", found["failed"])):
        if reasons:
            yield ""
            yield f"{title} {sum(reasons.values()):,}"
            yield from (f"  {n:>6,}  {printable(reason)}" for reason, n in reasons.items())
    yield ""
    yield f"to read    {size(found['needed'])} of weights"
    yield f"to fetch   {size(found['fetch'])} ({size(found['cached'])} of {size(found['nbytes'])} are here)"
    memory = found["memory"]
    stages = ", ".join(f"{name} {size(memory[name])}" for name in ("tensor", "blocks", "gram", "copy"))
    yield f"memory     {size(sum(memory.values()))} for the largest matrix: {stages}"
    if found["solves"]:
        yield ""
        yield from _table(
            ("shorter side", "matrices", "GFLOP"),
            [(f"{row['n']:,}", f"{row['matrices']:,}", f"{row['gflop']:,.1f}") for row in found["solves"]],
        )
    if found["notes"]:
        yield ""
        yield from (f"note: {printable(note)}" for note in found["notes"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, all others to the right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        first, *others = (
            text.ljust(w) if not at else text.rjust(w) for at, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *others)).rstrip()
