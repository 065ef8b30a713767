"""What a self-test saw of a worker, and what that says: whether it does what we take it to do.

A request of the gateway's own, with content that nobody sent before, shows whether a worker has our
tokens, our block size and our salts, and whether its events and its usage tell the truth. Pure:
`judge` turns what was seen into findings, each with what was expected, what was found and what to
do. Must never: condemn for what was not seen. Read `gateway/examiner.py` for who looks, and
`control/selftest.py` for when.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.events import BlocksStored
from trunkline.core.records import Tier

MAX_CANARY_BLOCKS = 3
MAX_CANARY_TOKENS = 4_096


class Topic(Enum):
    """What one finding is about."""

    TEXT = "text"
    CHAT = "chat"
    BLOCK_SIZE = "block size"
    EVENTS = "events"
    KEYS = "block keys"
    REUSE = "reuse"
    ISOLATION = "isolation"
    ADAPTER = "adapter"
    HASHES = "hashes"


class State(Enum):
    """How one finding came out."""

    OK = "ok"
    NOTE = "note"
    """Other than elsewhere, and of no consequence here."""
    OPEN = "open"
    """Could not be tested; the worker is neither trusted nor condemned for it."""
    WRONG = "wrong"


class Belief(Enum):
    """How much of what a worker says of its cache still counts, best first."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    """Only what we sent there ourselves."""
    BLIND = "blind"
    """Nothing."""


_ORDER = list(Belief)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `leaves` is how much is believed of a worker with it."""

    topic: Topic
    state: State
    expected: str
    found: str
    remedy: str = ""
    leaves: Belief = Belief.EXACT

    def line(self) -> str:
        """As one sentence, for the log and for reasons."""
        text = f"{self.topic.value}: expected {self.expected}, found {self.found}"
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What one self-test came to."""

    findings: tuple[Finding, ...] = ()
    unfinished: str = ""
    """Why it did not come to its end; it says nothing then."""
    block_tokens: int | None = None
    """The block size that its events tell, where it is another than we took it for."""

    @property
    def is_wrong(self) -> bool:
        return any(finding.state is State.WRONG for finding in self.findings)

    @property
    def leaks(self) -> bool:
        """KV was reused under another salt: no tenants can be kept apart there."""
        return any(
            finding.topic is Topic.ISOLATION and finding.state is State.WRONG
            for finding in self.findings
        )

    @property
    def belief(self) -> Belief:
        """The least that any finding leaves."""
        left = [f.leaves for f in self.findings if f.state is State.WRONG]
        return max(left, key=_ORDER.index, default=Belief.EXACT)

    @property
    def reason(self) -> str:
        """What weighs most of what is wrong; empty where nothing is."""
        wrong = [f for f in self.findings if f.state is State.WRONG]
        worst = max(wrong, key=lambda f: (f.topic is Topic.ISOLATION, _ORDER.index(f.leaves)),
                    default=None)  # fmt: skip
        return "" if worst is None else worst.line()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The same text or messages, as tokens of ours and of the worker's."""

    topic: Topic
    ours: array[int] | None
    """None where we cannot say."""
    theirs: array[int] | None
    """None where it does not say; then `their_count` may tell how many."""
    their_count: int | None = None
    problem: str = ""
    has_tokenizer: bool = True
    """We have one of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTrial:
    """The canary once more, under the same salt, with an adapter."""

    name: str
    cached: int | None


@dataclass(slots=True, kw_only=True)
class Sighting:
    """All that was seen of one rank. Tokens reused are None where usage does not tell."""

    canary: array[int] = field(repr=False)
    block_tokens: int
    readings: list[Reading] = field(default_factory=list[Reading])
    salts: frozenset[str] = field(default=frozenset(), repr=False)
    """Those that the canary was sent under."""
    cold: int | None = None
    """Reused when it was sent first."""
    again: int | None = None
    """Reused under the same salt."""
    other: int | None = None
    """Reused under another one."""
    adapters: list[AdapterTrial] = field(default_factory=list[AdapterTrial])
    has_events: bool = False
    """It has an event stream that we follow."""
    has_digest: bool = False
    """It posts heartbeats instead."""
    unfollowed: str = ""
    """Why its events would be of no use; empty where they would."""
    was_heard: bool = False
    """Anything came on its stream since it joined."""
    stream: str = ""
    """What is the matter with the stream itself; empty while it is in order."""
    runs: list[BlocksStored] = field(default_factory=list[BlocksStored])
    """Events of the canary's blocks."""
    announced_blocks: int = 0
    """Different blocks in them, before the canary went out under another salt."""
    known_blocks: int = 0
    """Leading blocks of the canary that the directory knows there afterwards."""
    hash_note: str = ""
    """How its names of blocks differ from those of another worker; empty where they do not."""

    @property
    def other_block_tokens(self) -> int | None:
        """What events of the device say of the size of blocks, where that is one other size."""
        sizes = {run.block_tokens for run in self.runs if run.tier is Tier.DEVICE}
        return sizes.pop() if len(sizes) == 1 and self.block_tokens not in sizes else None

    @property
    def full_blocks(self) -> int:
        return len(self.canary) // self.block_tokens

    @property
    def reusable_tokens(self) -> int:
        """The last token is always computed."""
        return (len(self.canary) - 1) // self.block_tokens * self.block_tokens


