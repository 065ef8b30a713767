"""Keys of the audit log's checkpoints, in files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trunkline.adapters.signing import Ed25519Check, Ed25519Signer


def test_a_key_is_made_once_and_its_public_half_verifies(tmp_path: Path) -> None:
    path = tmp_path / "audit.key"
    first = Ed25519Signer.from_file(path)
    again = Ed25519Signer.from_file(path)
    check = Ed25519Check.from_file(tmp_path / "audit.key.pub")
    assert first.key_id == again.key_id == check.key_id
    signature = first.sign(b"message")
    assert check.is_signed(b"message", signature)
    assert again.is_signed(b"message", signature)
    assert not check.is_signed(b"massage", signature)
    assert not check.is_signed(b"message", b"")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_signatures_are_ed25519(tmp_path: Path) -> None:
    # RFC 8032, 7.1, test 1.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    signer = Ed25519Signer(seed)
    assert signer.key_id == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert signer.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974")


def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "audit.key"
    Ed25519Signer.from_file(path)
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        Ed25519Signer.from_file(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31])
def test_what_is_no_key_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"audit\.key"):
        Ed25519Signer.from_file(path)
    with pytest.raises(ValueError, match=r"audit\.key"):
        Ed25519Check.from_file(path)
