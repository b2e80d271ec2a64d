"""The same runs by the accountants that others trust: two PRV accountants, and Opacus's Renyi accountant.

They are test-only. All three speak of add-or-remove-one; the PRV accountants bracket the exact epsilon.
"""

from __future__ import annotations

import warnings

import pytest
from opacus.accountants import GaussianAccountant
from opacus.accountants import PRVAccountant as OpacusPRV
from opacus.accountants import RDPAccountant as OpacusRDP
from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant

from accounting.budget import NeighboringRelation
from accounting.joint_release import joint_release, single_run
from accounting.other_bounds import joint_rdp
from accounting.trajectory import Trajectory
from tests.accounting.conftest import RunMaker

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
DELTA = 1e-5
RUNS = [(1.0, 0.01, 1000), (2.0, 0.1, 500), (0.7, 0.001, 5000), (1.5, 0.3, 20)]


def run_of(make_run: RunMaker, noise: float, q: float, steps: int, name: str = "s") -> Trajectory:
    return make_run(name, noise, steps, sampling_probability=q, relation=ADD_OR_REMOVE)


@pytest.mark.parametrize(("noise", "q", "steps"), RUNS)
def test_a_poisson_run_lies_in_the_bracket_of_the_prv_accountant(
    noise: float, q: float, steps: int, make_run: RunMaker
) -> None:
    step = PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=noise)
    accountant = PRVAccountant(prvs=[step], max_self_compositions=[steps], eps_error=0.005, delta_error=1e-10)
    low, estimate, high = accountant.compute_epsilon(DELTA, [steps])
    ours = single_run(run_of(make_run, noise, q, steps)).epsilon(DELTA)
    assert low <= ours <= high
    assert ours == pytest.approx(estimate, rel=1e-3)


def test_different_runs_together_lie_in_the_bracket_of_the_prv_accountant(make_run: RunMaker) -> None:
    some = RUNS[:1] + RUNS[3:]  # the accountant takes half a minute for all of them
    steps = [count for *_, count in some]
    prvs = [
        PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=noise)
        for noise, q, _ in some
    ]
    prvs.append(GaussianMechanism(noise_multiplier=4.0))
    accountant = PRVAccountant(prvs=prvs, max_self_compositions=[*steps, 3], eps_error=0.05, delta_error=1e-8)
    low, _, high = accountant.compute_epsilon(DELTA, [*steps, 3])
    runs = [run_of(make_run, *setting, name=f"s{i}") for i, setting in enumerate(some)]
    runs.append(run_of(make_run, 4.0, 1.0, 3, name="full"))
    assert low <= joint_release(runs, ADD_OR_REMOVE).epsilon(DELTA) <= high


@pytest.mark.parametrize(("noise", "q", "steps"), RUNS)
def test_opacus_is_never_below_and_agrees_where_it_does_the_same(
    noise: float, q: float, steps: int, make_run: RunMaker
) -> None:
    ours = single_run(run_of(make_run, noise, q, steps)).epsilon(DELTA)
    by_prv, by_rdp = OpacusPRV(), OpacusRDP()
    by_prv.history = by_rdp.history = [(noise, q, steps)]
    assert ours <= by_prv.get_epsilon(DELTA) <= ours + 0.011  # its own allowance is 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the largest it tries
        renyi = by_rdp.get_epsilon(DELTA)
    assert ours < renyi
    ours_by_rdp = joint_rdp([run_of(make_run, noise, q, steps)], ADD_OR_REMOVE, DELTA).epsilon(DELTA)
    assert ours < ours_by_rdp <= renyi * 1.01  # ours takes whole orders only, whose series is exact


def test_opacus_s_central_limit_accountant_promises_too_much(make_run: RunMaker) -> None:
    """Its epsilon is no bound: below the lower end of the bracket. We offer nothing of the kind."""
    noise, q, steps = 0.7, 0.001, 5000
    with pytest.warns(UserWarning, match="can underestimate"):
        by_clt = GaussianAccountant()
    by_clt.history = [(noise, q, steps)]
    promised = by_clt.get_epsilon(DELTA)
    step = PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=noise)
    accountant = PRVAccountant(prvs=[step], max_self_compositions=[steps], eps_error=0.01, delta_error=1e-10)
    low, *_ = accountant.compute_epsilon(DELTA, [steps])
    assert promised < low < single_run(run_of(make_run, noise, q, steps)).epsilon(DELTA)
