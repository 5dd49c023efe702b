"""The loans and claims of this process: the Events that no other process may begin or write."""

from __future__ import annotations

import threading

from asynctask.ledger.lending import Loan


class OwnLoan:
    """A loan of this process, from the borrow to its end, and how many of its jobs have not ended here.

    ``top``: the largest ``seq`` that a thread has taken; jobs of a loan begin in order, so those after it may be given
    back.
    """

    __slots__ = ("_loans", "high", "id", "left", "low", "task_id", "top")

    def __init__(self, loans: OwnLoans, loan: Loan, count: int) -> None:
        self._loans = loans
        self.id, self.task_id, self.low, self.high = loan.id, loan.task_id, loan.low, loan.high
        self.left = count
        self.top = loan.low - 1

    def ended(self) -> None:
        """See :meth:`Holding.ended <asynctask.ledger.lending.Holding.ended>`."""
        self._loans.ended(self)

    def ending(self, count: int) -> int | None:
        """See :meth:`Holding.ending <asynctask.ledger.lending.Holding.ending>`."""
        return self.id if self._loans.is_ending(self, count) else None

    def as_loan(self) -> Loan:
        """The loan as in the ledger."""
        return Loan(self.id, self.task_id, self.low, self.high)


class OwnClaim:
    """The claim of this process on one attempt of an Event, until the job's end here."""

    __slots__ = ("_key", "_loans")

    def __init__(self, loans: OwnLoans, key: tuple[int, int]) -> None:
        self._loans, self._key = loans, key

    def ended(self) -> None:
        """See :meth:`Holding.ended <asynctask.ledger.lending.Holding.ended>`."""
        self._loans.claim_ended(self._key)

    def ending(self, count: int) -> int | None:
        """None: no loan ends with it."""
        return None


class OwnLoans:
    """The loans and claims of this process, under one lock: the threads of the recorder and the borrower change them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loans: dict[int, OwnLoan] = {}
        self._claims: set[tuple[int, int]] = set()  # (id of the Event, attempt): a later attempt may be claimed anew
        self._ending: set[int] = set()  # loans that end in the transaction that the recorder is committing
        self._empty: set[int] = set()  # loans that the borrower must end

    def add(self, loan: Loan, count: int) -> OwnLoan:
        """Adds a loan that was just borrowed, with ``count`` jobs."""
        own = OwnLoan(self, loan, count)
        with self._lock:
            self._loans[loan.id] = own
            if not count:
                self._forget(own, is_ended=False)
        return own

    def claim(self, event_id: int, attempt: int) -> OwnClaim:
        """Adds an Event that was just claimed."""
        key = event_id, attempt
        with self._lock:
            self._claims.add(key)
        return OwnClaim(self, key)

    def claim_ended(self, key: tuple[int, int]) -> None:
        """See :meth:`OwnClaim.ended`."""
        with self._lock:
            self._claims.discard(key)

    def claims(self) -> set[tuple[int, int]]:
        """The claimed Events, as (id, attempt)."""
        with self._lock:
            return set(self._claims)

    def is_ending(self, loan: OwnLoan, count: int) -> bool:
        """Whether a loan ends with so many of its jobs, in the transaction that the recorder is committing."""
        with self._lock:
            is_ending = loan.left <= count and loan.id in self._loans
            if is_ending:
                self._ending.add(loan.id)
            return is_ending

    def ended(self, loan: OwnLoan) -> None:
        """Counts an ended job of a loan; see :meth:`OwnLoan.ended`."""
        with self._lock:
            loan.left -= 1
            if loan.left <= 0 and loan.id in self._loans:
                self._forget(loan, is_ended=loan.id in self._ending)

    def cut(self, loan: OwnLoan, high: int, count: int) -> None:
        """Notes that ``count`` jobs from ``high`` on were given back."""
        with self._lock:
            loan.high = high
            loan.left -= count
            if loan.id in self._loans and (loan.left <= 0 or high <= loan.low):
                self._forget(loan, is_ended=high <= loan.low or loan.id in self._ending)

    def forget(self, loan: OwnLoan) -> None:
        """Removes a loan that this process no longer holds by the ledger."""
        with self._lock:
            self._forget(loan, is_ended=True)

    def _forget(self, loan: OwnLoan, *, is_ended: bool) -> None:
        self._loans.pop(loan.id, None)
        self._ending.discard(loan.id)
        if not is_ended:
            self._empty.add(loan.id)

    def take_empty(self) -> set[int]:
        """The ids of loans without jobs left that are still in the ledger; returns each once."""
        with self._lock:
            empty, self._empty = self._empty, set()
            return empty

    def all(self) -> dict[int, OwnLoan]:
        """All loans, by id."""
        with self._lock:
            return dict(self._loans)
