"""How much accuracy a merge gains over the best single candidate, on the demo's data. Not part of `make test`.

    python -m tests.benchmarks.digits_gain [SEEDS]

Trains the demo recipe again and again with fresh noise, and compares on the public-gate rows, for the demo's two
budgets, the single candidates with every inverse-variance merge of full-batch candidates whose joint release
fits. Nothing here is used for choosing: the product picks merges by noise alone, without looking at accuracy.
"""

from __future__ import annotations

import sys
from itertools import combinations
from statistics import mean, stdev

import numpy as np

BUDGETS = (1.5, 3.0)  # epsilon at the recipe's delta


def main(seeds: int) -> None:
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from accounting.joint_release import joint_release
    from tasks.data import load_splits
    from tasks.models import initial_state, state_from_bytes
    from tasks.recipes import find_recipe, load_recipe
    from tasks.training import train_candidate

    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe("infra/portfolios/digits.yaml"))
    splits = load_splits(
        recipe.data,
        feature_radius=recipe.feature_radius,
        n_max=recipe.n_max,
        neighboring_relation=recipe.neighboring_relation,
    )
    initial = initial_state(recipe.network, recipe.initialisation_seed)
    names = [candidate.name for candidate in recipe.candidates]
    weights: dict[str, list[np.ndarray]] = {name: [] for name in names}
    trajectories = {}
    for seed in track(range(seeds), "training"):
        for candidate in recipe.candidates:
            trained = train_candidate(
                candidate,
                recipe=recipe,
                splits=splits,
                initial=initial,
                run_id=f"{candidate.name}-{seed}",
                data_digest="benchmark",
            )
            weights[candidate.name].append(state_from_bytes(trained.model)["weight"].double().numpy())
            trajectories[candidate.name] = trained.trajectory

    def accuracies(members: tuple[str, ...]) -> list[float]:
        inverse = np.array([recipe.candidate(name).noise_multiplier ** -2.0 for name in members])
        shares = inverse / inverse.sum()
        gate = splits.public_gate
        merged = [
            sum(share * weights[name][seed] for share, name in zip(shares, members, strict=True))
            for seed in range(seeds)
        ]
        return [float(np.mean((gate.features @ one.T).argmax(axis=1) == gate.labels)) for one in merged]

    table = Table(
        title=f"Accuracy on {len(splits.public_gate)} public-gate rows, mean of {seeds} fresh portfolios"
    )
    for column in ("merge", f"epsilon at {recipe.delta:g}", "accuracy", "standard error", "fits"):
        table.add_column(column)
    full_batch = [name for name in names if recipe.candidate(name).is_full_batch]
    sets = [(name,) for name in names]
    sets += [members for size in (2, 3, 4) for members in combinations(full_batch, size)]
    for members in sets:
        epsilon = joint_release(
            [trajectories[name] for name in members], trajectories[members[0]].neighboring_relation
        ).epsilon(recipe.delta)
        if len(members) > 1 and epsilon > max(BUDGETS):
            continue
        found = accuracies(members)
        fits = ", ".join(f"{budget:g}" for budget in BUDGETS if epsilon <= budget)
        error = stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        table.add_row(" + ".join(members), f"{epsilon:.3f}", f"{mean(found):.3f}", f"{error:.3f}", fits)
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
