"""What is wrong with the workers of a gateway, by what is known of each and what a visit showed.

Pure: views and visits in, ailments out, in the order of the workers. What a self-test found comes
first; then what it cannot see. Must never: say of a worker that was not seen what nobody knows.
Read `visit.py` for what is asked, `core/alignment.py` for the self-test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from trunkline.control.views import MemberView
from trunkline.control.visit import Visit
from trunkline.core.ailment import Ailment, of_finding
from trunkline.core.alarms import EXPECTED, REMEDY
from trunkline.core.alignment import State
from trunkline.core.decision import Exclusion
from trunkline.ports.worker import EngineKind

MAX_CLOCK_OFF_S = 5.0
"""By so much grants of pulls outlive what they are for (`gateway/pulls.py`)."""
TESTED: Mapping[EngineKind, tuple[int, int, int]] = {
    EngineKind.VLLM: (0, 32, 0),
    EngineKind.SGLANG: (0, 5, 18),
}
"""Releases before these were not tested with this gateway."""
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_TRANSIENT = {Exclusion.CHECKING, Exclusion.WARMING, Exclusion.ISOLATION}
"""Over in seconds; of the last, the self-test says more."""


def ailments_of_workers(
    views: Sequence[MemberView],
    visits: Mapping[str, Visit],
    *,
    idle_ms: float,
    keeps_apart: bool,
) -> list[Ailment]:
    """`idle_ms`: how long the data plane keeps an idle connection. `keeps_apart`: there is more
    than one tenant.
    """
    found: list[Ailment] = []
    for view in views:
        if not view.ranks:
            found.append(_not_here(view))
            continue
        visit = visits.get(view.name, Visit())
        peers = [one for one in views if one.ranks and one.model_id == view.model_id]
        found += _state(view)
        found += _tests(view)
        found += _feeds(view)
        found += _alarms(view)
        found += _seen(view, visit, idle_ms)
        found += _key(view, visit, keeps_apart=keeps_apart)
        found += _lengths(view, peers)
        found += _versions(view, visit, [(one, visits.get(one.name, Visit())) for one in peers])
    return found


def _ailment(view: MemberView) -> Callable[..., Ailment]:
    return partial(Ailment, subject=view.name)


def _not_here(view: MemberView) -> Ailment:
    if view.is_other_model and "cache_salt" in view.reason:
        expected, remedy = "an engine that keeps tenants apart", "install a newer release of it"
    elif view.is_other_model:
        expected = "the model that this gateway serves"
        remedy = "serve that there, or give it the name (--served-model-name); else take it out"
    else:
        expected = "a worker that answers"
        remedy = "start it, look at its address and key, or take it out (DELETE /workers/{id})"
    what = "model" if view.is_other_model else "reach"
    return _ailment(view)(what=what, expected=expected, found=view.reason, remedy=remedy)


def _state(view: MemberView) -> Iterator[Ailment]:
    why = view.exclusion
    if why is not None and why not in _TRANSIENT:
        yield _ailment(view)(
            what="state",
            expected="a worker that may be chosen",
            found=f"{why.value}: {view.reason}",
            remedy="POST /workers/{id}/undrain when it may serve again"
            if why is Exclusion.DRAINING
            else "see the log of its engine, and its load",
            state=State.NOTE if why is Exclusion.DRAINING else State.WRONG,
        )
    if "load" in view.degraded:
        yield _ailment(view)(
            what="load",
            expected="how many requests run and wait there",
            found="it tells that nowhere (tried /metrics, /load, /v1/loads)",
            remedy="serve /metrics (SGLang: --enable-metrics), and let the gateway reach it",
        )


def _tests(view: MemberView) -> Iterator[Ailment]:
    check = view.check
    for finding in check.examination.findings if check.examination else ():
        if finding.state is not State.OK:
            yield of_finding(view.name, finding)
    if check.unfinished or check.examination is None:
        yield _ailment(view)(
            what="test",
            expected="a self-test that came to its end",
            found=f"not to its end: {check.unfinished}" if check.unfinished else "none yet",
            remedy="it is repeated by itself; POST /workers/{id}/check does it now",
            state=State.OPEN,
        )


def _feeds(view: MemberView) -> Iterator[Ailment]:
    states = {rank.feed_state for rank in view.ranks}
    if states & {"silent", "blind"}:
        yield _ailment(view)(
            what="stream",
            expected="a connection to its cache events",
            found="it is down" if "silent" in states else view.reason,
            remedy="let the gateway reach the address of its events; restart the engine if it does",
        )
    if not view.is_replayable:
        yield _ailment(view)(
            what="replay",
            expected="a replay endpoint beside the events",
            found="none: what is missed of its events is lost, and all it held is doubted",
            remedy='"replay_endpoint": "tcp://*:5558" in its --kv-events-config, or &replay= in its'
            " URL",
        )


def _alarms(view: MemberView) -> Iterator[Ailment]:
    for alarm in view.alarms:
        yield _ailment(view)(
            what="alarm",
            expected=EXPECTED[alarm.kind],
            found=f"{alarm.kind.value} for {alarm.lasts_ms / 1_000.0:.0f} s: {alarm.why}",
            remedy=REMEDY[alarm.kind],
        )


def _seen(view: MemberView, visit: Visit, idle_ms: float) -> Iterator[Ailment]:
    if visit.closed_after_ms is not None:
        yield _ailment(view)(
            what="keep-alive",
            expected=f"idle connections that stay open for {idle_ms:g} ms",
            found=f"closed after {visit.closed_after_ms:.0f} ms: requests sent then are lost",
            remedy="raise the engine's (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), or lower"
            f" --keepalive-idle-ms below {visit.closed_after_ms:.0f}",
        )
    off_s = visit.clock_off_s
    if off_s is not None and abs(off_s) > MAX_CLOCK_OFF_S:
        yield _ailment(view)(
            what="clock",
            expected=f"a clock within {MAX_CLOCK_OFF_S:g} s of the gateway's",
            found=f"{abs(off_s):.0f} s {'fast' if off_s > 0 else 'slow'}",
            remedy="keep the time there and here (chrony, systemd-timesyncd): grants of pulls and"
            " tokens end by it",
        )


def _key(view: MemberView, visit: Visit, *, keeps_apart: bool) -> Iterator[Ailment]:
    """Who else reaches it only its network knows; that a key which it has does nothing is wrong."""
    if visit.asks_for_key is not False:
        return
    unkeyed = State.OPEN if keeps_apart else State.NOTE
    yield _ailment(view)(
        what="worker port",
        expected="a worker that asks for its key, or that gateways alone reach",
        found=f"{view.url} answers without one: who reaches it is served past the gateway, under"
        " any salt",
        remedy="a network that tenants are not in, or a key of its own (vLLM: --api-key), given as"
        " api_key in POST /workers",
        state=State.WRONG if view.endpoint.api_key else unkeyed,
    )


def _lengths(view: MemberView, peers: Sequence[MemberView]) -> Iterator[Ailment]:
    longest = max((one.max_model_len or 0 for one in peers), default=0)
    if view.max_model_len is not None and view.max_model_len < longest:
        yield _ailment(view)(
            what="context",
            expected=f"{longest} tokens, as others of its model",
            found=f"{view.max_model_len}, which bounds the prompts of all",
            remedy=f"start it with --max-model-len {longest}, or the others with"
            f" {view.max_model_len}",
        )


def _versions(
    view: MemberView, visit: Visit, peers: Sequence[tuple[MemberView, Visit]]
) -> Iterator[Ailment]:
    told = _version(view, visit)
    mine = _release(told)
    if mine is None:
        return
    others = [_version(*one) for one in peers if one[0].engine is view.engine]
    newest, name = max(((_release(other) or mine, other) for other in others), default=(mine, told))
    if mine < newest:
        yield _ailment(view)(
            what="version",
            expected=f"{name}, as others of its model",
            found=told,
            remedy="install one release everywhere: KV, hashes and answers differ between two",
        )
    tested = TESTED.get(view.engine)
    if tested is not None and mine < tested:
        yield _ailment(view)(
            what="version",
            expected=f"{view.engine.value} {'.'.join(map(str, tested))} or newer",
            found=told,
            remedy="install a newer release, or see docs/engines.md for what this one lacks",
            state=State.NOTE,
        )


def _version(view: MemberView, visit: Visit) -> str:
    return view.engine_version or visit.version


def _release(version: str) -> tuple[int, ...] | None:
    found = _RELEASE.match(version)
    return None if found is None else tuple(map(int, found.groups()))
