"""Calibration: the noise found never overshoots its target, wastes nothing, and agrees with dp_accounting."""

from __future__ import annotations

import itertools
import math
import random

import dp_accounting
import pytest
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import PRESETS, TrainingShape, calibrated_noise
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput
from accounting.joint_release import single_run
from accounting.least_noise import LARGEST, SMALLEST, least_noise

ADD_OR_REMOVE, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
DP_RELATION = {
    ADD_OR_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def target(epsilon: float, delta: float) -> PrivacyBudget:
    return PrivacyBudget(epsilon=epsilon, delta=delta)


def poisson(seed: int) -> tuple[PrivacyBudget, TrainingShape]:
    """Random settings of Poisson sampling, the odd ones beyond epsilon 10."""
    draw = random.Random(seed)
    low, high = (10, 100) if seed % 2 else (0.1, 10)
    shape = TrainingShape(
        steps=draw.randint(1, 100),
        relation=REPLACE if seed % 3 else ADD_OR_REMOVE,
        sampling_probability=math.ceil(2**24 * 10 ** draw.uniform(-2, -0.3)) / 2**24,
    )
    epsilon = math.exp(draw.uniform(math.log(low), math.log(high)))
    return target(epsilon, 10 ** draw.uniform(-8, -4)), shape


POISSON = [poisson(seed) for seed in (1, 2, 3)]


@given(
    epsilon=st.floats(-5, 5).map(lambda x: 20 * math.exp(x / 3 * math.log(10))),  # 0.009 to 43,000
    log_delta=st.floats(-30, -2),
    steps=st.integers(1, 100_000),
    relation=st.sampled_from(NeighboringRelation),
)
def test_full_batch_noise_fits_and_a_thousandth_less_does_not(
    epsilon: float, log_delta: float, steps: int, relation: NeighboringRelation
) -> None:
    """By Balle and Wang's formula in 60 digits, independently of the product."""
    budget = target(epsilon, 10**log_delta)
    shape = TrainingShape(steps=steps, relation=relation)
    noise = calibrated_noise(budget, shape)
    assert float(f"{noise:.6g}") == noise
    assert exact_delta(noise, shape, epsilon) <= mpf(budget.delta)
    assert exact_delta(noise * 0.999, shape, epsilon) > mpf(budget.delta)
    assert (
        shape.bound(noise).epsilon(budget.delta) <= epsilon < shape.bound(noise * 0.999).epsilon(budget.delta)
    )


def exact_delta(noise: float, shape: TrainingShape, epsilon: float) -> mpf:
    with mp.workdps(60):
        mu = shape.relation.full_batch_factor * mp.sqrt(shape.steps) / mpf(noise)
        # The normal's tails by erfc: mpmath's ncdf loses them.
        upper = mp.erfc((mpf(epsilon) / mu - mu / 2) / mp.sqrt(2)) / 2
        return upper - mp.exp(epsilon) * mp.erfc((mpf(epsilon) / mu + mu / 2) / mp.sqrt(2)) / 2


@pytest.mark.parametrize(("budget", "shape"), POISSON)
def test_poisson_noise_fits_and_a_thousandth_less_does_not(
    budget: PrivacyBudget, shape: TrainingShape
) -> None:
    noise = calibrated_noise(budget, shape)
    assert float(f"{noise:.6g}") == noise
    assert single_run(shape.run(noise)).epsilon(budget.delta) <= budget.epsilon
    assert single_run(shape.run(noise * 0.999)).epsilon(budget.delta) > budget.epsilon


@pytest.mark.parametrize(("budget", "shape"), POISSON)
def test_poisson_noise_is_neither_below_nor_much_above_what_dp_accounting_needs(
    budget: PrivacyBudget, shape: TrainingShape
) -> None:
    """Below the epsilon at our noise by its optimistic estimate, no accountant could go; its pessimistic one shows
    that 0.5 % less noise would be too little."""
    noise = calibrated_noise(budget, shape)

    def epsilon(noise_multiplier: float, *, pessimistic: bool) -> float:
        step = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=noise_multiplier,
            sensitivity=1,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3 if budget.epsilon > 10 else 1e-4,
            sampling_prob=shape.sampling_probability,
            neighboring_relation=DP_RELATION[shape.relation],
        )
        return step.self_compose(shape.steps).get_epsilon_for_delta(budget.delta)

    assert epsilon(noise, pessimistic=False) <= budget.epsilon
    assert epsilon(noise * 0.995, pessimistic=True) > budget.epsilon


