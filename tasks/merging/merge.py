"""Merging by any operator: the checks that all of them share, and the merged file written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from accounting.errors import InvalidInput
from infra.tensor_file import ELEMENT_BYTES, FLOATS, TensorPlace, narrowed, new_layout, widened
from tasks.merging import linear
from tasks.merging.average import AVERAGE
from tasks.merging.dare import DARE
from tasks.merging.fisher import FISHER
from tasks.merging.inputs import PIECE, Inputs
from tasks.merging.marks import require_public_statistics
from tasks.merging.operator import Needs, Operator, Options, Value
from tasks.merging.pcb import PCB
from tasks.merging.regmean import REGMEAN
from tasks.merging.slerp import SLERP
from tasks.merging.sources import Memory, Source, opened, require_same_architecture, write_to
from tasks.merging.task_arithmetic import TASK_ARITHMETIC
from tasks.merging.ties import TIES
from tasks.merging.wudi import WUDI

LINEAR = Operator(name="linear", rule=lambda options: linear.MERGE_RULE)
_ALL = {
    operator.name: operator
    for operator in (LINEAR, AVERAGE, TASK_ARITHMETIC, TIES, DARE, FISHER, REGMEAN, PCB, WUDI, SLERP)
}
OPERATORS = tuple(_ALL)

Write = Callable[[int, memoryview], None]  # (first byte, content)


def needs(operator: str) -> Needs:
    """What an operator needs beside models and weights."""
    return _named(operator).needs


def checked_options(operator: str, options: Options) -> dict[str, Value]:
    """An operator's options, validated and with every default filled in.

    Raises:
        InvalidInput: the operator or an option is unknown, or an option is not what it may be.
    """
    return _named(operator).checked_options(options)


def merge_rule(operator: str, options: Options) -> str:
    """The sentence by which a certificate says how the parameters were merged."""
    found = _named(operator)
    return found.rule(found.checked_options(options))


def merge_models(
    operator: str,
    models: Mapping[str, bytes],
    weights: Mapping[str, float],
    *,
    options: Options = {},  # noqa: B006 - never changed
    base: bytes | None = None,
    statistics: Mapping[str, bytes] | None = None,
) -> bytes:
    """Merge safetensors files in memory by any operator.

    Args:
        operator: one of OPERATORS; its module states its formula and its source.
        models: file contents by candidate name, for at least the candidates in `weights`.
        weights: by candidate name, used exactly as they are. Candidates without weight are not opened.
        options: see the operator's module; what is not said has its default.
        base: the public start w0, where the operator needs it, with the candidates' tensors.
        statistics: by candidate name, made by `tasks.merging.statistics`, where the operator needs them.

    Returns:
        The contents of a safetensors file without metadata. The order in which the candidates are given changes
        nothing but, for "linear" and "average", the order of a float64 sum.

    Raises:
        InvalidInput: the operator, an option or the weights are not what they may be, or something is missing.
        IncompatibleCandidates: names, shapes or types of tensors differ, a file is damaged, statistics are not marked
            as made from public rows, or a number or a result is not finite.
    """
    chosen, checked, used = _checked(operator, options, weights, models)
    if chosen.prepare is None:
        return linear.any_combination(models, used)
    names = sorted(used)
    merge = _Merge(
        chosen,
        [Memory(name, models[name]) for name in names],
        [used[name] for name in names],
        checked,
        _opened_base(chosen, base, lambda content: Memory("", content, *BASE)),
        _opened_statistics(
            chosen, statistics, names, lambda name, content: Memory(name, content, *_statistics_of(name))
        ),
    )
    merged = bytearray(merge.size)

    def write(start: int, content: memoryview) -> None:
        merged[start : start + len(content)] = content

    merge.run(write)
    return bytes(merged)


def merge_model_files(
    operator: str,
    paths: Mapping[str, Path],
    weights: Mapping[str, float],
    out: Path,
    *,
    options: Options = {},  # noqa: B006 - never changed
    base: Path | None = None,
    statistics: Mapping[str, Path] | None = None,
) -> None:
    """As `merge_models`, from files to a file, with the same bytes and in bounded memory: a few megabytes for each
    candidate where the operator goes element by element, else some copies of the largest tensor of all candidates.

    Args:
        out: written beside its place, flushed to the disk and renamed: it is there whole or not at all.
    """
    chosen, checked, used = _checked(operator, options, weights, paths)
    if chosen.prepare is None:
        linear.merge_files_by_any(paths, used, out)
        return
    names = sorted(used)
    with ExitStack() as stack:
        merge = _Merge(
            chosen,
            [stack.enter_context(opened(name, paths[name])) for name in names],
            [used[name] for name in names],
            checked,
            _opened_base(chosen, base, lambda path: stack.enter_context(opened("", path, *BASE))),
            _opened_statistics(
                chosen,
                statistics,
                names,
                lambda name, path: stack.enter_context(opened(name, path, *_statistics_of(name))),
            ),
        )
        write_to(out, merge.size, merge.run)


BASE = ("The public start", "store it again from the recipe's seed")


def _statistics_of(name: str) -> tuple[str, str]:
    return f"The statistics file of candidate {name}", "make it again from public rows"


def _named(operator: str) -> Operator:
    if operator not in _ALL:
        raise InvalidInput(f"There is no merge operator {operator!r}; choose one of {', '.join(OPERATORS)}.")
    return _ALL[operator]


def _checked(
    operator: str, options: Options, weights: Mapping[str, float], models: Mapping[str, Any]
) -> tuple[Operator, dict[str, Value], dict[str, float]]:
    chosen = _named(operator)
    checked = chosen.checked_options(options)
    used = linear.finite(weights)
    if chosen.weights == "simplex" and not linear.on_the_simplex(used):
        raise InvalidInput(
            f"Weights for the merge operator {operator} must be non-negative and add up to 1, but they are "
            f"{dict(weights)}."
        )
    if chosen.weights == "positive" and min(used.values()) < 0:
        raise InvalidInput(
            f"Weights for the merge operator {operator} must not be negative, but they are {dict(weights)}."
        )
    if chosen.needs.models is not None and len(used) != chosen.needs.models:
        raise InvalidInput(
            f"The merge operator {operator} merges exactly {chosen.needs.models} candidates, but {len(used)} have "
            "a weight that is not zero."
        )
    for name in used:
        if name not in models:
            raise InvalidInput(f"There is no model of candidate {name}, which has a weight; give it too.")
    return chosen, checked, used


def _opened_base(chosen: Operator, base: Any, open_it: Callable[[Any], Source]) -> Source | None:
    if not chosen.needs.base:
        return None
    if base is None:
        raise InvalidInput(
            f"The merge operator {chosen.name} needs the public start of the candidates; give it too."
        )
    return open_it(base)


def _opened_statistics(
    chosen: Operator,
    statistics: Mapping[str, Any] | None,
    names: Sequence[str],
    open_it: Callable[[str, Any], Source],
) -> list[Source]:
    if chosen.needs.statistics is None:
        return []
    for name in names:
        if statistics is None or name not in statistics:
            raise InvalidInput(
                f"The merge operator {chosen.name} needs statistics of candidate {name} from public rows; make them "
                "with tasks.merging.statistics."
            )
    return [open_it(name, statistics[name]) for name in names] if statistics else []


class _Merge:
    """A merge whose inputs are known to fit together."""

    def __init__(
        self,
        operator: Operator,
        candidates: Sequence[Source],
        weights: Sequence[float],
        options: Options,
        base: Source | None,
        statistics: Sequence[Source],
    ) -> None:
        first = candidates[0]
        for other in [*candidates[1:], *([base] if base else [])]:
            require_same_architecture(first, other)
        if operator.needs.statistics is not None:
            require_public_statistics(operator.needs.statistics, statistics, first.tensors)
        self._candidates = candidates
        self._operator = operator
        self._head, self._places = new_layout(first.tensors)
        self._inputs = Inputs(
            candidates, weights, options, places=self._places, base=base, statistics=statistics
        )
        self.size = len(self._head) + sum(place.length for place in self._places.values())

    def run(self, write: Write) -> None:
        """Write the merged file part by part."""
        assert self._operator.prepare is not None
        write(0, memoryview(self._head))
        with np.errstate(all="ignore"):  # what is not finite is found and named
            merged = self._operator.prepare(self._inputs)
            for name, place in self._places.items():
                if place.dtype in FLOATS:
                    self._write_numbers(name, place, merged(name), write)
                else:
                    self._copy(name, place, write)

    def _write_numbers(
        self, name: str, place: TensorPlace, parts: Iterator[np.ndarray], write: Write
    ) -> None:
        at, end = place.start, place.start + place.length
        for values in parts:
            narrow = narrowed(values, place.dtype, out=np.empty(values.shape, FLOATS[place.dtype]))
            content = narrow.data.cast("B")
            if not np.isfinite(widened(content, place.dtype)).all():
                raise linear.too_large(name, place.dtype)
            write(at, content)
            at += len(content)
        assert at == end, f"{self._operator.name} made {at - end} bytes too many of {name}"

    def _copy(self, name: str, place: TensorPlace, write: Write) -> None:
        width = ELEMENT_BYTES[place.dtype]
        for offset in range(0, place.length, PIECE * width):
            length = min(PIECE * width, place.length - offset)
            parts = [
                bytes(source.piece(source.tensors[name].start + offset, memoryview(bytearray(length))))
                for source in self._candidates
            ]
            if any(part != parts[0] for part in parts):
                raise linear.differs(name)
            write(place.start + offset, memoryview(parts[0]))
