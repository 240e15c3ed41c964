"""Asks a store about one moment: several questions at once, and remembers what had no answer.

A busy store answers some questions and not others.  What a verdict cannot do without is asked with `query_all`, which
raises; what stands beside it is asked with `query_some` and `attempt`, and is named in `unanswered` where no answer
came, so that "it was not answered" is never taken for "there is none".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from railscope.agent.cluster.fleet.prometheus import NoAnswerError, Sample, Store

_THREADS: Final = 6

T = TypeVar("T")


class Asker:
    """Asks a store about one moment."""

    def __init__(self, store: Store, at: float) -> None:
        """`at`: seconds since the Unix epoch."""
        self.store, self.at = store, at
        self._unanswered: dict[str, str] = {}

    @property
    def unanswered(self) -> Mapping[str, str]:
        """What is not known because the store did not answer, and why it did not, in the order of asking."""
        return self._unanswered

    def __call__(self, expression: str) -> tuple[Sample, ...]:
        """The answer to one question.

        Raises:
            PrometheusError: the store does not answer.
        """
        return self.store.query(expression, self.at)

    def query_all(self, **expressions: str) -> dict[str, tuple[Sample, ...]]:
        """The answers, by the names of the questions.

        Raises:
            PrometheusError: the store does not answer one of them.
        """
        with ThreadPoolExecutor(_THREADS) as threads:
            answers = threads.map(self, expressions.values())
            return dict(zip(expressions, answers, strict=True))

    def query_some(self, questions: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[Sample, ...]]:
        """The answers, by the names of the questions; nothing where none came.

        Args:
            questions: expressions by name, by what is not known without all of them.

        Raises:
            PrometheusError: the store cannot be asked anything.
        """
        asked = [(what, name, one) for what, by_name in questions.items() for name, one in by_name.items()]
        with ThreadPoolExecutor(_THREADS) as threads:
            answers = threads.map(lambda one: self.attempt(one[0], lambda: self(one[2])), asked)
            return {name: answer for (_, name, _), answer in zip(asked, answers, strict=True)}

    def attempt(self, what: str, read: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        """What `read` gives; nothing where the store does not answer it, and then `what` is not known.

        Raises:
            PrometheusError: the store cannot be asked anything.
        """
        try:
            return read()
        except NoAnswerError as error:
            self._unanswered.setdefault(what, str(error))
            return ()
