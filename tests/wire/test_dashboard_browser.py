"""The dashboard in Chromium before a real gateway: what each view is for, trouble, and who may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import DESK, PHONE, chromium, visit
from fleet import Gateway, Processes, processes, text_of, until
from tenants import Tenants, tenants

from loopback import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ADMIN_KEY = "operator-key-of-a-test"
FLEET_VIEWS = ["Fleet", "Traffic", "Prefixes", "Decisions"]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SCRIPT = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(name="browser", scope="module")
def a_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(name="gateway", scope="module")
def a_gateway() -> Iterator[Gateway]:
    """Two workers that have answered a few requests, some of them streamed."""
    with processes() as started:
        workers = started.workers(2, "--profile", "tiny")
        gateway = started.gateway([worker.url for worker in workers])
        shared = text_of(200, "shared")
        for turn in range(6):
            body: dict[str, Any] = STREAMED if turn % 2 else {}
            answer = gateway.chat(
                f"{shared} {text_of(5, turn)}", {"x-request-id": f"r{turn}"}, **body
            )
            assert answer.status == 200
        gateway.wait_quiet()
        yield gateway


def page_of(gateway: Gateway) -> str:
    return gateway.process.ready["dashboard"]


# --- each view ------------------------------------------------------------------------------------


def test_the_fleet_is_filtered_and_a_worker_is_opened_by_keyboard(
    browser: Browser, gateway: Gateway
) -> None:
    names = sorted(gateway.workers())
    with visit(browser, page_of(gateway)) as seen:
        seen.wait_text("#view-fleet .summary", "2 of 2 workers are ready; 2 shown.")
        seen.wait_text("#figures .tile.false strong", "0")
        seen.wait_text("#view-fleet tbody", ": device ")
        seen.page.keyboard.press("/")
        seen.page.keyboard.type(names[1])
        seen.wait_text("#view-fleet .summary", "1 shown.")
        seen.page.keyboard.press("Escape")
        seen.wait_text("#view-fleet .summary", "2 shown.")
        seen.page.focus("#view-fleet tbody tr >> nth=0")
        seen.page.keyboard.press("ArrowDown")
        assert names[1] in seen.focused()
        seen.page.keyboard.press("ArrowUp")
        seen.page.keyboard.press("Enter")
        seen.wait_text("#detail-title", names[0])
        seen.wait_text("#detail-body", "100 % believed")
        raw = re.findall(r"\w+_\w+", seen.page.locator("#detail-body").inner_text())
        assert raw == [], "in words, not in names of fields"
        seen.page.keyboard.press("Escape")
        seen.page.wait_for_selector("#detail:not([open])", state="attached")
        assert names[0] in seen.focused(), "where it was before"
        assert seen.complaints == []


def test_a_decision_is_found_by_its_id_and_opened_term_by_term(
    browser: Browser, gateway: Gateway
) -> None:
    with visit(browser, page_of(gateway)) as seen:
        seen.wait_live()
        seen.go("decisions")
        seen.wait_text("#view-decisions .summary", "The latest 6 of 6 since start")
        seen.page.keyboard.press("/")
        seen.page.keyboard.type("r5")
        seen.wait_text("#view-decisions .summary", "1 of those that are kept match.")
        [row] = seen.rows("decisions")
        assert "cache-hit" in row
        seen.page.click("#view-decisions tbody tr")
        seen.wait_text("#detail-title", "Request r5")
        seen.wait_text("#detail-body dt", "First token")
        told = gateway.admin("/decisions/r5").json()
        shown = seen.page.locator("#detail-body").inner_text()
        for word in (told["worker"], "queue", "transfer", "miss", "imbalance", "decode"):
            assert word in shown
        assert f"{told['outcome']['reused_tokens']}" in shown
        assert seen.page.locator("#detail .candidates tbody tr").count() == 2
        assert seen.page.locator("#detail .terms .term").count() >= 2, "bars"
        seen.page.click("#detail-close")
        seen.page.select_option("#view-decisions select >> nth=1", "worker-failed")
        seen.wait_text("#view-decisions .empty", "None of the decisions that are kept")
        assert seen.complaints == []


def test_traffic_says_what_the_least_queue_is_estimated_from(
    browser: Browser, gateway: Gateway
) -> None:
    with visit(browser, page_of(gateway)) as seen:
        seen.wait_live()
        seen.go("traffic")
        seen.wait_text("#view-traffic tbody", "Least queue, predicted")
        text = seen.page.locator("#view-traffic").inner_text()
        assert "From 6 choices that ended" in text
        assert "It is an estimate for single requests" in text
        for row in ("Our choice, predicted", "Observed, streamed answers", "cache-hit", "2xx"):
            assert row in text
        assert seen.complaints == []


def test_prefixes_are_ids_and_no_text(browser: Browser, gateway: Gateway) -> None:
    with visit(browser, page_of(gateway)) as seen:
        seen.wait_live()
        seen.go("prefixes")
        seen.page.wait_for_selector("#view-prefixes tbody tr")
        [row] = seen.rows("prefixes")
        prefix, tokens, *_ = row.split("\t")
        assert len(bytes.fromhex(prefix)) == 16
        assert int(tokens) == 512, "of 560 that were found"
        assert not set(text_of(200, "shared").split()) & set(seen.page.content().split())


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_breaks_out_of_the_screen_and_nothing_is_complained_of(
    size: tuple[int, int], scheme: str, browser: Browser, gateway: Gateway
) -> None:
    with visit(browser, page_of(gateway), size, scheme) as seen:
        seen.wait_live()
        for view in ("fleet", "traffic", "prefixes", "decisions"):
            seen.go(view)
            seen.page.wait_for_selector(f"#view-{view} tbody tr")
            seen.assert_fits()
        seen.page.click("#view-decisions tbody tr")
        seen.page.wait_for_selector("#detail .candidates tbody tr")
        seen.assert_fits()
        small = seen.page.evaluate(
            "[...document.querySelectorAll('button, select, input, nav a')]"
            ".filter(e => e.getClientRects().length && e.offsetHeight < 44)"
            ".map(e => e.outerHTML)"
        )
        assert small == [], "big enough for a thumb"
        cut = seen.page.evaluate(
            "[...document.querySelectorAll('input.filter')].filter(e => e.getClientRects().length"
            " && [e.value = e.placeholder, e.scrollWidth > e.clientWidth, e.value = ''][1])"
            ".map(e => e.placeholder)"
        )
        assert cut == [], "what may be looked for is read whole"
        assert seen.complaints == []


def test_it_can_be_read_by_ear_and_used_without_a_mouse(browser: Browser, gateway: Gateway) -> None:
    with visit(browser, page_of(gateway), PHONE) as seen:
        seen.wait_live()
        seen.page.wait_for_selector("#view-fleet tbody tr")
        for mark in ("header", "nav[aria-label]", "main", "footer", "h1", "html[lang]"):
            assert seen.page.locator(mark).count() == 1
        nameless = seen.page.evaluate(
            "[...document.querySelectorAll('input, select, button')]"
            ".filter(e => !e.labels?.length && !e.innerText.trim() && !e.ariaLabel)"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []
        # Cards keep the roles of a table, which a style of their own would take from it.
        table = seen.page.locator("#view-fleet table")
        assert table.get_by_role("columnheader").count() == 10
        assert table.get_by_role("rowheader").count() == 2
        assert table.locator("caption").inner_text() == "Workers"
        assert seen.page.locator("#view-fleet tr[tabindex='0']").count() == 1, "one stop a table"
        seen.page.keyboard.press("Tab")
        assert seen.focused() == "Skip to the view"
        seen.page.keyboard.press("Enter")
        assert seen.page.evaluate("document.activeElement.id") == "main"
        for _ in range(3):
            seen.page.keyboard.press("Tab")
        outline = seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert (seen.page.evaluate("document.activeElement.tagName"), outline) == ("TR", "solid")


# --- trouble --------------------------------------------------------------------------------------


def test_a_gateway_that_goes_away_is_said_and_comes_back_by_itself(browser: Browser) -> None:
    with processes() as started:
        worker = started.worker("--profile", "tiny")
        port = str(free_port())
        gateway = started.gateway([worker.url], "--admin-port", port)
        with visit(browser, page_of(gateway)) as seen:
            seen.wait_text("#view-fleet .summary", "1 of 1 workers are ready")
            gateway.process.kill()
            seen.wait_text("#banner", "Gateway not answering since")
            assert "1 of 1" in seen.page.locator("#view-fleet").inner_text(), "what was known stays"
            started.gateway([worker.url], "--admin-port", port)
            seen.page.wait_for_selector("#banner", state="hidden")
            seen.wait_live()


def test_without_a_worker_it_says_what_to_do(browser: Browser, started: Processes) -> None:
    gateway = started.gateway([])
    with visit(browser, page_of(gateway)) as seen:
        seen.wait_text("#view-fleet .empty", "--worker-urls")
        gateway.admin("/workers", "POST", json={"url": f"http://127.0.0.1:{free_port()}"})
        seen.wait_text("#view-fleet .trouble", "No worker may be chosen now")
        seen.wait_text("#view-fleet .state", "joining")
        assert seen.complaints == []


# --- who may --------------------------------------------------------------------------------------


@pytest.fixture(name="started")
def some_processes() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(name="kept", scope="module")
def a_kept_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """A gateway with tenants; its port needs no key."""
    with processes() as started:
        worker = started.worker("--profile", "tiny")
        fleet = tenants(started, [worker.url], tmp_path_factory.mktemp("kept"))
        fleet.caller("small")
        asking = fleet.caller("acme")
        assert [asking.answer("asked twice " * 40).status for _ in range(2)] == [200, 200]
        fleet.gateway.wait_quiet()
        policy = {"cache_cap_bytes": 5_000_000_000}
        fleet.gateway.admin("/tenants/acme/policy", "PUT", json=policy)
        fleet.gateway.admin(
            "/invalidate", "POST", json={"subject": "tenant/acme", "reason": SCRIPT}
        )
        yield fleet


def key_of(fleet: Tenants, role: str) -> str:
    made = fleet.gateway.admin("/keys", "POST", json={"tenant": "acme", "roles": [role]})
    return made.json()["key"]


def sign_in(seen: Any, key: str) -> None:
    if seen.page.locator("#door").is_hidden():
        seen.page.click("#sign")
    seen.page.fill("#key", key)
    seen.page.keyboard.press("Enter")


def test_the_operator_sees_tenants_revocations_and_audit_as_text(
    browser: Browser, kept: Tenants
) -> None:
    with visit(browser, page_of(kept.gateway), PHONE) as seen:
        seen.wait_live()
        assert seen.views() == [*FLEET_VIEWS, "Tenants", "Revocations", "Audit"]
        seen.go("tenants")
        seen.wait_text("#view-tenants tbody", "acme")
        seen.wait_text("#view-tenants tbody", "5.0 GB")
        first, second = seen.page.locator("#view-tenants tbody tr").all()
        (row,) = [
            one["usage"]
            for one in kept.gateway.admin("/tenants").json()["tenants"]
            if one["tenant"] == "acme"
        ]
        shown = {
            label: first.locator(f"td[data-label='{label}']").inner_text()
            for label in ("Requests", "Prompt tokens", "Hits")
        }
        assert shown == {
            "Requests": "2",
            "Prompt tokens": str(row["prompt_tokens"]),
            "Hits": f"{100 * row['hit_tokens'] / row['reported_tokens']:.1f} %",
        }
        assert "small" in second.inner_text(), "who asked for most is first"
        assert second.locator("td[data-label='Hits']").inner_text() == "–"
        seen.assert_fits()
        seen.go("revocations")
        seen.wait_text("#view-revocations tbody", "tenant/acme")
        seen.assert_fits()
        seen.go("audit")
        seen.wait_text("#view-audit tbody", SCRIPT)
        seen.wait_text("#view-audit tbody td[data-label='Of']", "tenant/acme")
        seen.assert_fits()
        assert seen.page.locator("main img").count() == 0
        assert "broken" not in seen.page.title()
        assert seen.complaints == []


@pytest.mark.parametrize(
    ("role", "views"),
    [
        ("fleet.operator", FLEET_VIEWS),
        ("auditor", ["Revocations", "Audit"]),
        ("security.officer", ["Tenants", "Revocations"]),
    ],
)
def test_a_role_is_offered_what_it_may_see_and_the_gateway_refuses_the_rest(
    role: str, views: list[str], browser: Browser, kept: Tenants
) -> None:
    with visit(browser, page_of(kept.gateway)) as seen:
        seen.wait_live()
        key = key_of(kept, role)
        sign_in(seen, key)
        until(lambda: seen.views() == views, f"{role} is offered {views}")
        hidden = {"Decisions": "decisions", "Tenants": "tenants", "Audit": "audit"}
        for view, path in hidden.items():
            status = seen.page.evaluate(
                "async ([path, key]) => (await fetch(path,"
                " {headers: {authorization: `Bearer ${key}`}})).status",
                [path, key],
            )
            assert (status == 200) == (view in views)
        assert key not in seen.page.url
        assert key not in seen.page.content()
        seen.page.click("#sign")
        seen.wait_live()
        until(lambda: "Fleet" in seen.views(), "without it, the operator of a keyless port again")
        assert seen.page.evaluate("sessionStorage.getItem('trunkline.key')") is None


def test_a_wrong_key_is_said_where_none_is_needed(browser: Browser, kept: Tenants) -> None:
    with visit(browser, page_of(kept.gateway)) as seen:
        seen.wait_live()
        sign_in(seen, "not-a-key")
        seen.wait_text("#door-why", "This key is not good here")
        seen.wait_live()
        seen.page.click("#door-close")
        assert seen.views()[:4] == FLEET_VIEWS, "what is open to all goes on"


def test_a_port_with_a_key_shows_nothing_before_it_is_given(
    browser: Browser, started: Processes, tmp_path: Path
) -> None:
    worker = started.worker("--profile", "tiny")
    key_file = tmp_path / "key"
    key_file.write_text(ADMIN_KEY)
    key_file.chmod(0o600)
    process = started.begin(
        *("serve", "--auth", "off", "--worker-urls", worker.url, "--port", "0"),
        *("--admin-port", "0", "--admin-api-key", f"@{key_file}"),
    )
    process.wait_ready()
    with visit(browser, process.ready["dashboard"]) as seen:
        seen.page.wait_for_selector("#door:not([hidden])")
        assert seen.page.locator("#all").is_hidden()
        assert seen.complaints == []
        sign_in(seen, "not-the-key")
        seen.wait_text("#door-why", "This key is not good here")
        sign_in(seen, ADMIN_KEY)
        seen.wait_text("#view-fleet tbody", worker.name)
        seen.page.reload()
        seen.wait_text("#view-fleet tbody", worker.name)
        assert ADMIN_KEY not in seen.page.url
