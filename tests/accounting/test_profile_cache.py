"""The cache of profiles: bounded by size, and never seen in a result."""

from __future__ import annotations

import numpy as np

from accounting import pld
from accounting.joint_release import single_run
from accounting.profile import DiscretisedProfile, GaussianProfile, PrivacyProfile
from accounting.profile_cache import ProfileCache, size_of
from tests.accounting.conftest import RunMaker

MEGABYTE = 125_000  # doubles


def grid(points: int, *, symmetric: bool) -> DiscretisedProfile:
    remove = np.linspace(1, 0, points)
    add = remove if symmetric else remove.copy()
    return DiscretisedProfile(
        interval=0.1, first=(0, 0), on_grid=(remove, add), error=0.0, resolution_error=0.0
    )


def test_holds_the_latest_that_fit() -> None:
    computed: list[int] = []

    def compute(number: int) -> PrivacyProfile:
        computed.append(number)
        return grid(MEGABYTE, symmetric=False)

    cache = ProfileCache(compute, most_bytes=5_000_000)  # two of about 2 MB
    for number in (1, 2, 1, 3, 1, 2):  # 3 pushes out 2, the one that was asked for longest ago
        cache(number)
    assert computed == [1, 2, 3, 2]
    cache.cache_clear()
    cache(1)
    assert computed == [1, 2, 3, 2, 1]


def test_a_profile_larger_than_the_cache_is_still_given() -> None:
    cache = ProfileCache(lambda number: grid(MEGABYTE, symmetric=True), most_bytes=10)
    assert cache(1).deltas(0.0) == cache(2).deltas(0.0) == (1.0, 1.0)


def test_an_array_for_both_directions_counts_once() -> None:
    once, twice = size_of(grid(MEGABYTE, symmetric=True)), size_of(grid(MEGABYTE, symmetric=False))
    assert 1_000_000 <= once < 1_100_000 < 2_000_000 <= twice < 2_100_000
    assert size_of(GaussianProfile(mu=1.0)) < 10_000


def test_a_run_says_the_same_after_its_profile_was_forgotten(make_run: RunMaker) -> None:
    bound = single_run(make_run("s", 2.0, 30, sampling_probability=0.1))
    before = bound.epsilon(1e-5), bound.profile.deltas(0.3), bound.profile.smallest_delta
    pld.composed_profile.cache_clear()
    assert (bound.epsilon(1e-5), bound.profile.deltas(0.3), bound.profile.smallest_delta) == before
    assert bound == single_run(make_run("s", 2.0, 30, sampling_probability=0.1))
