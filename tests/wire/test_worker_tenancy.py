"""The worker's agent over sockets: leases, orders, erasure, and what a paused or restarted worker
may still serve. The test is the gateway.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fleet import until
from single import PROMPT, WAIT_S, Running, cached, events_of, ids, replayed, right, worker

from halting import halt

SUBJECTS = ["fleet", "org/o", "tenant/t", "user/t/u", "key_class/k", "public/p", "model/m"]
SALT = "s" * 43
Json = dict[str, Any]


class Owner:
    """What the gateway knows of one worker: its last ask, and the epochs."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.is_kept = False
        """Whether each request comes under a fresh lease; off where leases are what is tested."""
        self.rev = 1
        self.epochs: dict[str, int] = {}
        self.ask: str = self.lease(None)["ask"]

    def lease(self, grant: Json | None) -> Json:
        answer = self.running.http.post("/trunkline/lease", json={"grant": grant})
        assert answer.status_code == 200, answer.text
        self.ask = answer.json()["ask"]
        return answer.json()

    def grant(self, ttl_ms: float = 3_000, **changes: Any) -> Json:
        made = {"ask": self.ask, "rev": self.rev, "ttl_ms": ttl_ms, "epochs": self.epochs}
        return made | changes

    def renew(self, ttl_ms: float = 3_000) -> Json:
        return self.lease(self.grant(ttl_ms))

    def order(self, subject: str, verb: str) -> Json:
        self.rev += 1
        self.epochs[subject] = self.epochs.get(subject, 0) + 1
        return self.sent(self.rev, subject, verb)

    def sent(self, rev: int, subject: str, verb: str) -> Json:
        body = {"rev": rev, "subject": subject, "epoch": self.epochs[subject], "verb": verb}
        answer = self.running.http.post("/trunkline/revoke", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ticket(self, **changes: Any) -> dict[str, str]:
        epochs = [self.epochs.get(subject, 0) for subject in SUBJECTS]
        made: Json = {
            "ns": "0" * 32,
            "epochs": [*epochs, 0],
            "rev": self.rev,
            "tenant": "a" * 32,
            "subjects": SUBJECTS,
        }
        return {"x-trunkline-ticket": json.dumps(made | changes)}

    def keep(self) -> None:
        """A lease that begins now, as with a gateway's beats: a test may take its time."""
        self.lease(None)
        self.renew()

    def complete(
        self, prompt: list[int] = PROMPT, headers: dict[str, str] | None = None, **more: Any
    ) -> Json:
        if self.is_kept:
            self.keep()
        body = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, "cache_salt": SALT}
        answer = self.running.http.post(
            "/v1/completions", json=body | more, headers=headers or self.ticket()
        )
        assert answer.status_code == 200, answer.text
        assert ids(answer.json()) == right(prompt)
        return answer.json()

    def cached(self, headers: dict[str, str] | None = None) -> int:
        return cached(self.complete(headers=headers))

    def refused(self) -> dict[str, int]:
        lines = self.running.http.get("/metrics").text.splitlines()
        mark = 'trunkline:reuse_refused_total{reason="'
        pairs = (line.removeprefix(mark).split('"} ') for line in lines if line.startswith(mark))
        return {reason: int(float(count)) for reason, count in pairs if float(count)}

    def erased(self, rev: int) -> Json:
        return self.running.http.get(f"/trunkline/erased?rev={rev}").json()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with worker() as running:
        made = Owner(running)
        made.is_kept = True
        made.keep()
        yield made


def _boot_ms() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3


def _warm(owner: Owner) -> None:
    was_kept, owner.is_kept = owner.is_kept, True
    assert owner.cached() == 0
    assert owner.cached() == 64
    owner.is_kept = was_kept


# --- leases ---


def test_a_worker_without_a_lease_computes_and_with_one_reuses() -> None:
    with worker() as running:
        owner = Owner(running)
        assert (owner.cached(), owner.cached()) == (0, 0)
        assert owner.refused() == {"lease": 2}
        told = owner.renew()
        assert told["rev"] == 1
        assert (told["fence"], told["erase"], told["salt_regions"]) == ("worker", "namespace", True)
        _warm(owner)


def test_a_lease_is_counted_from_the_ask_that_it_answers() -> None:
    with worker() as running:
        owner = Owner(running)
        asked_ms = float(owner.ask.partition(":")[2])
        until(lambda: _boot_ms() > asked_ms + 300, "the ask has grown old")
        owner.renew(ttl_ms=300)
        assert owner.cached() == 0
        owner.renew()
        _warm(owner)


