"""What `trunkline audit verify` prints of a log in two places, one of which is bad."""

from __future__ import annotations

import argparse
import io
from dataclasses import asdict
from pathlib import Path

from audit_bench import SIGNER, AuditBench, login, played

from trunkline.adapters.audit_files import CheckpointFile, segment_paths
from trunkline.administration_views import verification_view
from trunkline.audit_answers import print_verification
from trunkline.control.audit import AuditLog
from trunkline.control.audit_reader import AuditReader
from trunkline.terminal import Terminal


async def printed(bench: AuditBench, audit: AuditLog) -> tuple[int, str]:
    keeper = CheckpointFile(bench.copies)
    reader = AuditReader(audit, keeper=keeper, is_signed=SIGNER.is_signed)
    found = asdict(verification_view(await reader.verify()))
    await keeper.close()
    out = io.StringIO()
    terminal = Terminal(environ={}, out=out, err=out, wall_s=lambda: 0.0)
    return print_verification(argparse.Namespace(json=False), found, terminal), out.getvalue()


def test_a_place_that_is_out_is_named_first(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        bench.sinks[1].is_down = True
        await audit.write(login())
        code, page = await printed(bench, audit)
        assert code == 0
        assert page.startswith(f"sound in 1 of 2 places ({bench.folder('b')} is out): records 1 to")
        assert f"{bench.folder('b')}: out (the disk is gone)" in page
        bench.sinks[1].is_down = False
        await bench.retry(audit)
        assert (await printed(bench, audit))[1].startswith("sound: records 1 to 1")

    played(scenario, tmp_path)


def test_a_place_that_is_faulty_is_told_from_the_sound_one_and_the_remedy_helps(
    tmp_path: Path,
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(3):
            await audit.write(login(number))
        path = segment_paths(bench.folder("b"))[0]
        path.write_bytes(path.read_bytes().replace(b"login.1", b"login.7"))
        code, page = await printed(bench, audit)
        assert (code, page.splitlines()[0]) == (
            1,
            "NOT SOUND in 1 of 2 places, at record 2: the record is not what its hash says",
        )
        assert "move the folder that is faulty away" in page
        bench.folder("b").rename(bench.root / "evidence")
        await bench.retry(audit)
        await bench.retry(audit)
        assert (await printed(bench, audit))[0] == 0

    played(scenario, tmp_path)


def test_a_log_that_is_not_gone_on_with_is_checked_all_the_same(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(20):
            await audit.write(login(number))
        await bench.die()
        for name in ("a", "b"):
            path = segment_paths(bench.folder(name))[-1]
            path.chmod(0o600)
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        audit = bench.begin()
        assert not await audit.open()
        code, page = await printed(bench, audit)
        assert code == 1
        assert page.startswith("NOT SOUND in 2 of 2 places, at record 21: the log ends here")

    played(scenario, tmp_path)