@pytest.mark.parametrize(
    ("relation", "epsilon", "steps", "q"),
    [(REPLACE, 1.0, 160, 1.0), (ADD_OR_REMOVE, 20.0, 50, 1.0), (REPLACE, 3.0, 10, 0.1)],
)
def test_dp_accountings_own_calibration_agrees(
    relation: NeighboringRelation, epsilon: float, steps: int, q: float
) -> None:
    """Its accountant discretises pessimistically, so it asks for a little more noise than the exact formula: ours is
    never above by more than its tolerance and our sixth digit, and at most 0.5 % below."""
    shape = TrainingShape(steps=steps, relation=relation, sampling_probability=q)
    ours = calibrated_noise(target(epsilon, 1e-5), shape)

    def event(noise: float) -> dp_accounting.DpEvent:
        if q == 1:  # full-batch steps compose to a single one, of which a record moves the sum by k norms
            return dp_accounting.GaussianDpEvent(noise / relation.full_batch_factor / math.sqrt(steps))
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(step, steps)

    theirs = dp_accounting.calibrate_dp_mechanism(
        lambda: pld_privacy_accountant.PLDAccountant(
            DP_RELATION[relation if q < 1 else ADD_OR_REMOVE], value_discretization_interval=1e-3
        ),
        event,
        epsilon,
        1e-5,
        bracket_interval=dp_accounting.ExplicitBracketInterval(0.98 * ours, 1.02 * ours),
        tol=1e-3 * ours,
    )
    assert theirs * 0.995 <= ours <= theirs * (1 + 1e-5)


def test_the_demos_multipliers_are_found_again() -> None:
    shape = TrainingShape(steps=160, relation=REPLACE)
    for epsilon, written in {0.5: 177.90, 1.0: 94.379, 2.0: 50.440, 4.0: 27.352, 8.0: 15.185}.items():
        noise = calibrated_noise(target(epsilon, 1e-5), shape)
        assert written * (1 - 1e-4) < noise <= written


@pytest.mark.parametrize(
    ("epsilon", "delta", "steps"),
    [
        (1e-12, 1e-5, 100_000),
        (1e5, 1e-5, 1),
        (1.0, 1e-300, 1000),
        (1e-3, 1e-300, 1000),
        (1.0, 0.999, 1),
        (100.0, 0.5, 100_000),
    ],
)
def test_extremes_of_full_batch(epsilon: float, delta: float, steps: int) -> None:
    shape = TrainingShape(steps=steps, relation=REPLACE)
    noise = calibrated_noise(target(epsilon, delta), shape)
    assert shape.bound(noise).epsilon(delta) <= epsilon < shape.bound(noise * 0.999).epsilon(delta)


def test_sampling_of_nearly_every_record_is_nearly_full_batch() -> None:
    budget = target(5.0, 1e-6)
    full = calibrated_noise(budget, TrainingShape(steps=3, relation=REPLACE))
    nearly = TrainingShape(steps=3, relation=REPLACE, sampling_probability=1 - 2**-24)
    assert full * 0.999 <= calibrated_noise(budget, nearly) <= full


