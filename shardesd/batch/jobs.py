"""What is left of a list, model by model."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from shardesd.batch.model import ListRow
from shardesd.batch.plan import Planned


@dataclass(slots=True)
class Job:
    """A model that is left."""

    planned: Planned
    number: int
    """Its turn."""
    tried: int = 0
    """By this process, in this run."""
    known_attempts: int = 0
    """In the table of failures when this run began."""
    not_before: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def row(self) -> ListRow:
        return self.planned.row
