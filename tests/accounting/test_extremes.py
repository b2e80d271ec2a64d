"""Settings at the ends of what anybody could ask: every answer is a number that may be signed, or one clear error.

Where a closed form exists the value is compared with 60-digit arithmetic; everywhere the answers must be ordered
as the settings are.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from itertools import pairwise

import mpmath
import pytest

from accounting import gaussian
from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import generic, stepwise
from accounting.random_selection import random_selection_bound, random_selection_rdp_bound
from accounting.shifted_interpolation import shifted
from accounting.solver import solve
from accounting.trajectory import Candidate, Trajectory
from tests.accounting.conftest import RunMaker

RELATIONS = tuple(NeighboringRelation)
REPLACE = NeighboringRelation.REPLACE_ONE
MECHANISMS = ("linear_combination", "random_selection", "mixture")
NOISES, STEPS = (1e-3, 0.5, 16.0, 1e6), (1, 10**6)


def exact_epsilon(mu: float, delta: float) -> mpmath.mpf:
    """The root of the Gaussian profile in 60 digits, by bisection."""
    with mpmath.workdps(60):
        m, target = mpmath.mpf(mu), mpmath.mpf(delta)

        def profile(eps: mpmath.mpf) -> mpmath.mpf:
            tail = mpmath.erfc((eps / m - m / 2) / mpmath.sqrt(2)) / 2
            return tail - mpmath.exp(eps) * mpmath.erfc((eps / m + m / 2) / mpmath.sqrt(2)) / 2

        if profile(mpmath.mpf(0)) <= target:
            return mpmath.mpf(0)
        low, high = mpmath.mpf(0), m * (m / 2 + mpmath.sqrt(-2 * mpmath.log(target))) + 1
        for _ in range(240):
            middle = (low + high) / 2
            low, high = (low, middle) if profile(middle) <= target else (middle, high)
        return high


def require_sane(bound: Bound, delta: float) -> float:
    """No NaN, nothing negative, no infinity where there is noise; the pair holds when evaluated."""
    epsilon = bound.epsilon(delta)
    assert 0 <= epsilon < math.inf
    rounding = 1e-9 if bound.name == "random_selection_rdp" else 0.0  # two conversions, each rounded up
    assert 0 <= bound.delta(epsilon) <= delta * (1 + rounding)
    assert bound.mu is None or 0 <= bound.mu < math.inf
    return epsilon


@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-5, 0.5, 1 - 1e-10])
@pytest.mark.parametrize("noise", [0.05, 1.0, 60.0, 1e6])
@pytest.mark.parametrize("steps", STEPS)
def test_full_batch_runs_are_exact_at_any_delta(
    delta: float, noise: float, steps: int, make_run: RunMaker
) -> None:
    bound = single_run(make_run("s", noise, steps))
    found = require_sane(bound, delta)
    with mpmath.workdps(60):
        truth = exact_epsilon(float(2 * mpmath.sqrt(steps) / mpmath.mpf(noise)), delta)
    assert found >= truth * (1 - mpmath.mpf(10) ** -15)
    if delta < 0.9:  # of a delta near 1 a double shows few digits
        assert found <= truth * (1 + mpmath.mpf(10) ** -9) + mpmath.mpf(10) ** -13


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("q", [1e-6, 0.01, 0.999, 1.0])
def test_epsilon_falls_with_noise_and_rises_with_steps(
    q: float, relation: NeighboringRelation, make_run: RunMaker
) -> None:
    def epsilon(noise: float, steps: int) -> float:
        run = make_run("s", noise, steps, sampling_probability=q, relation=relation)
        return require_sane(single_run(run), 1e-5)

    table = {(noise, steps): epsilon(noise, steps) for noise in NOISES for steps in STEPS}
    for steps in STEPS:
        assert all(table[loud, steps] >= table[quiet, steps] for loud, quiet in pairwise(NOISES))
    for noise in NOISES:
        assert table[noise, 1] <= table[noise, 10**6]


@pytest.mark.parametrize("delta", [1e-300, 1e-18])
def test_a_delta_under_the_floor_of_a_discretised_profile_is_refused(
    delta: float, make_run: RunMaker
) -> None:
    bound = single_run(make_run("s", 1.0, 1000, sampling_probability=0.01))
    with pytest.raises(AccountingError, match="ask for a larger delta"):
        bound.epsilon(delta)
    assert require_sane(bound, bound.profile.smallest_delta) > 0


@pytest.mark.parametrize("value", [5e-324, 1e-301, 0.0, 1.0, -1e-5, math.nan, math.inf])
def test_a_delta_that_is_none_is_refused_everywhere(value: float, make_run: RunMaker) -> None:
    for bound in (single_run(make_run("s")), single_run(make_run("s", sampling_probability=0.1))):
        with pytest.raises(InvalidInput, match="delta must"):
            bound.epsilon(value)
    with pytest.raises(InvalidInput, match="delta must"):
        PrivacyBudget(epsilon=1.0, delta=value)


@pytest.mark.parametrize("value", [1e-13, 1.1e6, 1e308, 0.0, -1.0, math.nan, math.inf])
def test_a_budget_that_is_a_slip_of_the_pen_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="epsilon"):
        PrivacyBudget(epsilon=value, delta=1e-5)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("q", [0.1, 1.0])
def test_without_noise_delta_is_one_and_nothing_is_certified(
    q: float, relation: NeighboringRelation, make_run: RunMaker
) -> None:
    silent = make_run("silent", 0.0, 3, sampling_probability=q, relation=relation)
    noisy = make_run("noisy", 2.0, 3, sampling_probability=q, relation=relation)
    for bound in (single_run(silent), joint_release([silent, noisy], relation)):
        assert bound.delta(1e6) == 1.0
        assert bound.epsilon(1e-5) == math.inf  # documented: check it with isfinite
    with pytest.raises(BudgetInfeasible):
        solve(
            PrivacyBudget(epsilon=100.0, delta=1e-5),
            [Candidate(name="silent", trajectory=silent)],
            relation=relation,
            mechanisms=MECHANISMS,
        )


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("full_noise", [0.05, 0.3, 0.5, 1.0, 3.0, 1e6])
def test_a_poisson_run_beside_a_full_batch_run_of_any_loudness(
    full_noise: float, relation: NeighboringRelation, make_run: RunMaker
) -> None:
    full = make_run("full", full_noise, 1, relation=relation)
    poisson = make_run("poisson", 1.0, 100, sampling_probability=0.01, relation=relation)
    both = require_sane(joint_release([full, poisson], relation), 1e-5)
    own = require_sane(single_run(full), 1e-5)
    assert both >= max(own, single_run(poisson).epsilon(1e-5)) * (1 - 1e-6)  # their grids differ
    unsampled = make_run("poisson", 1.0, 100, relation=relation)
    assert both <= joint_release([full, unsampled], relation).epsilon(1e-5)


def lipschitz_runs(make_run: RunMaker, count: int = 3, **changes: object) -> list[Trajectory]:
    lengths = changes.pop("lengths", [20] * count)
    return [
        make_run(f"s{i}", 20.0 + i, lengths[i], update_lipschitz=1.0, **changes)  # type: ignore[index]
        for i in range(count)
    ]


@pytest.mark.parametrize("bound", [generic, shifted, stepwise])
def test_weights_at_the_ends_of_the_simplex(bound: object, make_run: RunMaker) -> None:
    runs = lipschitz_runs(make_run)

    def mu(*weights: float) -> float:
        found = bound(runs, list(weights), REPLACE).mu  # type: ignore[operator]
        assert found is not None
        return float(found)

    alone = single_run(runs[0]).mu
    assert alone is not None
    assert mu(1.0, 0.0, 0.0) == pytest.approx(alone, rel=1e-12)
    for little in (1e-12, 1e-300):
        almost = mu(1 - little, little, 0.0)
        if bound is generic:  # it charges the earlier steps of every run with a weight, however small
            pair = joint_release(runs[:2], REPLACE).mu
            assert pair is not None
            assert alone < almost <= pair * (1 + 1e-12)
        else:
            assert almost == pytest.approx(alone, rel=1e-9)
    # identical candidates: averaging two of them halves the noise's square, so mu is at least the run's own
    twins = [make_run(f"t{i}", 20.0, 20, update_lipschitz=1.0) for i in range(2)]
    same = bound(twins, [0.5, 0.5], REPLACE).mu  # type: ignore[operator]
    together = joint_release(twins, REPLACE).mu
    assert together is not None
    assert alone * (1 - 1e-9) <= same <= together * (1 + 1e-9)


def test_unequal_lengths(make_run: RunMaker) -> None:
    runs = lipschitz_runs(make_run, lengths=[1, 1000, 10**6])
    whole = joint_release(runs, REPLACE).mu
    assert whole is not None
    for weights in ([1 / 3] * 3, [1 - 2e-12, 1e-12, 1e-12], [1e-12, 1e-12, 1 - 2e-12]):
        by_generic, by_shifted = generic(runs, weights, REPLACE).mu, shifted(runs, weights, REPLACE).mu
        assert by_generic is not None
        assert by_shifted is not None
        assert 0 < by_shifted <= by_generic * (1 + 1e-9) <= whole * (1 + 2e-9)


@pytest.mark.parametrize("q", [0.01, 1.0])
def test_selection_at_the_ends_of_the_simplex(q: float, make_run: RunMaker) -> None:
    runs = [
        make_run(f"s{i}", 4.0 + i, 50, sampling_probability=q, relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
        for i in range(3)
    ]
    relation = runs[0].neighboring_relation
    singles = [single_run(run).epsilon(1e-6) for run in runs]
    assert random_selection_bound([0.0, 1.0, 0.0], runs, relation).epsilon(1e-6) == singles[1]
    rare = random_selection_bound([1e-12, 1 - 1e-12, 0.0], runs, relation)
    assert singles[1] * (1 - 1e-12) <= require_sane(rare, 1e-6) <= singles[0]
    by_rdp = random_selection_rdp_bound([1e-12, 1 - 1e-12, 0.0], runs, relation, 1e-6)
    assert require_sane(rare, 1e-6) <= require_sane(by_rdp, 1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 1e4])
@pytest.mark.parametrize("delta", [1e-300, 1e-5])
def test_budgets_at_the_ends(epsilon: float, delta: float, make_candidates: object) -> None:
    mu = gaussian.mu_for(epsilon, delta)
    noises = [2 * math.sqrt(20) / (mu * share) for share in (0.7, 0.9, 1.2, 1.5)]
    candidates = make_candidates(noises, update_lipschitz=1.0)  # type: ignore[operator]
    plan = solve(
        PrivacyBudget(epsilon=epsilon, delta=delta), candidates, relation=REPLACE, mechanisms=MECHANISMS
    )
    assert 0 < plan.epsilon <= epsilon
    assert math.fsum(plan.weights.values()) == pytest.approx(1, abs=1e-12)
    assert plan.bound.delta(plan.epsilon) <= delta


def test_identical_candidates_are_as_good_as_each_other(make_candidates: object) -> None:
    candidates = make_candidates([16.0] * 6, update_lipschitz=1.0)  # type: ignore[operator]
    own = single_run(candidates[0].trajectory).epsilon(1e-5)
    plan = solve(PrivacyBudget(epsilon=own, delta=1e-5), candidates, relation=REPLACE, mechanisms=MECHANISMS)
    assert plan.epsilon <= own
    assert plan.objective >= -max(m for m in (_variance(c) for c in candidates)) * (1 + 1e-12)


def _variance(candidate: Candidate) -> float:
    return sum(
        s.steps * (s.learning_rate * s.noise_multiplier * s.max_grad_norm / s.expected_batch_size) ** 2
        for s in candidate.trajectory.segments
    )


THOUSAND = """
import resource
from tests.benchmarks.bench_accounting import run_of, segment_of
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.solver import solve
from accounting.trajectory import Candidate

relation = NeighboringRelation.ADD_OR_REMOVE_ONE
candidates = [
    Candidate(name=f"c{i}", trajectory=run_of(f"c{i}", segment_of(f"c{i}", 20.0 + 0.1 * i, 50)))
    for i in range(1000)
]
plan = solve(
    PrivacyBudget(epsilon=1.0, delta=1e-5),
    candidates,
    relation=relation,
    mechanisms=("linear_combination", "random_selection", "mixture"),
)
assert 0 < plan.epsilon <= 1.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_thousand_candidates_fit_into_two_gibibytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THOUSAND],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30)),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2**20  # kilobytes
