"""farloop.wire.limits: what cannot work is refused where it is written."""

import pytest

from farloop.wire.limits import INITIAL_CREDIT, Limits


@pytest.mark.parametrize("limits", [{"chunk_bytes": 0}, {"chunk_bytes": 5 << 20}, {"window_bytes": INITIAL_CREDIT - 1}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Limits(**limits)