def canary_tokens(block_tokens: int, max_model_len: int | None) -> int:
    """How long a canary is: a few blocks and a half one more, so that what is reused tells the size
    of blocks. 0 where not even one block and a token fit.
    """
    room = min(MAX_CANARY_TOKENS, (max_model_len or MAX_CANARY_TOKENS) - 2)
    tail = block_tokens // 2 + 1
    blocks = min(MAX_CANARY_BLOCKS, (room - tail) // block_tokens)
    if blocks >= 1:
        return blocks * block_tokens + tail
    return block_tokens + 1 if block_tokens + 1 <= (max_model_len or block_tokens + 3) - 2 else 0


def judge(seen: Sighting) -> tuple[Finding, ...]:
    """Findings in the order in which one leads to the next."""
    findings = [_tokens(reading) for reading in seen.readings]
    findings += [_block_size(seen), _events(seen)]
    if seen.runs:
        findings.append(_keys(seen))
    findings += [_reuse(seen), _isolation(seen)]
    findings += [_adapter(seen, trial) for trial in seen.adapters]
    if seen.hash_note:
        findings.append(_hashes(seen))
    return tuple(findings)


def joined(ranks: Sequence[tuple[str, Examination]]) -> Examination:
    """One worker's ranks: all of the first, and of the others what is not as it should be."""
    findings: list[Finding] = []
    for index, (name, rank) in enumerate(ranks):
        if rank.unfinished:
            return Examination(
                unfinished=f"{name}: {rank.unfinished}" if index else rank.unfinished
            )
        findings += [
            Finding(
                topic=f.topic,
                state=f.state,
                expected=f.expected,
                found=f"{f.found} ({name})" if index else f.found,
                remedy=f.remedy,
                leaves=f.leaves,
            )
            for f in rank.findings
            if index == 0 or f.state is not State.OK
        ]
    told = (rank.block_tokens for _, rank in ranks if rank.block_tokens is not None)
    return Examination(findings=tuple(findings), block_tokens=next(told, None))


# -- one topic each --------------------------------------------------------------------------------

_TOKENS_REMEDY = (
    "give the gateway the engine's own tokenizer and template (--model-path, --tokenizer-path,"
    " --chat-template)"
)
_USAGE_REMEDY = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
_EVENTS_REMEDY = (
    'start the engine with events (vLLM: --kv-events-config \'{"enable_kv_cache_events": true,'
    ' "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'), or'
    " name them behind # in the worker's URL"
)


