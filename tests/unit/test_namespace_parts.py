"""Each single part of a namespace, changed: the simulated worker refuses the hit and answers alike.

24 parts: 16 fields and 8 epochs, as `test_identity.py` changes them. The directory's half of it is
in `test_directory_namespaces.py`. Here the store is asked three times: under the changed namespace
as a gateway would ask, by a caller whose salt is that of the base although its ticket is not, and
over the worker's own HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from test_identity import EPOCHS, MODEL, ROOT_KEY, SCOPE, mutations

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.template import load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.core.freshness import Grant, Taken
from trunkline.core.identity import Epochs, Namespace, derive_namespace
from trunkline.kv.tickets import Ticket
from trunkline.rehearsal import OWN_MODEL
from trunkline.worker.app import WorkerParts, build_app
from trunkline.worker.fence import Fence, Reason
from trunkline.worker.options import Feed, WorkerOptions
from trunkline.worker.ticket import ticket_from
from worker_tenants import BLOCK, SUBJECTS, Store, tokens

BASE = derive_namespace(ROOT_KEY, SCOPE, MODEL)
PROMPT = tokens(5 * BLOCK + 3)
ALL_BUT_THE_LAST = 5 * BLOCK
BASE_EPOCHS = dict.fromkeys(SUBJECTS, 0)


def header_of(namespace: Namespace) -> str:
    """The ticket that a gateway writes for it."""
    epochs = [getattr(namespace.epochs, name) for name in EPOCHS]
    told = {"ns": namespace.tag.hex(), "epochs": epochs, "rev": 1, "tenant": "a" * 32}
    return json.dumps({**told, "subjects": list(SUBJECTS)})


def ticket_of(namespace: Namespace) -> Ticket:
    made = ticket_from([(b"x-trunkline-ticket", header_of(namespace).encode())])
    assert made is not None
    return made


@pytest.fixture
def store() -> Store:
    """One that holds the prompt under the base."""
    made = Store()
    made.lease(rev=1, **BASE_EPOCHS)
    assert made.run(PROMPT, ticket_of(BASE), salt=BASE.salt) == 0
    assert made.run(PROMPT, ticket_of(BASE), salt=BASE.salt) == ALL_BUT_THE_LAST
    return made


def test_there_are_24_parts() -> None:
    assert len(mutations()) == 24
    assert [part for part, _ in mutations()[16:]] == [f"epoch {name}" for name in EPOCHS]


@pytest.mark.parametrize(("part", "changed"), mutations(), ids=lambda value: str(value)[:20])
def test_the_store_refuses_the_hit(part: str, changed: Namespace, store: Store) -> None:
    assert store.run(PROMPT, ticket_of(changed), salt=changed.salt) == 0, part
    assert store.run(PROMPT, ticket_of(BASE), salt=BASE.salt) == ALL_BUT_THE_LAST, "as before"


@pytest.mark.parametrize(("part", "changed"), mutations(), ids=lambda value: str(value)[:20])
def test_the_store_refuses_it_also_where_the_salt_would_not(
    part: str, changed: Namespace, store: Store
) -> None:
    """The second lock: block names are found, and the check at the point of use says no, and why.
    An epoch is refused before a block is looked at.
    """
    assert store.run(PROMPT, ticket_of(changed), salt=BASE.salt) == 0, part
    is_epoch = part.startswith("epoch ")
    assert store.refused() == {Reason.EPOCH if is_epoch else Reason.NS: 1}, part


@pytest.mark.parametrize("name", EPOCHS)
def test_what_was_kept_before_an_epoch_moved_is_refused_to_who_asks_after(
    name: str, store: Store
) -> None:
    """The table has moved on with the request, to an equal name under an equal tag: only the
    epochs on the block tell.
    """
    raised = dict(zip(SUBJECTS, (int(one == name) for one in EPOCHS), strict=True))
    store.lease(rev=1, **raised)
    epochs = Epochs(**{name: 1})
    after = derive_namespace(ROOT_KEY, SCOPE, MODEL, epochs)
    asked = ticket_of(after)
    forged = Ticket(
        ns=bytes(BASE.tag), subjects=asked.subjects, epochs=asked.epochs, rev=1, tenant="a" * 32
    )
    assert store.run(PROMPT, forged, salt=BASE.salt) == 0
    assert store.refused() == {Reason.EPOCH: 1}


# -- by answer -------------------------------------------------------------------------------------


class Worker:
    """The whole simulated worker in this process, asked over its HTTP."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        clock = SystemClock()
        options = WorkerOptions(profile="tiny", blocks=1_024, feed=Feed.APPROXIMATE)
        parts = WorkerParts(
            tokenizer=load_tokenizer(OWN_MODEL),
            template=load_template(OWN_MODEL, wall=clock.wall),
            make_publisher=_nobody_listens,
            clock=clock,
            boot_nonce="ab" * 16,
            draw=bytes,
        )
        built = build_app(options, parts)
        fence = built.ranks[0].engine.cache._guard
        assert isinstance(fence, Fence)
        ask = fence.freshness.ask(clock.boot())
        grant = Grant(ask=ask, rev=1, ttl_ms=60_000, epochs=BASE_EPOCHS)
        fence.freshness._ttl_ms = 60_000  # as long as the tests take
        assert fence.freshness.take(grant) is Taken.ARMED
        self._fence = fence
        self._app = built.app
        self._loop = loop

    def know(self, namespace: Namespace) -> None:
        """The table of the request: what a grant would have brought."""
        self._fence.freshness._epochs = dict(
            zip(SUBJECTS, (getattr(namespace.epochs, name) for name in EPOCHS), strict=True)
        )

    def complete(self, namespace: Namespace) -> tuple[int, str]:
        """Cached tokens and text of an answer."""
        return self._loop.run_until_complete(self._complete(namespace))

    async def _complete(self, namespace: Namespace) -> tuple[int, str]:
        transport = httpx.ASGITransport(app=self._app)
        body: dict[str, Any] = {"prompt": PROMPT.tolist(), "max_tokens": 8}
        async with httpx.AsyncClient(transport=transport, base_url="http://w") as client:
            answer = await client.post(
                "/v1/completions",
                json={**body, "cache_salt": namespace.salt},
                headers={"x-trunkline-ticket": header_of(namespace)},
            )
        assert answer.status_code == 200, answer.text
        told = answer.json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, told["choices"][0]["text"]


def _nobody_listens(host: str, port: int, rank: int) -> Any:
    raise AssertionError("an approximate feed publishes nothing")


@pytest.fixture
def worker() -> Iterator[Worker]:
    loop = asyncio.new_event_loop()
    yield Worker(loop)
    loop.close()


def test_each_changed_part_has_the_answer_computed_and_the_answer_is_the_same(
    worker: Worker,
) -> None:
    """24 of 24; the table of the worker moves with the epoch, as it would by a grant, so that the
    request could reuse what is its own.
    """
    cached, text = worker.complete(BASE)
    assert cached == 0
    assert worker.complete(BASE) == (ALL_BUT_THE_LAST, text)
    for part, changed in mutations():
        worker.know(changed)
        assert worker.complete(changed) == (0, text), part
        assert worker.complete(changed) == (ALL_BUT_THE_LAST, text), f"{part}: its own"
        worker.know(BASE)
        assert worker.complete(BASE) == (ALL_BUT_THE_LAST, text), f"after {part}"
