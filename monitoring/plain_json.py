"""JSON that every reader takes: a number that is none, as a diverged loss is, becomes null. Standard library only.

Python would write NaN and Infinity, which are not JSON: browsers and jq refuse the whole document.
"""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any) -> str:
    """The document. Raises TypeError for what JSON has no form of."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # rare: only then is the document copied
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
