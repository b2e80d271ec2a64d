"""The plan for a budget: which runs, with which weights, from what a calculator's file says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible, InvalidInput, RemergeError
from accounting.frontier import Point
from accounting.plan import Mechanism, Plan
from accounting.selection_rules import worded
from accounting.solver import solve
from accounting.training_hint import training_hint
from accounting.trajectory import Candidate, Trajectory
from tasks.account_answer import Answer, Option
from tasks.account_bounds import Account, account_of, with_certified
from tasks.account_draw import Draw, Draws, best_draw
from tasks.account_file import AccountFile
from tasks.account_frontier import frontier_of
from tasks.account_runs import Release, Run

NO_UTILITIES = "The file does not state a utility for every run."
NOISE_ADDED = (
    "No release fits the budget as it is, so noise is added to a merge of runs of one recipe; no stated utility tells "
    "what that costs."
)
_CAP_ADVISED = 4  # times the budget's epsilon; the default of a policy's realised_epsilon_cap


def answer_of(
    file: AccountFile, runs: Mapping[str, Run], where: str, *, with_frontier: bool = False
) -> Answer:
    """Solve a file's budget.

    Args:
        file: as read.
        runs: its runs.
        where: its name, for errors.
        with_frontier: solve eight other budgets too, which takes several times as long.

    Raises:
        InvalidInput: no budget, or nothing to compare the runs by.
        BudgetInfeasible: nothing fits; says what would.
    """
    if file.budget is None:
        raise InvalidInput(
            f"{where}: the field budget is missing; say what is allowed, for example budget: {{epsilon: 2}}."
        )
    task = _Task(
        runs=tuple(runs.values()),
        budget=PrivacyBudget(epsilon=file.budget.epsilon, delta=file.delta),
        relation=NeighboringRelation(file.neighboring_relation),
        mechanisms=tuple(Mechanism(name) for name in file.mechanisms),
        cap=file.budget.realised_epsilon_cap,
        where=where,
    )
    utilities = {run.name: run.utility for run in task.runs if run.utility is not None}
    stated = len(utilities) == len(task.runs)
    answer = _by_utility(task, utilities) if stated else _by_noise(task, utilities)
    answer = replace(answer, notes=(*answer.notes, *_weak_draws(answer, task.cap)))
    return replace(answer, frontier=_frontier(task, answer)) if with_frontier else answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    runs: tuple[Run, ...]
    budget: PrivacyBudget
    relation: NeighboringRelation
    mechanisms: tuple[Mechanism, ...]
    cap: float | None  # nats; largest epsilon of a run itself that may be drawn
    where: str

    @property
    def candidates(self) -> list[Candidate]:
        """The runs known step by step."""
        return [
            Candidate(name=run.name, trajectory=run.known_by, utility=run.utility)
            for run in self.runs
            if isinstance(run.known_by, Trajectory)
        ]

    def plan(self, selection: str, *, fresh_noise: bool = False) -> Plan:
        """The one door to the solver."""
        try:
            return solve(
                self.budget,
                self.candidates,
                relation=self.relation,
                mechanisms=self.mechanisms,
                selection=selection,
                realised_epsilon_cap=self.cap,
                allow_fresh_noise=fresh_noise,
            )
        except InvalidInput as error:
            # Utilities also decide between runs of different recipes.
            hint = ", or state a utility for every run" if "noise" in error.message else ""
            raise InvalidInput(f"{self.where}: {error.message.rstrip('.')}{hint}.") from None

    def account(self, plan: Plan) -> Account:
        """Every bound of a plan's release."""
        used = tuple(run for run in self.runs if run.name in plan.weights)
        release = Release(
            kind=plan.mechanism.value,
            runs=used,
            weights=tuple(plan.weights[run.name] for run in used),
            relation=self.relation,
            fresh_noise=plan.fresh_noise,
        )
        return with_certified(account_of(release, self.budget.delta), plan.bound, plan.epsilon)


def _by_noise(task: _Task, utilities: Mapping[str, float]) -> Answer:
    """Fresh noise, which is one thing more to be done right, is the last resort."""
    if not task.candidates:
        raise InvalidInput(
            f"{task.where}: these runs are known only by stated guarantees, which say nothing of their noise; "
            "state a utility for every run to choose between them."
        )
    notes: tuple[str, ...] = ()
    if utilities:
        silent = ", ".join(run.name for run in task.runs if run.name not in utilities)
        notes = (f"The stated utilities are not used, because none is stated for {silent}.",)
    try:
        plan = task.plan("noise")
    except BudgetInfeasible:
        plan = task.plan("noise", fresh_noise=True)
    return _planned(task, plan, NO_UTILITIES, notes)