def test_a_grant_arms_only_once() -> None:
    with worker() as running:
        owner = Owner(running)
        grant = owner.grant(ttl_ms=300)
        owner.lease(grant)
        asked_ms = float(grant["ask"].partition(":")[2])
        until(lambda: _boot_ms() > asked_ms + 300, "the lease has run out")
        owner.lease(grant | {"ttl_ms": 3_000})
        assert owner.cached() == 0
        assert owner.refused() == {"lease": 1}


def test_grants_for_other_lives_and_made_up_asks_arm_nothing() -> None:
    with worker() as running:
        owner = Owner(running)
        nonce, _, shown_ms = owner.ask.partition(":")
        for ask in (f"{nonce[:-1]}x:{shown_ms}", f"{nonce}:1.000", "", "nonsense"):
            owner.lease(owner.grant(ask=ask))
            assert owner.cached() == 0


def test_a_grant_below_the_revision_seen_arms_nothing_and_lowers_nothing(owner: Owner) -> None:
    _warm(owner)
    owner.order("tenant/t", "invalidate")
    told = owner.lease(owner.grant(rev=1, epochs={"tenant/t": 0}))
    assert told["rev"] == 2
    assert owner.cached(owner.ticket(epochs=[0] * 8, rev=1)) == 0
    assert owner.refused() == {"epoch": 1}


def test_an_epoch_that_comes_with_a_grant_condemns_too(owner: Owner) -> None:
    _warm(owner)
    owner.rev, owner.epochs = 2, {"tenant/t": 1}
    owner.renew()
    assert owner.cached() == 0
    ack = owner.sent(2, "tenant/t", "revoke")
    assert ack["condemned_blocks"] == 4, "its receipt counts what the grant condemned"
    until(lambda: owner.erased(2)["done"], "the erasure")


def test_a_restarted_worker_has_no_lease_and_takes_none_of_its_earlier_life() -> None:
    with worker() as running:
        owner = Owner(running)
        owner.renew()
        _warm(owner)
        open_ask = owner.ask
        port = running.http.base_url.port
        running.process.kill()
        running.process.wait(WAIT_S)
        with worker("--port", str(port)) as again:
            owner.running = again
            owner.ask = open_ask
            assert owner.renew()["boot_nonce"] != open_ask.partition(":")[0]
            assert (owner.cached(), owner.cached()) == (0, 0)
            owner.renew()
            _warm(owner)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"grant": 1}',
        b'{"grant": null, "more": 1}',
        b'{"grant": {"ask": "a:1", "rev": -1, "ttl_ms": 1, "epochs": {}}}',
        b'{"grant": {"ask": "a:1", "rev": 1, "ttl_ms": 0, "epochs": {}}}',
        b'{"grant": {"ask": "a:1", "rev": 1, "ttl_ms": 1, "epochs": {"team/x": 1}}}',
        b'{"grant": {"ask": "a:1", "rev": 1, "ttl_ms": 1, "epochs": {"fleet": -1}}}',
        b'{"grant": {"ask": "a:1", "rev": 1, "ttl_ms": 1, "epochs": {"fleet": 1.5}}}',
        b'{"grant": {"ask": "a:1", "rev": 1, "ttl_ms": 1}}',
    ],
)
def test_a_lease_call_that_makes_no_sense_is_refused(owner: Owner, body: bytes) -> None:
    answer = owner.running.http.post("/trunkline/lease", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


# --- tickets ---


@pytest.mark.parametrize("place", range(7), ids=SUBJECTS)
def test_each_epoch_that_is_another_refuses_the_hit(owner: Owner, place: int) -> None:
    _warm(owner)
    epochs = [0] * 8
    epochs[place] = 1
    assert owner.cached(owner.ticket(epochs=epochs)) == 0
    assert owner.refused() == {"epoch": 1}


def test_another_namespace_and_a_newer_revision_refuse_the_hit(owner: Owner) -> None:
    _warm(owner)
    assert owner.cached(owner.ticket(ns="1" * 32)) == 0
    assert owner.cached(owner.ticket(rev=2)) == 0
    assert owner.refused() == {"ns": 1, "lease": 1}


def test_a_bad_ticket_is_answered_400(owner: Owner) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    for changes in ({"ns": "x"}, {"rev": -1}, {"regions": ["0" * 32]}):
        headers = owner.ticket(**changes)
        answer = owner.running.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400
        assert "x-trunkline-ticket" in answer.json()["error"]["message"]


def test_scope_none_is_kept_nowhere(owner: Owner) -> None:
    nobody = owner.ticket(ns="")
    assert (owner.cached(nobody), owner.cached(nobody)) == (0, 0)
    assert replayed(owner.running.replay) == []


def test_a_public_region_is_shared_between_tenants(owner: Owner) -> None:
    shared, public = PROMPT[:32], "p" * 43
    filler = owner.ticket(ns="f" * 32)
    owner.complete([*shared, 7], filler, cache_salt=public)
    for tenant in ("a", "b"):
        headers = owner.ticket(ns=tenant * 32, tenant=tenant * 32, regions=["f" * 32])
        more = {"cache_salt": tenant * 43, "cache_salt_regions": [[2, public]]}
        assert cached(owner.complete(headers=headers, **more)) == 32
        assert cached(owner.complete(headers=headers, **more)) == 64


def test_without_an_agent_the_worker_is_a_stock_engine() -> None:
    with worker("--agent", "off") as running:
        for path in ("lease", "revoke"):
            assert running.http.post(f"/trunkline/{path}", json={"grant": None}).status_code == 404
        assert running.http.get("/trunkline/erased?rev=1").status_code == 404
        headers = {"x-trunkline-ticket": "nonsense"}
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt_regions": "nonsense"}
        answers = [
            running.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)
        ]
        assert [cached(answer.json()) for answer in answers] == [0, 64]
        assert "trunkline:" not in running.http.get("/metrics").text


