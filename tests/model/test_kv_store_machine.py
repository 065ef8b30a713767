"""The block store beside its twin: who finds what, who gives way, and where every byte is."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_twin import Twin, TwinStaging

from kv_desk import (
    BLOCK_TOKENS,
    LAYOUT,
    SIZE,
    Desk,
    chain,
    check_sums,
    content,
    is_right,
    owner,
    places_of,
)
from trunkline.core.records import Instant
from trunkline.core.transfer import Reason, kv_chain
from trunkline.kv import Kept, Manifest, Owner, Pins, Place, Staging
from trunkline.kv.digests import digests_of
from trunkline.kv.records import Gone

HOST_BLOCKS = 6
STAGING_BLOCKS = 3
DEPTH = 4
TENANTS = ["a", "b", "c"]
MOMENTS = st.sampled_from([5.0, 50.0, 500.0])

names = st.sampled_from(TENANTS)
prompts = st.integers(0, 2)
depths = st.integers(1, DEPTH)
numbers = st.integers(0, 10**6)


def manifest_of(place: Place, whose: Owner) -> Manifest:
    """What another worker says about its copy of a block."""
    return Manifest(
        place=place,
        owner=whose,
        generation=7,
        layout_digest=LAYOUT.digest,
        chunk_bytes=LAYOUT.chunk_bytes,
        digests=digests_of(memoryview(content(place)), LAYOUT),
        size_bytes=SIZE,
    )


class StoreMachine(RuleBasedStateMachine):
    """Three tenants with three prompts each. Two of them part after the first block; the third one
    goes on behind a block of the first tenant, as behind a public prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(host_blocks=HOST_BLOCKS, staging_blocks=STAGING_BLOCKS, max_pins=8)
        self.twin = Twin(HOST_BLOCKS, STAGING_BLOCKS)
        self.epochs = dict.fromkeys(TENANTS, 0)
        self.owners: dict[bytes, Owner] = {}
        self.tokens: list[bytes] = []
        """Of pins, also of those that are over."""
        self.staging_tokens: list[bytes] = []
        self.stagings: dict[bytes, Staging] = {}
        self.live: dict[bytes, Pins] = {}
        self.alarms = 0

    # -- what there is -------------------------------------------------------------------------

    def owner(self, name: str) -> Owner:
        return owner(name, self.epochs[name])

    def places(self, name: str, prompt: int) -> list[Place]:
        """All under the tenant's namespace, but the first of the third prompt."""
        whose = self.owner(name)
        head_owner = self.owner("a") if prompt == 2 else whose
        head = chain(head_owner, 0, 1)[0]
        self.owners[head.key] = head_owner
        first = 1_000 * (prompt + 1)
        tokens = array("I", range(first, first + BLOCK_TOKENS * (DEPTH - 1)))
        packed = kv_chain(whose.ns.hex(), tokens, BLOCK_TOKENS, parent=head.key)
        tail = places_of(packed, head.key, 1)
        self.owners.update((place.key, whose) for place in tail)
        return [head, *tail]

    def own_places(self, name: str, prompt: int) -> list[Place]:
        """Those under the tenant's own namespace."""
        whose = self.owner(name)
        return [place for place in self.places(name, prompt) if self.owners[place.key] == whose]

    def pick(self, tokens: list[bytes], number: int) -> bytes:
        """One of the newest, or, less often, any."""
        return (
            tokens[-1 - number % min(3, len(tokens))]
            if number % 4
            else tokens[number % len(tokens)]
        )

    def hear(self, domain: str = "", parent: bytes = b"") -> None:
        """Check each victim as it went, then believe it."""
        for event in self.desk.store.take_events():
            if isinstance(event, Gone) and not self.twin.is_doomed(event.key):
                assert not self.twin.has_room(domain), "nobody had to give way"
                assert self.twin.may_give(event.key, domain, parent)
            self.twin.hear([event], self.owners, domain)

    # -- blocks --------------------------------------------------------------------------------

    @rule(name=names, prompt=prompts, depth=depths)
    def put_run(self, name: str, prompt: int, depth: int) -> None:
        for place in self.places(name, prompt)[:depth]:
            self.put(place)

    @rule(name=names, prompt=prompts, depth=depths)
    def put_one(self, name: str, prompt: int, depth: int) -> None:
        self.put(self.places(name, prompt)[depth - 1])

    def put(self, place: Place) -> None:
        whose = self.owners[place.key]
        name = whose.domain
        before = self.twin.sees(place.key)
        has_parent = place.index == 0 or self.twin.sees(place.parent) is not None
        outcome = self.desk.store.put(place, whose, content(place))
        self.hear(name, place.parent)
        if not has_parent:
            assert outcome is Reason.CHAIN
        elif before is not None:
            assert isinstance(outcome, Kept)
            assert not outcome.is_new
        elif isinstance(outcome, Kept):
            assert outcome.is_new
            assert self.twin.sees(place.key) is not None
        else:
            assert outcome is Reason.FULL
            assert not self.twin.has_room(name)
            assert not any(self.twin.may_give(key, name, place.parent) for key in self.twin.blocks)

    @rule(name=names, prompt=prompts, depth=depths)
    def put_other_bytes(self, name: str, prompt: int, depth: int) -> None:
        place = self.places(name, prompt)[depth - 1]
        whose = self.owners[place.key]
        if self.twin.sees(place.key) is None:
            return
        if place.index and self.twin.sees(place.parent) is None:
            return
        assert self.desk.store.put(place, whose, bytes(SIZE)) is Reason.CONFLICT
        self.alarms += 1

    @rule(name=names, prompt=prompts, depth=depths, life=MOMENTS)
    def pin(self, name: str, prompt: int, depth: int, life: float) -> None:
        places, whose = self.own_places(name, prompt)[:depth], self.owner(name)
        until = self.desk.clock.ms + life
        pins = self.desk.pin(places, whose, until=until)
        if len(self.twin.pins) >= 8 and self.twin.leading(whose, places):
            assert (pins.blocks, pins.reason) == ((), Reason.PINS_FULL)
            return
        assert len(pins.blocks) == self.twin.leading(whose, places)
        assert (pins.reason is None) == (len(pins.blocks) == len(places))
        for place, block in zip(places, pins.blocks, strict=False):
            assert is_right(block, place)
        if pins.blocks:
            self.twin.pin(pins.token, [place.key for place in places[: len(pins.blocks)]], until)
            self.tokens.append(pins.token)
            self.live[pins.token] = pins

    @rule(name=names, other=names, prompt=prompts)
    def pin_for_another(self, name: str, other: str, prompt: int) -> None:
        if name != other:
            keys = [place.key for place in self.own_places(name, prompt)]
            assert self.desk.store.pin(self.owner(other).ns, keys, until=Instant(1e9)).blocks == ()

    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        if self.tokens:
            token = self.pick(self.tokens, number)
            assert self.desk.store.unpin(token) is self.twin.unpin(token)

    @rule(number=numbers, life=MOMENTS)
    def renew(self, number: int, life: float) -> None:
        if self.tokens:
            token = self.pick(self.tokens, number)
            until = self.desk.clock.ms + life
            assert self.desk.store.renew(token, Instant(until)) is self.twin.renew(token, until)

    @rule(life=MOMENTS)
    def pass_time(self, life: float) -> None:
        self.desk.clock.ms += life
        self.twin.pass_time(self.desk.clock.ms)

    # -- stagings ------------------------------------------------------------------------------

    @rule(name=names, prompt=prompts, first=st.integers(0, 2), count=depths, life=MOMENTS)
    def stage(self, name: str, prompt: int, first: int, count: int, life: float) -> None:
        places = self.own_places(name, prompt)[first : first + count]
        whose = self.owner(name)
        until = self.desk.clock.ms + life
        staging = self.desk.store.stage(whose, places, until=Instant(until))
        used = self.twin.staged_count() + self.twin.aside_count()
        if used + len(places) > STAGING_BLOCKS:
            assert staging is Reason.STAGING_FULL
            return
        assert not isinstance(staging, Reason)
        for index, place in enumerate(places):
            staging.buffer(index)[:] = content(place)
        self.twin.stagings[staging.token] = TwinStaging(places, whose, until)
        self.staging_tokens.append(staging.token)
        self.stagings[staging.token] = staging

    @rule(number=numbers, fault=st.integers(-1, 2), is_verified_first=st.booleans())
    def publish(self, number: int, fault: int, is_verified_first: bool) -> None:
        """Block `fault` is announced with other bytes; or none."""
        if not self.staging_tokens:
            return
        token = self.pick(self.staging_tokens, number)
        staging = self.twin.stagings.get(token)
        if staging is None or staging.is_over or staging.is_aside:
            assert self.desk.store.publish(token, []).reason is Reason.TOKEN
            return
        manifests = [manifest_of(place, staging.owner) for place in staging.places]
        if 0 <= fault < len(manifests):
            wrong = (bytes(16), *manifests[fault].digests[1:])
            manifests[fault] = replace(manifests[fault], digests=wrong)
        if is_verified_first:
            for index, manifest in enumerate(manifests):
                for chunk_index, digest in enumerate(manifest.digests):
                    is_right_chunk = not (index == fault and chunk_index == 0)
                    found = self.stagings[token].verify(index, chunk_index, digest)
                    assert found is is_right_chunk
        published = self.desk.store.publish(token, manifests)
        del self.twin.stagings[token]
        self.hear_published(staging, published.count)
        assert (published.reason is None) == (published.count == len(manifests))
        if 0 <= fault < len(manifests):
            assert published.count <= fault
        if staging.is_condemned:
            assert published.count == 0
            assert published.reason in (Reason.EPOCH, Reason.DIGEST)

    def hear_published(self, staging: TwinStaging, count: int) -> None:
        for event in self.desk.store.take_events():
            if isinstance(event, Gone) and not self.twin.is_doomed(event.key):
                # Blocks of this run that came in are told of after what they pushed out.
                domain = staging.owner.domain
                assert not self.twin.children(event.key)
                assert domain in self.twin.caps or self.twin.may_give(event.key, domain, b"")
            self.twin.hear([event], self.owners, staging.owner.domain)
        for place in staging.places[:count]:
            assert self.twin.sees(place.key) is not None

    @rule(number=numbers, quarantine=st.booleans())
    def abandon(self, number: int, quarantine: bool) -> None:
        if not self.staging_tokens:
            return
        token = self.pick(self.staging_tokens, number)
        staging = self.twin.stagings.get(token)
        is_good = staging is not None and not staging.is_aside
        assert self.desk.store.abandon(token, quarantine=quarantine) is is_good
        if staging is not None and is_good:
            if quarantine:
                staging.is_aside, staging.is_over = True, False
            else:
                del self.twin.stagings[token]

    @rule(number=numbers)
    def unquarantine(self, number: int) -> None:
        if self.staging_tokens:
            token = self.pick(self.staging_tokens, number)
            staging = self.twin.stagings.get(token)
            is_good = staging is not None and staging.is_aside
            assert self.desk.store.unquarantine(token) is is_good
            if is_good:
                del self.twin.stagings[token]

    # -- tenants -------------------------------------------------------------------------------

    @rule(name=names)
    def revoke(self, name: str) -> None:
        whose = self.owner(name)
        self.epochs[name] += 1
        self.desk.judge.epochs[f"tenant/{name}"] = self.epochs[name]
        self.desk.store.condemn(self.desk.judge.is_stale)
        self.twin.condemn(whose)

    @rule(limit=st.integers(1, 4))
    def erase(self, limit: int) -> None:
        assert self.desk.store.erase(limit) <= limit
        self.hear()

    @rule(name=names, floor=st.integers(0, 3), extra=st.none() | st.integers(0, 3))
    def set_quota(self, name: str, floor: int, extra: int | None) -> None:
        cap = None if extra is None else max(1, floor + extra)
        cap_bytes = None if cap is None else cap * SIZE
        assert self.desk.store.set_quota(name, floor_bytes=floor * SIZE, cap_bytes=cap_bytes)
        self.twin.floors.pop(name, None)
        self.twin.caps.pop(name, None)
        if floor:
            self.twin.floors[name] = floor
        if cap is not None:
            self.twin.caps[name] = cap

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_somewhere_once(self) -> None:
        check_sums(self.desk.store)
        figures, twin = self.desk.store.figures(), self.twin
        assert figures.staged_bytes == twin.staged_count() * SIZE
        assert figures.quarantined_bytes == twin.aside_count() * SIZE
        assert figures.pinned_bytes == twin.pinned_count() * SIZE
        assert figures.hidden_bytes == len(twin.hidden) * SIZE
        assert figures.host_bytes == (len(twin.blocks) - len(twin.hidden)) * SIZE
        assert figures.leaving_bytes == len(twin.leaving) * SIZE
        assert figures.pins == len(twin.pins)
        assert figures.conflicts == self.alarms == len(self.desk.alarms)

    @invariant()
    def what_is_here_can_be_reached(self) -> None:
        self.twin.check_closed()
        seen = [manifest.place.key for _, manifest in self.desk.store.resident()]
        assert set(seen) == self.twin.blocks.keys() - self.twin.hidden

    @invariant()
    def a_pinned_block_keeps_its_bytes(self) -> None:
        for token in list(self.live):
            if token not in self.twin.pins:
                del self.live[token]
                continue
            for block in self.live[token].blocks:
                assert is_right(block, block.manifest.place)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
