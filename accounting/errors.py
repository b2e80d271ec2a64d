"""Errors that say what to do. Every error that remerge raises on purpose derives from RemergeError."""

from __future__ import annotations


class RemergeError(Exception):
    """One sentence a person can act on.

    Attributes:
        message: the whole sentence, with what to do.
        retryable: whether the same call may succeed later without anybody changing anything.
    """

    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(RemergeError):
    """A value is outside what the product accepts; the sentence names the field and the accepted range."""


class IncompatibleCandidates(RemergeError):
    """Candidates that may not be accounted or merged together (relation, lineage, architecture, unit)."""


class AccountingError(RemergeError):
    """A bound could not be computed soundly (for example a target delta under a PLD's measured error)."""


class NotDerivedAgain(AccountingError):
    """A bound for which there is no second derivation; this says nothing against it."""


class BudgetInfeasible(RemergeError):
    """No candidate and no merge satisfies the budget.

    Attributes:
        target: the epsilon asked for, nats, at the budget's delta.
        best: the smallest epsilon on offer at that delta, nats; None where there is no candidate.
        hint: what to train, in words.
    """

    def __init__(self, message: str, *, target: float, best: float | None, hint: str) -> None:
        super().__init__(message)
        self.target = target
        self.best = best
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_infeasible, (self.message, self.target, self.best, self.hint)


def _rebuild_infeasible(message: str, target: float, best: float | None, hint: str) -> BudgetInfeasible:
    return BudgetInfeasible(message, target=target, best=best, hint=hint)