# --- orders ---


def test_a_revoked_prefix_is_unreachable_at_the_ack_and_then_erased_and_told(owner: Owner) -> None:
    _warm(owner)
    ack = owner.order("tenant/t", "revoke")
    assert (ack["rev"], ack["aborted"], ack["condemned_blocks"]) == (2, 0, 4)
    assert ack["condemned_bytes"] == {"device": 4 * 1_024}
    assert owner.cached() == 0
    receipt = until(lambda: owner.erased(2)["done"] and owner.erased(2), "the erasure")
    assert receipt == {"rev": 2, "done": True, "blocks": 4, "bytes": {"device": 4 * 1_024}}
    kinds = [event["type"] for _, batch in replayed(owner.running.replay) for event in batch[1]]
    assert kinds == ["BlockStored", *["BlockRemoved"] * 4, "BlockStored"] or kinds == [
        "BlockStored",
        "BlockStored",
        *["BlockRemoved"] * 4,
    ]


def test_what_was_not_revoked_stays(owner: Owner) -> None:
    _warm(owner)
    other = ["fleet", "tenant/other"]
    theirs = owner.ticket(ns="1" * 32, subjects=other, epochs=[0] * 8)
    more: Json = {"cache_salt": "other"}
    owner.complete(headers=theirs, **more)
    owner.order("tenant/t", "revoke")
    assert cached(owner.complete(headers=theirs, **more)) == 64


def test_an_order_that_comes_twice_is_acked_twice_and_carried_out_once(owner: Owner) -> None:
    _warm(owner)
    first = owner.order("tenant/t", "revoke")
    owner.complete()
    assert owner.sent(2, "tenant/t", "revoke") == first
    assert owner.cached() == 64


def test_another_order_under_a_revision_that_was_told_is_refused(owner: Owner) -> None:
    owner.order("tenant/t", "revoke")
    body = {"rev": 2, "subject": "org/o", "epoch": 1, "verb": "revoke"}
    answer = owner.running.http.post("/trunkline/revoke", json=body)
    assert answer.status_code == 400
    assert "another order" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rev": -1},
        {"epoch": -1},
        {"subject": "team/x"},
        {"subject": ""},
        {"verb": "delete"},
        {"rev": "2"},
        {"more": 1},
    ],
)
def test_an_order_that_makes_no_sense_is_refused_and_changes_nothing(
    owner: Owner, changes: Json
) -> None:
    _warm(owner)
    body = {"rev": 2, "subject": "tenant/t", "epoch": 1, "verb": "revoke"} | changes
    assert owner.running.http.post("/trunkline/revoke", json=body).status_code == 400
    assert owner.cached() == 64


def test_a_revision_without_an_order_has_no_receipt(owner: Owner) -> None:
    assert owner.running.http.get("/trunkline/erased?rev=99").status_code == 404
    for rev in ("", "x", "-1", "1" * 40):
        assert owner.running.http.get(f"/trunkline/erased?rev={rev}").status_code == 400


