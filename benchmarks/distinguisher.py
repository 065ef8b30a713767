"""Whether an attacker can tell by the clock what another tenant has asked, over real sockets.

    python benchmarks/distinguisher.py [--probes 2000] [--seed 1] [--json]

A gateway with tenants and two simulated workers, as processes. Before each probe the victim asks a
prompt of 512 tokens. The attacker then asks one that begins with 95 % of it (arm `asked`) or of one
that nobody asked (arm `fresh`), and takes the time to its one token. Both arms see the same load.
Once as another tenant (S2), once as another user of the victim's tenant (S3, the positive control:
without it S2 proves nothing); all four are interleaved in a drawn order, `--probes` of each.

AUC: how often a fresh probe takes longer than an asked one, ties half; 0.5 is blind. Its 95 %
limits are DeLong's. `ks_p` is the two-sample Kolmogorov-Smirnov test (asymptotic) over all probes;
`ks_runs_passed` counts those of ten consecutive runs with p above 0.01. Bars, or exit code 1:
  other tenant   the limit farther from 0.5 within 0.05 of it; at least 9 of the 10 runs pass
  same tenant    AUC at least 0.95
Needs some two minutes a thousand probes, and a machine that is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trunkline.replay.processes import start_child

PROMPT_TOKENS = 512
PREFIX_FRACTION = 0.95
PROFILE = "fifo:3,0.012,1"
"""Some 9 ms for a whole prompt and 3 ms for what a hit leaves of it."""
RUNS = 10
MOST_AUC, LEAST_AUC = 0.55, 0.95
LEAST_KS_P, LEAST_KS_RUNS = 0.01, 9
ARMS = ("asked", "fresh")
CALLERS = ("other", "same")
Samples = dict[tuple[str, str], list[float]]
"""Milliseconds by who asked and which arm it was."""


# -- measuring -------------------------------------------------------------------------------------


class Client:
    """One API key on one connection that stays open."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._link = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, prompt: Sequence[int]) -> float:
        """Milliseconds to the only token."""
        body = json.dumps({"prompt": list(prompt), "max_tokens": 1})
        began = time.perf_counter()
        self._link.request("POST", "/v1/completions", body, self._headers)
        answer = self._link.getresponse()
        told = answer.read()
        took_ms = (time.perf_counter() - began) * 1e3
        assert answer.status == 200, told
        return took_ms


def measure(url: str, keys: dict[str, str], probes: int, seed: int) -> Samples:
    """All probes, one after another."""
    dice = random.Random(seed)
    clients = {name: Client(url, key) for name, key in keys.items()}
    kept = int(PROMPT_TOKENS * PREFIX_FRACTION)
    samples: Samples = {(caller, arm): [] for caller in CALLERS for arm in ARMS}
    began = time.monotonic()
    for number in range(probes):
        order = list(samples)
        dice.shuffle(order)
        for caller, arm in order:
            victims, others, rest = (
                [dice.randrange(1_000, 4_000) for _ in range(PROMPT_TOKENS)] for _ in range(3)
            )
            clients["victim"].ask(victims)
            guess = victims if arm == "asked" else others
            took_ms = clients[caller].ask(guess[:kept] + rest[kept:])
            samples[caller, arm].append(took_ms)
        if sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{number} of {probes}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return samples


async def _fleet_and_keys(folder: Path, probes: int, seed: int) -> Samples:
    workers = [await start_child("worker", ["worker", "--profile", PROFILE]) for _ in range(2)]
    for worker in workers:
        await worker.wait_ready()
    urls = [worker.ready["url"] for worker in workers]
    words = ["serve", "--worker-urls", *urls, "--port", "0", "--admin-port", "0"]
    words += ["--state-dir", str(folder), "--profile", PROFILE]
    gateway = await start_child("gateway", words)
    try:
        await gateway.wait_ready()
        admin = gateway.ready["admin_url"]
        await asyncio.to_thread(_wait_leased, admin, len(urls))
        keys = {
            "victim": _key(admin, "acme", "ann"),
            "same": _key(admin, "acme", "bob"),
            "other": _key(admin, "globex", "eve"),
        }
        return await asyncio.to_thread(measure, gateway.ready["url"], keys, probes, seed)
    finally:
        await gateway.stop()
        for worker in workers:
            await worker.stop()


