"""Several pages of Prometheus text as one: each family once, its series told apart by a label.

Pure; of what is no metric nothing is kept. Must never: add two series up. Read `metrics.py` for the
pages of our own.
"""

from __future__ import annotations

from collections.abc import Sequence

_HEADS = (b"# HELP ", b"# TYPE ")


def joined_pages(pages: Sequence[tuple[bytes, bytes]], own: bytes = b"") -> bytes:
    """`pages` are label and text; `own` follows as it is."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for label, page in pages:
        _, into = families.setdefault(b"", ([], []))  # for what stands before any head
        for line in page.splitlines():
            if line.startswith(_HEADS):
                name = line[7:].partition(b" ")[0]
                heads, into = families.setdefault(name, ([], []))
                if not any(head[:7] == line[:7] for head in heads):
                    heads.append(line)
            elif line and not line.startswith(b"#"):
                into.append(_labelled(line, label))
    lines = [line for heads, series in families.values() for line in (*heads, *series)]
    return b"\n".join(lines) + b"\n" + own


def _labelled(line: bytes, label: bytes) -> bytes:
    brace = line.find(b"{")  # where there is one, labels begin with it: a name has none
    if brace < 0:
        name, _, value = line.partition(b" ")
        return name + b"{" + label + b"} " + value
    return line[: brace + 1] + label + b"," + line[brace + 1 :]
