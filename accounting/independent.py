"""A certificate's numbers derived a second time, by code that the solver and its bounds never run.

Everything here starts from the recorded settings and the weights. What each check proves, and its tolerance:

- **mu** of `joint` and `generic`: by exact fractions; the stated mu is never below it, and at most 1e-9 above.
- **mu of `shifted`**: payments found anew, made feasible and put into the theorem, prove a mu that differs from the
  stated one by 1e-3 at most; and linear updates with the recorded constants, which are among those that the theorem
  is about, really leak a mu that the stated one is not below.
- **epsilon, profile, realised outcome, components**: each stated pair holds, and is not loose, by numerical
  integration of the Gaussian divergence. Tolerance 1e-9 of delta; for `shifted` what 1e-3 of mu makes of delta.
- **the same with Poisson steps**, by dp_accounting's distributions: 2e-2 of delta, and 1e-10.
- **merges of tasks**: the worst task, and under replace-one the worst two that a record moves between, both ways.
- **the same by a Renyi bound**: each stated pair holds; that it is loose is known.

Nothing is shared with `joint_release`, `linear_combination`, the modules of shifted interpolation,
`random_selection`, `mixtures`, `parallel_tasks`, `gaussian`, `profile` or `pld`; a test reads the imports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from accounting.certificate import Certificate
from accounting.checks import Check, failed, not_compared, within
from accounting.errors import AccountingError, NotDerivedAgain, RemergeError
from accounting.independent_merges import (
    SHIFTED_RELATIVE,
    generic_square,
    joint_square,
    require_apart,
    shifted_mu,
)
from accounting.independent_profiles import CheckedProfile, drawn_profile, gaussian_profile, steps_profile
from accounting.independent_steps import distinct_steps
from accounting.independent_tasks import steps_by_task, tasks_profile, worst_square
from accounting.plan import Mechanism
from accounting.trajectory import Trajectory

RENYI = ("joint_rdp", "random_selection_rdp")
_ABOVE = 1e-9  # relative, of an exact mu
_SEARCHED = 1e-7  # relative, of an epsilon below which the stated delta must no longer hold


def derive_again(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    """Compare a certificate's mu, epsilon, profile, components and realised outcome with a second derivation.

    Args:
        certificate: the claim.
        trajectories: by candidate name, all that the certificate names.

    Returns:
        One check for each number: failed where the runs are outside the theorem that the bound needs, not compared
        where the theorem covers them and only this second derivation does not.
    """
    checks: list[Check] = []
    cached: dict[int, CheckedProfile] = {}

    def attempt(what: str, find: Callable[[], list[Check]]) -> None:
        try:
            checks.extend(find())
        except NotDerivedAgain as error:
            checks.append(not_compared(what, error.message))
        except RemergeError as error:
            checks.append(failed(what, error.message))

    def component_profile(index: int) -> CheckedProfile:
        if index not in cached:
            part = certificate.components[index]
            merge = [(weight, trajectories[name]) for name, weight in part.weights.items()]
            cached[index] = _merge_profile(part.bound, merge, certificate, part.fresh_noise)
        return cached[index]

    def whole() -> list[Check]:
        profile = _whole_profile(certificate, trajectories, component_profile)
        renyi = certificate.bound in RENYI
        found = [_pair("epsilon", certificate.epsilon, certificate.delta, profile, renyi)]
        for number, (epsilon, delta) in enumerate(certificate.profile):
            found.append(_point(f"profile[{number}]", epsilon, delta, profile, renyi))
        return found

    if certificate.mu is not None:
        attempt("mu, derived again", lambda: _mu_checks(certificate, trajectories))
    attempt("epsilon and profile, derived again", whole)
    for index, part in enumerate(certificate.components):
        what = f"epsilon of component {part.name}"
        attempt(
            what,
            lambda i=index, e=part.epsilon, w=what: [  # type: ignore[misc]
                _pair(w, e, certificate.delta, component_profile(i), False)
            ],
        )
    if certificate.realised is not None:
        attempt(
            "realised epsilon, derived again",
            lambda: [_realised_check(certificate, trajectories, component_profile)],
        )
    return checks


def _mu_checks(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    stated = certificate.mu
    assert stated is not None
    merge = [(weight, trajectories[name]) for name, weight in certificate.weights.items()]
    if certificate.bound == "shifted":
        low, mu = _shifted(merge, certificate, certificate.fresh_noise)
        bottom = max(low * (1 - _ABOVE), mu * (1 - SHIFTED_RELATIVE))
        return [
            within(
                "mu, derived again by payments found anew",
                stated,
                (bottom, mu * (1 + SHIFTED_RELATIVE)),
                mu,
            )
        ]
    square = _exact_square(certificate.bound, merge, certificate, trajectories)
    root = math.sqrt(square)
    exact = square <= Fraction(stated) ** 2 <= square * (1 + Fraction(_ABOVE)) ** 2
    check = within(
        "mu, derived again by exact fractions", stated, (root * (1 - 1e-15), root * (1 + _ABOVE)), root
    )
    if check.holds and not exact:
        return [
            failed(
                "mu, derived again by exact fractions", f"The stated mu {stated!r} is below the exact one."
            )
        ]
    return [check]


def _exact_square(
    bound: str,
    merge: Sequence[tuple[float, Trajectory]],
    certificate: Certificate,
    trajectories: Mapping[str, Trajectory],
) -> Fraction:
    relation = certificate.neighboring_relation
    if bound == "generic":
        require_apart([run for _, run in merge])
        if len(merge) == 1 and certificate.fresh_noise == 0:  # the weight cancels
            return joint_square(distinct_steps([merge[0][1]]), relation)
        return generic_square(merge, relation, certificate.fresh_noise)
    names = certificate.consulted or tuple(certificate.weights)
    runs = {name: trajectories[name] for name in names}
    if bound == "parallel_tasks":
        return worst_square(steps_by_task(runs, certificate.tasks), relation)
    return joint_square(distinct_steps(list(runs.values())), relation)


def _whole_profile(
    certificate: Certificate,
    trajectories: Mapping[str, Trajectory],
    component_profile: Callable[[int], CheckedProfile],
) -> CheckedProfile:
    """The profile of the certified mechanism, by the theorem that it names."""
    if certificate.bound == "parallel_tasks":
        names = certificate.consulted or tuple(certificate.weights)
        steps = steps_by_task({name: trajectories[name] for name in names}, certificate.tasks)
        return tasks_profile(steps, certificate.neighboring_relation)
    if certificate.consulted:
        return _released([trajectories[name] for name in certificate.consulted], certificate)
    if certificate.bound == "mixture":
        return drawn_profile([(c.weight, component_profile(i)) for i, c in enumerate(certificate.components)])
    if certificate.bound in ("random_selection_pld", "random_selection_rdp"):
        if certificate.mechanism is not Mechanism.RANDOM_SELECTION:
            raise AccountingError("The bound of a random selection does not go with another mechanism.")
        return drawn_profile(
            [(w, _released([trajectories[n]], certificate)) for n, w in certificate.weights.items()]
        )
    merge = [(weight, trajectories[name]) for name, weight in certificate.weights.items()]
    return _merge_profile(certificate.bound, merge, certificate, certificate.fresh_noise)


def _merge_profile(
    bound: str, merge: Sequence[tuple[float, Trajectory]], certificate: Certificate, fresh_noise: float
) -> CheckedProfile:
    """The profile of one merge by a named theorem."""
    if bound in ("generic", "shifted") and certificate.mechanism is Mechanism.OPERATOR:
        raise AccountingError(
            "Only a linear combination has a tighter bound than releasing its models together."
        )
    if bound == "shifted":
        low, mu = _shifted(merge, certificate, fresh_noise)
        return gaussian_profile(
            max(low * (1 - _ABOVE), mu * (1 - SHIFTED_RELATIVE)), mu * (1 + SHIFTED_RELATIVE)
        )
    if bound == "generic" and (len(merge) > 1 or fresh_noise > 0):
        mu = math.sqrt(generic_square(merge, certificate.neighboring_relation, fresh_noise))
        return gaussian_profile(mu, mu)
    return _released([run for _, run in merge], certificate)


def _shifted(
    merge: Sequence[tuple[float, Trajectory]], certificate: Certificate, fresh_noise: float
) -> tuple[float, float]:
    """(lower limit, mu); a merge is post-processing of its runs, so never more than their joint release."""
    low, mu = shifted_mu(merge, certificate.neighboring_relation, fresh_noise)
    joint = joint_square(distinct_steps([run for _, run in merge]), certificate.neighboring_relation)
    return low, min(mu, math.sqrt(joint))


def _released(runs: Sequence[Trajectory], certificate: Certificate) -> CheckedProfile:
    """The profile of releasing runs together."""
    steps = distinct_steps(runs)
    relation = certificate.neighboring_relation
    if any(segment.sampling_probability < 1 for segment in steps.values()):
        return steps_profile(steps, relation)
    mu = math.sqrt(joint_square(steps, relation))
    return gaussian_profile(mu, mu)


def _realised_check(
    certificate: Certificate,
    trajectories: Mapping[str, Trajectory],
    component_profile: Callable[[int], CheckedProfile],
) -> Check:
    realised = certificate.realised
    assert realised is not None
    names = [component.name for component in certificate.components]
    if realised.candidate in names:
        profile = component_profile(names.index(realised.candidate))
    else:
        profile = _released([trajectories[realised.candidate]], certificate)
    return _pair(
        f"realised epsilon of {realised.candidate}", realised.epsilon, realised.delta, profile, False
    )


def _point(what: str, epsilon: float, delta: float, profile: CheckedProfile, one_sided: bool) -> Check:
    """A point of a profile: the delta at its epsilon holds, and is not loose."""
    low, high = profile.range(epsilon)
    smallest = low if not one_sided else max(profile.low(epsilon)) * (1 - profile.relative) - profile.floor
    allowed = (smallest, 1.0 if one_sided else high)
    return within(f"delta at {what}, derived again", delta, allowed, max(profile.high(epsilon)))


def _pair(what: str, epsilon: float, delta: float, profile: CheckedProfile, one_sided: bool) -> Check:
    """An epsilon at a delta, compared by the delta at that epsilon: the pair holds, a smaller epsilon would not."""
    low, _ = profile.range(epsilon)
    _, high = profile.range(epsilon * (1 - _SEARCHED))
    found = max(profile.high(epsilon))
    label = f"delta at {what}, derived again"
    if one_sided or epsilon == 0:
        return within(label, delta, (low, 1.0), found)
    return within(label, delta, (low, high), found)
