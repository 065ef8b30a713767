"""A pull between two stores over real sockets and shared memory, when all goes well."""

from __future__ import annotations

import pytest
from pull_desk import Ends, running

from trunkline.core.transfer import PullEnd


@pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])
def test_all_blocks_of_a_grant_arrive_and_are_found(is_local: bool) -> None:
    with running(Ends(is_local=is_local, block_count=5)) as ends:
        result = ends.pull()
        assert (result.end, result.reason, result.blocks) == (PullEnd.PUBLISHED, None, 5)
        assert result.bytes == 5 * ends.layout.block_bytes
        ends.settled()
