"""What `farloop doctor` finds: one thing a line, with its mend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line."""

    level: Level
    what: str
    detail: str
    mend: str = ""
    """What to do about it; empty where nothing is wrong."""
    data: Mapping[str, Any] | None = None
    """The same for programs, where there is more than the line says."""
