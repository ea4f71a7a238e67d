"""Conditions on the columns of rows: `where=` of data sets and of collections.

where='average_test_score>=1'            rows whose column is a number of at least 1
where='domain==algorithmic,score>0.5'    rows that meet both conditions
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|!=|>|<)\s*([^=\s].*?)\s*")


class Condition(NamedTuple):
    """One comparison of a column with a value."""

    column: str
    sign: str
    value: str

    def holds(self, row: Mapping[str, Any], where: str) -> bool:
        """Return whether a row meets the condition; a row without a value in the column does not.

        Numbers are compared as numbers even if the column stores text. `where` names the row in
        errors.
        """
        if self.column not in row:
            raise ValueError(
                f"{where}: where= names the column {self.column!r}, but it has {sorted(row)}"
            )
        found = row[self.column]
        if found is None:
            return False
        numbers = _number(found), _number(self.value)
        if None not in numbers:
            return OPERATORS[self.sign](*numbers)
        if self.sign not in ("==", "!="):
            raise ValueError(
                f"{where}: {self.column}{self.sign}{self.value} compares {str(found)[:40]!r}, "
                "which is not a number: give == or !="
            )
        return OPERATORS[self.sign](str(found), self.value)


def conditions(where: str | None) -> list[Condition]:
    """Return the conditions of a text such as 'score>=1,domain==algorithmic'; none for None.

    >>> conditions("score >= 0.5")
    [Condition(column='score', sign='>=', value='0.5')]
    """
    found = []
    for part in where.split(",") if where is not None else ():
        if not (matched := _CONDITION.fullmatch(part)):
            raise ValueError(
                f"where={where!r} is no condition: give a column, one of {list(OPERATORS)} and a "
                "value, as average_test_score>=1; several with commas"
            )
        found.append(Condition(*matched.groups()))
    return found


def keeps(row: Mapping[str, Any], asked: list[Condition], where: str) -> bool:
    """Return whether a row, named `where` in errors, meets all conditions."""
    return all(condition.holds(row, where) for condition in asked)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
