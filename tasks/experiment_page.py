"""The page of a portfolio experiment: what each candidate protects and gets right, and what merges add to it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from accounting.errors import RemergeError
from accounting.joint_release import single_run
from accounting.words import rounded_up
from infra.documents import Policy, PortfolioManifest
from tasks.candidates import LoadedCandidate, accountable
from tasks.data import Rows, load_public_gate
from tasks.merging import linear_combination
from tasks.report import BOUND_WORDS, table, weights_in_words
from tasks.solving import solve_policy
from tasks.validation import accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A candidate, or a merge for a budget, as it stands on the public-gate rows."""

    epsilon: float  # nats, at the page's delta; an upper bound
    accuracy: float  # in [0, 1]


def portfolio_page(
    manifest: PortfolioManifest,
    loaded: dict[str, LoadedCandidate],
    *,
    title: str,
    command: str,
    delta: float,
    budgets: Sequence[float],
) -> str:
    """Markdown: a table of the candidates, and one of the budgets between them.

    It scores private candidates that nobody has released, on held-out public rows. Nothing is chosen by the scores;
    the page itself is a release of them, which is why it may be made of public data only.

    Args:
        command: that made the portfolio and this page.
        budgets: epsilons, nats, at `delta`.
    """
    rows = load_public_gate(manifest)
    candidates = {
        name: Measured(
            epsilon=single_run(one.trajectory).epsilon(delta),
            accuracy=accuracy(manifest.network, one.model, rows),
        )
        for name, one in loaded.items()
    }
    first = next(iter(loaded.values())).trajectory
    lines = [
        f"# {title}",
        "",
        f"Made by `{command}` on {datetime.now(UTC):%Y-%m-%d} (Python {platform.python_version()}, "
        + ", ".join(
            f"{name} {version}" for name, version in first.library_versions.items() if name != "python"
        )
        + f"). Network: `{manifest.network.factory}`; data: `{manifest.data.loader}`, {manifest.data.split_rule}.",
        "",
        f"Every epsilon is at delta {delta:g} under {manifest.neighboring_relation.replace('_', '-')}, from the "
        f"trajectories as executed, and rounded up. Accuracy is on the {len(rows):,} public-gate rows, which nothing "
        "was trained on or chosen by.",
        "",
        "## The candidates",
        "",
        table(
            ("candidate", "steps", "noise multiplier", "how gradients were had", "epsilon", "accuracy"),
            [
                (
                    name,
                    f"{one.trajectory.steps}",
                    f"{one.trajectory.segments[-1].noise_multiplier:.6g}",
                    one.trajectory.notes["grad_sample_mode"].partition(":")[0].replace("_", " "),
                    rounded_up(candidates[name].epsilon),
                    f"{candidates[name].accuracy:.4f}",
                )
                for name, one in loaded.items()
            ],
        ).rstrip(),
        "",
        "## Budgets between them",
        "",
        "What a policy of that budget would release by linear combination, with weights chosen by noise alone, "
        "beside the best single candidate that the budget allows.",
        "",
        table(
            ("budget", "best single candidate", "linear combination", "certified", "by", "accuracy", "gain"),
            [_budget_row(budget, manifest, loaded, candidates, delta, rows) for budget in budgets],
        ).rstrip(),
        "",
        "One portfolio from one seed: differences of a few tenths of a point between neighbouring rows are within its "
        "scatter. The noise is private and drawn afresh, so a second run gives other last digits.",
    ]
    return "\n".join(lines) + "\n"


def _budget_row(
    budget: float,
    manifest: PortfolioManifest,
    loaded: dict[str, LoadedCandidate],
    candidates: dict[str, Measured],
    delta: float,
    rows: Rows,
) -> tuple[str, ...]:
    affordable = {name: one for name, one in candidates.items() if one.epsilon <= budget}
    single = max(affordable, key=lambda name: affordable[name].epsilon, default=None)
    alone = "none" if single is None else f"{single}: {affordable[single].accuracy:.4f}"
    policy = Policy.from_fields(
        {
            "region": "experiment",
            "serial": 1,
            "epsilon": budget,
            "delta": delta,
            "neighboring_relation": manifest.neighboring_relation,
            "portfolio": manifest.reference,
            "mechanisms": ("linear_combination",),
            "effective_at": "2000-01-01T00:00:00Z",
            "author": "experiment",
        },
        "experiment",
    )
    try:
        plan = solve_policy(policy, accountable(manifest, policy, loaded))
    except RemergeError:  # nothing on offer is so private
        return f"{budget:g}", alone, "none", "", "", "", ""
    merged = linear_combination({name: loaded[name].model for name in plan.weights}, plan.weights)
    reached = accuracy(manifest.network, merged, rows)
    gain = "" if single is None else f"{100 * (reached - affordable[single].accuracy):+.1f} points"
    return (
        f"{budget:g}",
        alone,
        weights_in_words(plan.weights),
        rounded_up(plan.epsilon),
        BOUND_WORDS.get(plan.bound.name, plan.bound.name),
        f"{reached:.4f}",
        gain,
    )
