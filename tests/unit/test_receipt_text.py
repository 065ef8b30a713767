"""A receipt in words never sounds more complete than it is."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.admin_client import AdminRefused
from trunkline.receipt_text import detail_lines, stock_count_by, summary_lines


def receipt(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rev": 4,
        "subject": "tenant/acme",
        "verb": "revoke",
        "epoch": 1,
        "ms": 3.94,
        "acked_count": 2,
        "fenced_count": 0,
        "acked": ["gateway", "w1"],
        "fenced": [],
        "fence": "worker",
        "erase": "namespace",
        "aborted": 3,
        "condemned_blocks": 7,
        "condemned_bytes": {"device": 64},
        "audit": "recorded",
        "erasures": [],
    }
    return made | more


STOCK = receipt(fence="gateway", erase="restart")


def test_what_is_whole_is_one_line() -> None:
    assert summary_lines(receipt(), 0) == [
        "tenant/acme: revoked, in force after 3.9 ms (revision 4): 2 acknowledged, 3 requests"
        " ended, 7 blocks condemned"
    ]
    (line,) = summary_lines(receipt(fenced_count=1), 0)
    assert "1 fenced by the end of their lease" in line


@pytest.mark.parametrize(
    ("count", "shown"), [(None, "some workers"), (1, "1 worker"), (2, "2 workers")]
)
def test_stock_engines_are_named_without_being_asked_for(count: int | None, shown: str) -> None:
    line = f"  fenced by the salt alone: {shown} (their bytes stay until they restart)"
    assert summary_lines(STOCK, count)[1:] == [line]
    assert line in detail_lines(STOCK, count)


class Workers:
    """An admin port that shows workers, or does not."""

    def __init__(self, *erases: str) -> None:
        self.erases = erases

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/workers"
        if not self.erases:
            raise AdminRefused("no role", 403, {})
        return {"workers": [{"detail": {"isolation": {"erase": e}}} for e in self.erases]}


def test_workers_are_counted_where_the_caller_may_see_them() -> None:
    def count(shown: dict[str, Any], *erases: str) -> int | None:
        return stock_count_by(shown, Workers(*erases))

    assert count(STOCK, "restart", "namespace", "restart") == 2
    assert count(STOCK) is None
    assert count(STOCK, "namespace") is None, "they have left since: it is not known how many"
    assert count(receipt(), "restart") == 0, "the receipt knows of none"
