"""Data: private rows to train on, public rows to look at, checked and projected before anything uses them.

**Bring your own** (docs/your-own-data-and-model.md). A recipe names a loader by import path; it is called as

    loader(with_private: bool, **arguments) -> Splits

- Features are rows of numbers, for a linear model with the bias entry already appended; images are (rows,
  channels, height, width). Labels are 0 ... classes - 1.
- A private row may depend on its own record and on public rows only (so centre by a *public* mean): otherwise
  one record moves many rows, and no guarantee holds.
- With `with_private=False` it leaves `private` out (None) and touches no private data: that is how a deployed
  release is checked, where the private rows need not even exist.
- The split is a fixed rule, recorded as a sentence, and puts copies of a record on one side.

`load_splits` then checks types, shapes, values and duplicates across the splits, enforces `n_max`, and projects
every row to L2 norm at most `feature_radius`, whatever the loader did: the guarantee rests on this function.

Built in: `digits`, `mnist`, `fashion_mnist`, `cifar10`, and tables of one's own by `csv` and `parquet`.
"""

from __future__ import annotations

from tasks.data.handwritten_digits import digits
from tasks.data.images import cifar10, fashion_mnist, mnist
from tasks.data.loading import (
    DataSource,
    data_record,
    load_public_gate,
    load_public_train,
    load_splits,
    require_public_alone,
)
from tasks.data.projection import project
from tasks.data.rows import Enforced, Rows, Splits, record_digests
from tasks.data.tables import csv, parquet

__all__ = [
    "DataSource",
    "Enforced",
    "Rows",
    "Splits",
    "cifar10",
    "csv",
    "data_record",
    "digits",
    "fashion_mnist",
    "load_public_gate",
    "load_public_train",
    "load_splits",
    "mnist",
    "parquet",
    "project",
    "record_digests",
    "require_public_alone",
]