def _call(admin: str, method: str, path: str, body: object = None) -> object:
    parts = urlsplit(admin)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=10)
    raw = None if body is None else json.dumps(body)
    link.request(method, path, raw, {"content-type": "application/json"})
    answer = link.getresponse()
    told = answer.read()
    assert answer.status < 300, told
    return json.loads(told)


def _key(admin: str, tenant: str, user: str) -> str:
    body = {"tenant": tenant, "create_tenant": True, "user": user}
    made = _call(admin, "POST", "/keys", body)
    assert isinstance(made, dict)
    return str(made["key"])


def _wait_leased(admin: str, count: int) -> None:
    ends_at = time.monotonic() + 20.0
    while time.monotonic() < ends_at:
        told = _call(admin, "GET", "/workers")
        assert isinstance(told, dict)
        rows = told["workers"]
        if sum(bool(row["detail"].get("isolation", {}).get("lease")) for row in rows) >= count:
            return
        time.sleep(0.1)
    raise RuntimeError("the workers hold no lease after 20 s")


# -- telling apart ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How well two arms can be told apart."""

    auc: float
    auc_low: float
    auc_high: float
    ks_p: float
    ks_runs_passed: int
    asked_ms_p50: float
    fresh_ms_p50: float

    @property
    def farthest(self) -> float:
        """The limit that is farther from blindness, whichever way it points."""
        return max(self.auc_high, 1.0 - self.auc_low)


def verdict(asked: list[float], fresh: list[float]) -> Verdict:
    auc, error = delong(asked, fresh)
    size = max(1, len(asked) // RUNS)
    parts = [slice(start, start + size) for start in range(0, size * RUNS, size)]
    passed = sum(ks_p(asked[part], fresh[part]) > LEAST_KS_P for part in parts)
    return Verdict(
        auc=auc,
        auc_low=auc - 1.96 * error,
        auc_high=auc + 1.96 * error,
        ks_p=ks_p(asked, fresh),
        ks_runs_passed=passed,
        asked_ms_p50=statistics.median(asked),
        fresh_ms_p50=statistics.median(fresh),
    )


def delong(low: list[float], high: list[float]) -> tuple[float, float]:
    """P(one of `high` is above one of `low`), ties half, and its standard error by DeLong."""
    of_high, of_low = _placements(high, low), _placements(low, high)
    auc = statistics.fmean(of_high)
    variance = statistics.variance(of_high) / len(high) + statistics.variance(of_low) / len(low)
    return auc, math.sqrt(variance)


def _placements(values: list[float], among: list[float]) -> list[float]:
    """For each value the share of the others that it is above, ties half."""
    ordered = sorted(among)
    return [
        (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered))
        for value in values
    ]


def ks_p(one: list[float], other: list[float]) -> float:
    """The two-sample Kolmogorov-Smirnov test, by its asymptotic distribution."""
    first, second = sorted(one), sorted(other)
    distance = max(
        abs(bisect_right(first, value) / len(first) - bisect_right(second, value) / len(second))
        for value in (*first, *second)
    )
    effective = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    if scaled < 0.2:
        return 1.0  # the series does not converge there, and is 1 to ten places
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2.0 * sum(terms)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--probes", type=int, default=2_000, help="probes in each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(_fleet_and_keys(Path(folder) / "state", args.probes, args.seed))
    found = {who: verdict(samples[who, "asked"], samples[who, "fresh"]) for who in CALLERS}
    is_blind = (
        found["other"].farthest <= MOST_AUC and found["other"].ks_runs_passed >= LEAST_KS_RUNS
    )
    is_sharp = found["same"].auc >= LEAST_AUC
    report = {
        "benchmark": "distinguisher",
        "probes": args.probes,
        **{
            f"{who}_tenant": {name: round(value, 4) for name, value in asdict(one).items()}
            for who, one in found.items()
        },
        "bars": {"other_tenant": is_blind, "same_tenant": is_sharp},
    }
    print(json.dumps(report, indent=2) if args.json else report)
    return 0 if is_blind and is_sharp else 1


if __name__ == "__main__":
    raise SystemExit(main())
