"""One thing that is wrong with a set-up, as `trunkline doctor` and `GET /doctor` show it.

Whoever looks (at settings, at a worker, at the registry) makes these and judges nothing else. Must
never: hold a key. Read `alignment.py` for what a worker's self-test finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.core.alignment import Finding, State

GATEWAY = "gateway"
"""The subject of what is wrong with the gateway itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ailment:
    """`what` names the kind, `subject` who has it: a worker, a file, a setting, the gateway."""

    what: str
    subject: str
    expected: str
    found: str
    remedy: str
    state: State = State.WRONG

    def as_dict(self) -> dict[str, str]:
        return {
            "what": self.what,
            "subject": self.subject,
            "state": self.state.value,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }


def of_finding(worker: str, finding: Finding) -> Ailment:
    """A finding of a worker's self-test."""
    return Ailment(
        what=finding.topic.value,
        subject=worker,
        expected=finding.expected,
        found=finding.found,
        remedy=finding.remedy,
        state=finding.state,
    )
