"""How fast the accounting is. Not part of `make test`.

    make bench                   # a table
    make bench ARGS=--markdown   # the same, as kept in docs/performance.md

Every row alternates our computation (A) with a reference (B), A B A B ..., in one process with one thread, and
reports the median CPU time of each. CPU seconds depend on the machine; the ratio to a reference measured in the
same minute hardly does. All caches of the accounting are emptied before each A, unless the row says otherwise.
"""

from __future__ import annotations

import os

for _name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):  # before numpy is imported
    os.environ[f"{_name}_NUM_THREADS"] = "1"

import gc  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from dp_accounting import (  # noqa: E402
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting import NeighboringRelation as LibraryRelation  # noqa: E402
from dp_accounting.pld import PLDAccountant  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from scipy.optimize import linprog  # noqa: E402

from accounting.budget import NeighboringRelation, PrivacyBudget  # noqa: E402
from accounting.joint_release import joint_release, single_run  # noqa: E402
from accounting.linear_combination import generic  # noqa: E402
from accounting.linear_combination_many import generic_mu_many  # noqa: E402
from accounting.profile import GaussianProfile, deltas_at  # noqa: E402
from accounting.random_selection import solve_random_selection  # noqa: E402
from accounting.shifted_interpolation import shifted  # noqa: E402
from accounting.solver import solve  # noqa: E402
from accounting.trajectory import Candidate, ParentStep, Segment, Trajectory  # noqa: E402

RELATION = NeighboringRelation.ADD_OR_REMOVE_ONE
DELTA = 1e-5
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    work: str
    ours: Work
    reference: Work
    reference_name: str
    share: float = 1.0  # how much of our work the reference does
    seconds: float | None = None  # target for us, CPU seconds
    times_faster: float | None = None  # target against the reference
    repeats: int = 5
    warm: bool = False  # caches are kept from the run before
    holds: Callable[[Any, Any], bool] | None = None  # what must be true of both results besides


@dataclass(frozen=True, kw_only=True)
class Measured:
    ours: float  # CPU seconds, median
    reference: float  # CPU seconds, median, for the whole of our work
    holds: bool


def run_of(name: str, *segments: Segment) -> Trajectory:
    path = [segments[0]]
    for segment in segments[1:]:
        parent = ParentStep(run=name, segment=path[-1].id, step=path[-1].steps)
        values = {f: getattr(segment, f) for f in Segment.__dataclass_fields__}
        path.append(Segment(**(values | {"parent": parent})))
    return Trajectory(
        portfolio="bench@1",
        lineage="bench",
        unit="record",
        neighboring_relation=RELATION,
        data_digest="keyed-digest",
        initialisation_digest="init-digest",
        feature_radius=1.0,
        n_max=60_000,
        segments=tuple(path),
    )


def segment_of(
    name: str, noise: float, steps: int, q: float = 1.0, rate: float = 1.0, c: float = 1.0
) -> Segment:
    return Segment(
        id=name,
        steps=steps,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        learning_rate=rate,
        expected_batch_size=60_000 * q,
        sampling_probability=q,
        sampler="full_batch" if q == 1.0 else "poisson",
        update_lipschitz=c,
        update_lipschitz_reason="assumed for the benchmark",
    )


def library_epsilon(events: list[DpEvent], interval: float) -> float:
    accountant = PLDAccountant(LibraryRelation[RELATION.name], value_discretization_interval=interval)
    accountant.compose(ComposedDpEvent(events))
    return float(accountant.get_epsilon(DELTA))


def library_event(noise: float, q: float, steps: int) -> DpEvent:
    step = GaussianDpEvent(noise)
    return SelfComposedDpEvent(step if q == 1.0 else PoissonSampledDpEvent(q, step), steps)


def full_batch_rows() -> list[Row]:
    noise = 60.0
    run = run_of("one", segment_of("one", noise, 1000))

    def library() -> float:
        return library_epsilon([library_event(noise, 1.0, 1000)], 1e-4)

    runs = [run_of(f"g{i}", segment_of(f"g{i}", 40.0 * 1.3**i, 20)) for i in range(8)]
    vectors = np.random.default_rng(0).dirichlet(np.ones(8), 100_000)
    some = vectors[:200].tolist()

    equal = [run_of(f"e{i}", segment_of(f"e{i}", 40.0 * 1.3**i, 1000)) for i in range(8)]
    random = np.random.default_rng(1)
    unequal = [
        run_of(
            f"u{i}",
            *(
                segment_of(
                    f"u{i}-{t}",
                    float(random.uniform(20, 200)),
                    1,
                    rate=float(random.uniform(0.5, 2)),
                    c=float(random.uniform(0.95, 1.0)),
                )
                for t in range(200)
            ),
        )
        for i in range(8)
    ]
    weights = vectors[0].tolist()
    pld = "dp_accounting, PLD of 1,000 full-batch steps at 1e-4"
    return [
        Row(
            work="eps(delta) of a full-batch run of 1,000 steps",
            ours=lambda: single_run(run).epsilon(DELTA),
            reference=library,
            reference_name=pld,
            times_faster=100,
            repeats=9,
            holds=lambda a, b: 0 < a <= b,
        ),
        Row(
            work="100,000 lambda vectors, 8 runs, generic bound",
            ours=lambda: generic_mu_many(runs, vectors, RELATION),
            reference=lambda: [generic(runs, row, RELATION) for row in some],
            reference_name="the same by generic, one at a time",
            share=len(some) / len(vectors),
            seconds=1.0,
        ),
        Row(
            work="convex bound of one lambda, 8 runs x 1,000 equal steps",
            ours=lambda: shifted(equal, weights, RELATION),
            reference=library,
            reference_name=pld,
            seconds=0.005,
            repeats=9,
        ),
        Row(
            work="convex bound of one lambda, 8 runs x 200 unequal steps",
            ours=lambda: shifted(unequal, weights, RELATION),
            reference=library,
            reference_name=pld,
            seconds=0.2,
        ),
    ]


def selection_row() -> Row:
    mus = np.geomspace(0.05, 3.0, 1000)
    profiles = [GaussianProfile(mu=float(mu)) for mu in mus]
    utilities = -1 / mus**2  # none dominates another

    def rows() -> np.ndarray:
        return deltas_at(profiles, 2.0)

    def by_highs() -> object:
        return linprog(
            -utilities, A_ub=rows(), b_ub=[DELTA] * 2, A_eq=np.ones((1, 1000)), b_eq=[1.0], method="highs"
        )

    return Row(
        work="random-selection program, 1,000 candidates, profiles at hand",
        ours=lambda: solve_random_selection(rows(), utilities, DELTA),
        reference=by_highs,
        reference_name="the same by scipy's HiGHS (inexact)",
        seconds=0.05,
    )


def poisson_rows() -> list[Row]:
    noises = np.geomspace(0.9, 6.0, 64).tolist()
    candidates = [
        Candidate(name=f"c{i}", trajectory=run_of(f"c{i}", segment_of(f"c{i}", noise, 10_000, q=0.01)))
        for i, noise in enumerate(noises)
    ]
    budget = PrivacyBudget(epsilon=2.0, delta=DELTA)

    def policy() -> object:
        return solve(budget, candidates, relation=RELATION)

    def library(interval: float) -> Work:
        return lambda: [library_epsilon([library_event(noise, 0.01, 10_000)], interval) for noise in noises]

    eight = [(0.8 + 0.2 * i, 0.005 * (i + 1), 900 + 30 * i) for i in range(8)]
    runs = [run_of(f"p{i}", segment_of(f"p{i}", s, steps, q=q)) for i, (s, q, steps) in enumerate(eight)]
    return [
        Row(
            work="policy solve, 64 Poisson candidates of 10,000 steps, cold",
            ours=policy,
            reference=library(1e-4),
            reference_name="dp_accounting, their 64 epsilons alone at 1e-4",
            seconds=15.0,
            repeats=2,
        ),
        Row(
            work="the same, profiles cached",
            ours=policy,
            reference=library(1e-3),
            reference_name="dp_accounting, their 64 epsilons alone at 1e-3",
            seconds=1.0,
            repeats=3,
            warm=True,
        ),
        Row(
            work="joint release of 8 different Poisson runs of about 1,000 steps",
            ours=lambda: joint_release(runs, RELATION).epsilon(DELTA),
            reference=lambda: library_epsilon([library_event(*(s, q, steps)) for s, q, steps in eight], 1e-4),
            reference_name="dp_accounting, the same at 1e-4",
            seconds=2.0,
            repeats=3,
        ),
    ]


def clear_caches() -> None:
    """Empty every lru_cache of the accounting."""
    for name, module in list(sys.modules.items()):
        if name.startswith("accounting."):
            for value in vars(module).values():
                if not isinstance(value, type) and callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def timed(work: Work) -> tuple[float, object]:
    gc.collect()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(row: Row) -> Measured:
    if row.warm:
        row.ours()
    times: tuple[list[float], list[float]] = [], []
    holds = True
    for _ in range(row.repeats):
        if not row.warm:
            clear_caches()
        results = []
        for taken, work in zip(times, (row.ours, row.reference), strict=True):
            seconds, result = timed(work)
            taken.append(seconds)
            results.append(result)
        holds = holds and (row.holds is None or row.holds(*results))
    return Measured(ours=median(times[0]), reference=median(times[1]) / row.share, holds=holds)


def verdict(row: Row, found: Measured) -> tuple[str, str]:
    """The target in words, and whether it was met."""
    if row.times_faster is not None:
        target, met = (
            f"{row.times_faster:g} times faster, never above",
            found.reference / found.ours >= row.times_faster,
        )
    else:
        target, met = f"{seconds(row.seconds or 0)}", found.ours <= (row.seconds or 0)
    return target, "yes" if met and found.holds else "NO"


def seconds(value: float) -> str:
    return (
        f"{value:.3g} s"
        if value >= 1
        else f"{value * 1e3:.3g} ms"
        if value >= 1e-3
        else f"{value * 1e6:.3g} us"
    )


COLUMNS = ("work", "ours", "target", "met", "reference", "reference took", "ratio")


def main(markdown: bool) -> None:
    rows = [*full_batch_rows(), selection_row(), *poisson_rows()]
    cells = []
    for row in track(rows, "measuring, a few minutes", console=Console(stderr=True)):
        found = measure(row)
        times = seconds(found.ours), seconds(found.reference), f"{found.reference / found.ours:.3g}"
        cells.append((row.work, times[0], *verdict(row, found), row.reference_name, *times[1:]))
    if markdown:
        for line in (COLUMNS, ("---",) * len(COLUMNS), *cells):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(title="Accounting, CPU time of one thread, medians of alternated runs", show_lines=True)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for line in cells:
        table.add_row(*line)
    Console(width=150).print(table)


if __name__ == "__main__":
    main("--markdown" in sys.argv[1:])