def _tokens(reading: Reading) -> Finding:
    ours, theirs, topic = reading.ours, reading.theirs, reading.topic
    if not reading.has_tokenizer:
        return Finding(
            topic=topic,
            state=State.WRONG,
            expected="the engine's tokens",
            found="no tokenizer of its model here",
            remedy=_TOKENS_REMEDY,
            leaves=Belief.APPROXIMATE,
        )
    if ours is None or (theirs is None and reading.their_count is None):
        return Finding(
            topic=topic,
            state=State.OPEN,
            expected="the engine's tokens",
            found=reading.problem or "it does not tell them",
        )
    expected, count = f"our {len(ours)} tokens", reading.their_count
    if theirs is None and count == len(ours):
        return Finding(topic=topic, state=State.OK, expected=expected, found="as many")
    if theirs == ours:
        return Finding(topic=topic, state=State.OK, expected=expected, found="the same ids")
    if theirs is None:
        found = f"{count} tokens"
    else:
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        found = f"{len(theirs)} tokens, others from number {first} on"
    return Finding(
        topic=topic,
        state=State.WRONG,
        expected=expected,
        found=found,
        remedy=_TOKENS_REMEDY,
        leaves=Belief.APPROXIMATE,
    )


def _block_size(seen: Sighting) -> Finding:
    size = seen.block_tokens
    expected = f"blocks of {size} tokens"
    other = seen.other_block_tokens
    if other is not None:
        remedy = "that of its events is used from now on; see why its metrics tell another"
        return _wrong_size(expected, f"events with blocks of {other}", remedy)
    if seen.runs:
        return Finding(
            topic=Topic.BLOCK_SIZE, state=State.OK, expected=expected, found="the same in events"
        )
    if not seen.again or seen.cold:
        return Finding(
            topic=Topic.BLOCK_SIZE, state=State.OPEN, expected=expected, found="nothing that tells"
        )
    if seen.again >= seen.reusable_tokens:  # in smaller steps than ours, it is as good
        found = f"{seen.again} of {len(seen.canary)} tokens reused"
        return Finding(topic=Topic.BLOCK_SIZE, state=State.OK, expected=expected, found=found)
    found = f"{seen.again} of {len(seen.canary)} tokens reused, which are other blocks"
    return _wrong_size(expected, found, "give the gateway the engine's own: --block-size")


def _wrong_size(expected: str, found: str, remedy: str) -> Finding:
    return Finding(
        topic=Topic.BLOCK_SIZE,
        state=State.WRONG,
        expected=expected,
        found=found,
        remedy=remedy,
        leaves=Belief.APPROXIMATE,
    )


def _events(seen: Sighting) -> Finding:
    if seen.has_digest:
        return Finding(
            topic=Topic.EVENTS,
            state=State.OK,
            expected="news of its cache",
            found="heartbeats with checkpoint keys",
        )
    expected = f"events of {seen.full_blocks} blocks"
    if seen.runs:
        found = f"events of {seen.announced_blocks}"
        return Finding(topic=Topic.EVENTS, state=State.OK, expected=expected, found=found)
    if seen.unfollowed:
        found = f"not followed: {seen.unfollowed}"
        return Finding(topic=Topic.EVENTS, state=State.OPEN, expected=expected, found=found)
    if not seen.has_events:
        found, remedy = "it announces none", _EVENTS_REMEDY
    elif seen.stream:
        return Finding(topic=Topic.EVENTS, state=State.OPEN, expected=expected, found=seen.stream)
    elif seen.was_heard:
        found, remedy = "none for them, though others came", "look for a filter between the two"
    else:
        found = "no events since start, though it announced them"
        remedy = "let the gateway reach the address that it announces, or name another behind #"
    return Finding(
        topic=Topic.EVENTS,
        state=State.WRONG,
        expected=expected,
        found=found,
        remedy=remedy,
        leaves=Belief.APPROXIMATE,
    )


def _keys(seen: Sighting) -> Finding:
    expected = f"{seen.full_blocks} blocks with our tokens, under our salt"
    found = _odd_run(seen)
    if not found and seen.known_blocks >= seen.full_blocks:
        return Finding(
            topic=Topic.KEYS, state=State.OK, expected=expected, found=f"all {seen.known_blocks}"
        )
    if not found and seen.stream:
        return Finding(topic=Topic.KEYS, state=State.OPEN, expected=expected, found=seen.stream)
    return Finding(
        topic=Topic.KEYS,
        state=State.WRONG,
        expected=expected,
        found=found or f"{seen.known_blocks} of them",
        remedy="its events cannot be used; see that they come from this engine, unchanged",
        leaves=Belief.APPROXIMATE,
    )