def _by_utility(task: _Task, utilities: Mapping[str, float]) -> Answer:
    """The solver's plan by utilities, or a draw that includes runs known only by a stated guarantee."""
    plan, refusal, draws = None, None, None
    if task.candidates:
        try:
            plan = task.plan("stated")
        except RemergeError as error:
            refusal = error
    if len(task.candidates) < len(task.runs) and Mechanism.RANDOM_SELECTION in task.mechanisms:
        draws = best_draw(task.runs, utilities, task.budget, task.relation, task.cap)
        drawn = draws.best
        if drawn is not None and (plan is None or drawn.expected_utility >= (plan.expected_utility or 0.0)):
            return _drawn(task, draws, drawn, plan)
    if plan is not None:
        return _planned(task, plan, None, ())
    if isinstance(refusal, BudgetInfeasible):
        with suppress(RemergeError):
            return _planned(task, task.plan("noise", fresh_noise=True), NOISE_ADDED, ())
    if refusal is not None and (draws is None or not isinstance(refusal, BudgetInfeasible)):
        raise refusal
    raise _infeasible(task, draws)  # of all runs, not only of those that the solver knows


def _planned(task: _Task, plan: Plan, unknown: str | None, notes: tuple[str, ...]) -> Answer:
    """What the solver answers; `unknown` says why there is no expected utility, where there is none."""
    by_utility = plan.expected_utility is not None
    stated: dict[str, str] = {}
    if not by_utility:
        reason = "known only by a stated guarantee, so its noise cannot be compared"
        stated = {run.name: reason for run in task.runs if run.stated is not None}
    return Answer(
        best=_option(plan),
        bound=plan.bound,
        budget=task.budget,
        selection=plan.selection,
        utility_reason=unknown,
        account=task.account(plan),
        member_epsilons=plan.member_epsilons,
        components=plan.components,
        alternatives=tuple(
            Option(
                label=other.label,
                weights=other.weights,
                bound=other.bound_name,
                epsilon=other.epsilon,
                expected_utility=other.objective if by_utility else None,
                fresh_noise=other.fresh_noise,
            )
            for other in plan.alternatives
        ),
        set_aside={**plan.set_aside, **stated},
        notes=(*notes, *plan.notes),
    )


def _drawn(task: _Task, draws: Draws, best: Draw, plan: Plan | None) -> Answer:
    """A random selection that includes stated guarantees, with the solver's plan for the other runs beside it."""
    alternatives = [] if plan is None else [_option(plan)]
    if draws.best_single is not None:
        alternatives.append(_drawn_option("best_single", draws.best_single))
    return Answer(
        best=_drawn_option(Mechanism.RANDOM_SELECTION.value, best),
        bound=replace(best.bound, assumptions=worded("stated", best.bound.assumptions)),
        budget=task.budget,
        selection="stated",
        utility_reason=None,
        account=with_certified(account_of(best.release, task.budget.delta), best.bound, best.epsilon),
        member_epsilons={run.name: draws.epsilons[run.name] for run in best.release.runs},
        components=(),
        alternatives=tuple(alternatives),
        set_aside=draws.set_aside,
        notes=() if plan is None else plan.notes,
    )


def _option(plan: Plan) -> Option:
    return Option(
        label=plan.mechanism.value,
        weights=plan.weights,
        bound=plan.bound.name,
        epsilon=plan.epsilon,
        expected_utility=plan.expected_utility,
        fresh_noise=plan.fresh_noise,
    )


def _drawn_option(label: str, draw: Draw) -> Option:
    weights = draw.release.weights or ()
    return Option(
        label=label,
        weights={run.name: weight for run, weight in zip(draw.release.runs, weights, strict=True)},
        bound=draw.bound.name,
        epsilon=draw.epsilon,
        expected_utility=draw.expected_utility,
    )


def _weak_draws(answer: Answer, cap: float | None) -> tuple[str, ...]:
    """With delta to spare, a program puts a little weight on runs that are hardly private at all."""
    if cap is not None:
        return ()
    limit = _CAP_ADVISED * answer.budget.epsilon
    return tuple(
        f"{name} may be drawn, although its own epsilon is "
        f"{'not known' if epsilon is None else f'as large as {epsilon:.3g}'} at this delta; set "
        f"realised_epsilon_cap in budget (policies use {limit:g}) to keep such runs out."
        for name, epsilon in answer.drawn_epsilons.items()
        if epsilon is None or epsilon > limit
    )


def _frontier(task: _Task, answer: Answer) -> tuple[Point, ...]:
    return frontier_of(
        task.candidates,
        task.budget,
        task.relation,
        task.mechanisms,
        selection=answer.selection,
        cap=task.cap,
        fresh_noise=answer.best.fresh_noise > 0,
    )


def _infeasible(task: _Task, draws: Draws | None) -> BudgetInfeasible:
    """No random selection fits, and no other mechanism was allowed or possible."""
    known = {} if draws is None else {n: e for n, e in draws.epsilons.items() if e is not None}
    best = min(known, key=lambda name: known[name], default=None)
    hint = "ask for a larger epsilon or delta"
    if task.candidates:
        hint = training_hint(task.budget, task.candidates[0].trajectory, task.relation)
    offer = "no run has an epsilon at this delta"
    if best is not None:
        offer = f"the smallest epsilon on offer is {known[best]:.4g}, of run {best}"
        if known[best] <= task.budget.epsilon:
            hint = "raise realised_epsilon_cap or allow linear_combination"
    return BudgetInfeasible(
        f"No random selection of these runs reaches epsilon {task.budget.epsilon:g} at delta "
        f"{task.budget.delta:g}; {offer}, so {hint}.",
        target=task.budget.epsilon,
        best=None if best is None else known[best],
        hint=hint,
    )