class Stream(threading.Thread):
    """One streamed answer, read in the background."""

    def __init__(self, owner: Owner, wanted: int) -> None:
        super().__init__(daemon=True)
        self._owner, self._wanted = owner, wanted
        owner.keep()
        self._headers = owner.ticket()
        self.text = ""
        self.start()

    def run(self) -> None:
        body = {
            "prompt": PROMPT,
            "max_tokens": self._wanted,
            "stream": True,
            "cache_salt": SALT,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        url = self._owner.running.http.base_url.join("/v1/completions")
        with httpx.stream("POST", url, json=body, headers=self._headers, timeout=WAIT_S) as answer:
            for part in answer.iter_text():
                self.text += part

    def begun(self, tokens: int = 1) -> None:
        until(lambda: self.text.count('"token_ids"') >= tokens, "the first tokens")

    def ended(self) -> list[Any]:
        self.join(WAIT_S)
        assert not self.is_alive()
        return events_of(self.text)


@pytest.fixture
def slow_owner() -> Iterator[Owner]:
    with worker("--time-scale", "20") as running:
        made = Owner(running)
        made.is_kept = True
        made.keep()
        yield made


def test_revoke_ends_a_running_stream_with_an_error_and_frees_what_it_held(
    slow_owner: Owner,
) -> None:
    stream = Stream(slow_owner, 5_000)
    stream.begun()
    ack = slow_owner.order("tenant/t", "revoke")
    assert ack["aborted"] == 1
    assert ack["condemned_blocks"] >= 4
    last = stream.ended()[-1]
    assert last["error"]["code"] == 500
    assert "revoked" in last["error"]["message"]
    receipt = until(lambda: slow_owner.erased(2)["done"] and slow_owner.erased(2), "the erasure")
    assert receipt["blocks"] == ack["condemned_blocks"]
    running = slow_owner.running
    until(lambda: running.metric("vllm:num_requests_running") == 0, "the end of all")


def test_revoke_of_another_leaves_a_running_stream_alone(slow_owner: Owner) -> None:
    stream = Stream(slow_owner, 40)
    stream.begun()
    assert slow_owner.order("tenant/other", "revoke")["aborted"] == 0
    assert "error" not in stream.ended()[-1]


def test_invalidate_lets_a_stream_finish_on_what_it_holds_and_keep_nothing_more(
    slow_owner: Owner,
) -> None:
    stream = Stream(slow_owner, 40)
    stream.begun()
    ack = slow_owner.order("tenant/t", "invalidate")
    assert (ack["aborted"], ack["condemned_blocks"] >= 4) == (0, True)
    events = stream.ended()
    tokens = [one for event in events[:-2] for one in event["choices"][0]["token_ids"]]
    assert tokens == right(PROMPT, 40)
    receipt = until(lambda: slow_owner.erased(2)["done"] and slow_owner.erased(2), "the erasure")
    assert receipt["blocks"] == ack["condemned_blocks"]
    stored, removed = 0, 0
    for _, batch in replayed(slow_owner.running.replay):
        for event in batch[1]:
            stored += len(event["block_hashes"]) * (event["type"] == "BlockStored")
            removed += event["type"] == "BlockRemoved"
    assert stored == removed == ack["condemned_blocks"]


# --- a stopped worker ---


def test_a_worker_that_was_stopped_past_its_lease_reuses_nothing(owner: Owner) -> None:
    _warm(owner)
    owner.is_kept = False
    with _stopped(owner.running, lambda: _boot_ms() > stopped_ms + 3_000):
        stopped_ms = _boot_ms()
    assert owner.cached() == 0
    assert owner.refused() == {"lease": 1}
    owner.is_kept = True
    assert owner.cached() == 64


def test_a_worker_stopped_between_binding_and_first_byte_computes_what_it_had_bound() -> None:
    # What did not hit takes a second: long enough to stop in the middle of it.
    with worker("--time-scale", "1000") as running:
        owner = Owner(running)
        warm = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": SALT}

        def is_warm() -> bool:
            """Unless its lease ran out while it computed."""
            owner.keep()
            before = owner.refused()
            running.http.post("/v1/completions", json=warm, headers=owner.ticket())
            return owner.refused() == before

        until(is_warm, "what it computed is kept")
        before = owner.refused().get("lease", 0)
        stream = Stream(owner, 1)
        until(lambda: running.metric("vllm:num_requests_running") == 1, "the request is bound")
        with _stopped(running, lambda: _boot_ms() > stopped_ms + 3_000):
            stopped_ms = _boot_ms()
        usage = stream.ended()[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert owner.refused() == {"lease": before + 1}


class _stopped:  # noqa: N801 - reads as what it is
    """The worker is stopped until the condition holds."""

    def __init__(self, running: Running, upto: Callable[[], bool]) -> None:
        self._running, self._upto = running, upto

    def __enter__(self) -> None:
        halt(self._running.process.pid)

    def __exit__(self, *_: object) -> None:
        try:
            until(self._upto, "time passes")
        finally:
            self._running.process.send_signal(signal.SIGCONT)
