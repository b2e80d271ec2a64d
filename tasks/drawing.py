"""Random selection's draw: a release, made once, from the operating system's entropy."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction

from accounting.errors import InvalidInput
from infra.documents import Draw

POINT_BITS = 256
ENTROPY_SOURCE = "operating system (Python secrets), 256 bits"


def draw(release_id: str, weights: Mapping[str, float]) -> Draw:
    """Draw one candidate. Store the result before using it: drawing again until it pleases is not private."""
    point = secrets.token_hex(POINT_BITS // 8)
    weights = dict(sorted(weights.items()))
    index = drawn_index(point, weights)
    return Draw(
        release_id=release_id,
        weights=weights,
        point=point,
        drawn_index=index,
        drawn=list(weights)[index],
        drawn_at=datetime.now(UTC),
        entropy_source=ENTROPY_SOURCE,
    )


def drawn_index(point: str, weights: Mapping[str, float]) -> int:
    """Which candidate a point of [0, 1) falls on, in exact arithmetic.

    The weights are taken as the exact fractions that the float64 values are, divided by their exact sum, so
    each probability is right to 2**-256.

    Args:
        point: 64 hexadecimal digits, a fraction of 2**256.
        weights: on the simplex; the candidates lie along [0, 1) in the order of their names.
    """
    fractions = [Fraction(weight) for _, weight in sorted(weights.items())]
    if (
        not fractions
        or any(weight < 0 for weight in fractions)
        or abs(sum(fractions) - 1) > Fraction(1, 10**12)
    ):
        raise InvalidInput(
            f"Mixture weights must be non-negative and add up to 1, but they are {dict(weights)}."
        )
    place = Fraction(int(point, 16), 2**POINT_BITS) * sum(fractions)
    cumulative = Fraction(0)
    for index, weight in enumerate(fractions):
        cumulative += weight
        if place < cumulative:
            return index
    raise InvalidInput(f"{point} is not a point of [0, 1).")


def check_draw(stored: Draw, release_id: str, weights: Mapping[str, float]) -> None:
    """A draw that is read back must be the one for this release and these weights.

    Raises:
        InvalidInput: it was made for other weights, or was edited.
    """
    same = stored.release_id == release_id and stored.weights == dict(weights)
    if not same or stored.drawn != sorted(weights)[drawn_index(stored.point, weights)]:
        raise InvalidInput(
            f"The stored draw of release {release_id[:12]} does not fit the weights solved for (it was edited, or "
            "the solver was upgraded in between). It will not be drawn again: set a policy with other terms."
        )