def _odd_run(seen: Sighting) -> str:
    """What is wrong with the first event that is not as it should be; empty where none is."""
    for run in seen.runs:
        if run.block_tokens != seen.block_tokens:
            return f"blocks of {run.block_tokens} tokens"
        if not _is_in(run.tokens, seen.canary, seen.block_tokens):
            return "other tokens"
        if run.parent is None and run.salt not in seen.salts:
            return "another salt" if run.salt else "no salt"
    return ""


def _is_in(run: array[int], canary: array[int], block_tokens: int) -> bool:
    starts = range(0, len(canary), block_tokens)
    return any(canary[start : start + len(run)] == run for start in starts)


def _reuse(seen: Sighting) -> Finding:
    expected = f"{seen.reusable_tokens} of {len(seen.canary)} tokens the second time"
    if seen.again is None:
        return Finding(
            topic=Topic.REUSE,
            state=State.WRONG,
            expected="cached_tokens in usage",
            found="none, so that no promise can be checked",
            remedy=_USAGE_REMEDY,
        )
    if seen.cold:
        return Finding(
            topic=Topic.REUSE,
            state=State.WRONG,
            expected="0 tokens of a prompt that nobody sent before",
            found=f"{seen.cold}",
            remedy="what it tells of reuse cannot be believed",
        )
    if seen.again == 0:
        return Finding(
            topic=Topic.REUSE,
            state=State.WRONG,
            expected=expected,
            found="0: it keeps no prefixes",
            remedy="start the engine with its prefix cache (vLLM: --enable-prefix-caching)",
            leaves=Belief.BLIND,
        )
    is_all = seen.again >= seen.reusable_tokens
    state = State.OK if is_all or not seen.runs else State.NOTE
    return Finding(topic=Topic.REUSE, state=state, expected=expected, found=f"{seen.again}")


def _isolation(seen: Sighting) -> Finding:
    expected = "0 tokens reused under another salt"
    problem = ""
    if seen.again is None or seen.other is None:
        problem = "usage tells no reuse, so that none can be ruled out"
    elif seen.cold:
        problem = "what it tells of reuse cannot be believed"
    elif not seen.again and not seen.other:
        problem = "nothing is reused under the same salt either"
    if problem:
        return Finding(topic=Topic.ISOLATION, state=State.OPEN, expected=expected, found=problem)
    if not seen.other:
        found = f"0, and {seen.again} under the same"
        return Finding(topic=Topic.ISOLATION, state=State.OK, expected=expected, found=found)
    return Finding(
        topic=Topic.ISOLATION,
        state=State.WRONG,
        expected=expected,
        found=f"{seen.other} of {len(seen.canary)}",
        remedy="something behind this engine (a KV connector, an older cache tier) ignores"
        " cache_salt: take it out, or give each tenant workers of its own",
        leaves=Belief.BLIND,
    )


def _adapter(seen: Sighting, trial: AdapterTrial) -> Finding:
    expected = f"0 tokens of the model's own cache with {trial.name}"
    if trial.cached is None or not seen.again or seen.cold:
        found = "nothing that tells"
        return Finding(topic=Topic.ADAPTER, state=State.OPEN, expected=expected, found=found)
    if not trial.cached:
        return Finding(topic=Topic.ADAPTER, state=State.OK, expected=expected, found="0")
    return Finding(
        topic=Topic.ADAPTER,
        state=State.WRONG,
        expected=expected,
        found=f"{trial.cached}",
        remedy="the engine takes an adapter's KV for the model's; ours differ by their salt",
    )


def _hashes(seen: Sighting) -> Finding:
    return Finding(
        topic=Topic.HASHES,
        state=State.NOTE,
        expected="one name for one block at all workers",
        found=seen.hash_note,
        remedy="no matter here, where blocks are named anew; for engines that share blocks by their"
        " own names set one --prefix-caching-hash-algo and one PYTHONHASHSEED",
    )