def test_more_steps_and_smaller_budgets_need_more_noise() -> None:
    def noise(epsilon: float, steps: int, q: float = 1.0) -> float:
        shape = TrainingShape(steps=steps, relation=REPLACE, sampling_probability=q)
        return calibrated_noise(target(epsilon, 1e-5), shape)

    assert all(noise(a, 10) > noise(b, 10) for a, b in itertools.pairwise([0.1, 1, 10, 100]))
    assert all(noise(1, a) < noise(1, b) for a, b in itertools.pairwise([1, 10, 100, 1000]))
    assert noise(1, 10, 0.1) < noise(1, 10)


@pytest.mark.parametrize(("epsilon", "steps", "q"), [(1.0, 1, 1e-7), (1.0, 100, 1e-7), (1e6, 1, 1.0)])
def test_a_target_that_needs_no_noise_is_refused(epsilon: float, steps: int, q: float) -> None:
    shape = TrainingShape(steps=steps, relation=ADD_OR_REMOVE, sampling_probability=q)
    with pytest.raises(InvalidInput, match="practically no noise"):
        calibrated_noise(target(epsilon, 1e-5), shape)


def test_a_target_beyond_all_noise_is_refused() -> None:
    with pytest.raises(BudgetInfeasible, match="train for fewer steps"):
        calibrated_noise(target(1e-12, 1e-12), TrainingShape(steps=100, relation=REPLACE))


def test_a_delta_too_small_for_poisson_sampling_is_refused() -> None:
    shape = TrainingShape(steps=10, relation=REPLACE, sampling_probability=0.1)
    with pytest.raises(AccountingError, match="ask for a larger delta"):
        calibrated_noise(target(1.0, 1e-30), shape)


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"steps": 1.0}, {"sampling_probability": 0.0}, {"sampling_probability": math.nan}],
)
def test_shapes_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        TrainingShape(**({"steps": 10, "relation": REPLACE} | change))  # type: ignore[arg-type]


def test_presets_lie_in_the_ranges_they_are_named_for() -> None:
    ranges = {"strong": (0.5, 1), "medium": (1, 3), "weak": (3, 8)}
    assert set(PRESETS) == set(ranges)
    assert all(low <= PRESETS[name] <= high for name, (low, high) in ranges.items())


def test_the_same_question_has_the_same_answer() -> None:
    budget = target(3.0, 1e-5)
    shape = TrainingShape(steps=10, relation=REPLACE, sampling_probability=0.1)
    before = calibrated_noise(budget, shape)
    calibrated_noise.cache_clear()
    assert calibrated_noise(budget, shape) == before


@given(root=st.floats(-2, 8).map(lambda x: 10**x), off=st.floats(-3, 3), power=st.floats(0.3, 3))
def test_the_search_finds_a_root_wherever_it_begins(root: float, off: float, power: float) -> None:
    asked: list[float] = []

    def epsilon(noise: float) -> float:
        asked.append(noise)
        return (root / noise) ** power

    found = least_noise(epsilon, 1.0, root * 10**off, 6)
    assert found is not None
    assert root <= found <= root * (1 + 2e-5)
    assert len(asked) < 40


def test_the_search_at_jumps_and_at_its_ends() -> None:
    jump = least_noise(lambda noise: 1e9 if noise < 7.123 else 0.0, 1.0, 100.0, 3)
    assert jump == 7.13
    unresolved = least_noise(lambda noise: math.inf if noise < 20 else 2 / noise, 1.0, 1.0, 3)
    assert unresolved in (20.0, 20.1)
    assert least_noise(lambda noise: 2.0, 1.0, 1.0, 3) is None
    assert least_noise(lambda noise: math.inf, 1.0, LARGEST, 3) is None
    assert least_noise(lambda noise: 0.0, 1.0, 1.0, 3) == SMALLEST


def test_a_shape_is_accounted_as_its_run() -> None:
    shape = TrainingShape(steps=20, relation=REPLACE)
    assert shape.bound(16.0).epsilon(1e-5) == gaussian.epsilon(shape.bound(16.0).mu or 0.0, 1e-5)
    assert shape.run(16.0, "a").segments[0].id == "a"
