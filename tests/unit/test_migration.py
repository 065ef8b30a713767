"""Names of other routers: refused with what to give here, and the page that says it in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trunkline import reference, tenant_commands
from trunkline.cli import VERBS, build_parser
from trunkline.errors import ConfigError
from trunkline.foreign import BY_PEER, FOREIGN, VALUES
from trunkline.leaf import leaves, leaves_by_name
from trunkline.settings import resolve

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
OF_ENGINES = {"--kv-events-config", "--enable-cache-report"}
OURS = {name for leaf in leaves() for name in (leaf.flag, *leaf.flag_aliases)}
OURS |= {"--config", "--print-config"}
FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")


def refusal(*words: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(vars(build_parser("serve").read(words)), environ or {})
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_setting_of_another_router_is_refused_wherever_it_is_given_and_told_what_to_do(
    name: str, tmp_path: Path
) -> None:
    flag, file = f"--{name.replace('_', '-')}", tmp_path / "trunkline.toml"
    file.write_text(f"{name} = 1\n", encoding="utf-8")
    variable = f"TRUNKLINE_{name.upper()}"
    for message in (
        refusal(flag, "1"),
        refusal(f"{flag}=1"),
        refusal(environ={variable: "1"}),
        refusal("--config", str(file)),
    ):
        assert message.endswith(f"belongs to other routers; {FOREIGN[name]}")


def test_no_name_of_another_router_is_one_of_ours_and_none_has_two_remedies() -> None:
    assert not {f"--{name.replace('_', '-')}" for name in FOREIGN} & OURS
    assert len(FOREIGN) == sum(map(len, BY_PEER.values()))


def test_a_remedy_names_flags_that_exist() -> None:
    for name, remedy in FOREIGN.items():
        assert set(FLAG.findall(remedy)) <= OURS, name


def test_thresholds_are_refused_because_the_cost_has_none() -> None:
    for flag in ("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold"):
        assert "the cost in milliseconds has no thresholds" in refusal(flag, "0.5")


def test_a_split_of_prefill_and_decode_is_refused_in_so_many_words() -> None:
    for words in (
        ("--pd-disaggregation", "--prefill", "http://a:1", "9000", "--decode", "http://b:1"),
        ("--prefill", "http://a:1", "none"),
        ("--decode=http://b:1",),
        ("--prefill-policy", "cache_aware"),
        ("--decode-policy", "round_robin"),
    ):
        assert "there is no prefill/decode mode here" in refusal(*words)


def test_what_a_launcher_puts_in_front_of_its_routers_flags_is_seen_through() -> None:
    assert "is called --max-payload-size here" in refusal("--router-max-payload-size", "1024")
    assert "is called --admin-port here" in refusal("--router-prometheus-port", "1")
    assert FOREIGN["cache_threshold"] in refusal("--router-cache-threshold", "0.5")


def test_the_page_names_no_flag_of_ours_that_does_not_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    of_verbs = {
        option
        for verb in VERBS
        for option in build_parser(verb)._option_string_actions  # argparse has no public way to ask
    }
    theirs = {f"--{name.replace('_', '-')}" for name in FOREIGN} | {"--router-"}
    assert set(FLAG.findall(text)) <= OURS | of_verbs | theirs | OF_ENGINES
    # What is told to be given here is ours, and no name of somebody else's.
    here = [line for line in text.splitlines() if line.startswith("trunkline ")]
    here += [
        line.rpartition("|")[0].rpartition("|")[2] for line in text.splitlines() if "|" in line
    ]
    for line in here:
        assert set(FLAG.findall(line)) <= OURS | of_verbs, line


def test_the_commands_on_the_page_are_taken() -> None:
    """Each line that begins with a verb of ours, up to its end of flags."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("trunkline serve ")]
    assert len(lines) >= 3
    for line in lines:
        words = line.partition("#")[0].rstrip(" &").split()[2:]
        build_parser("serve").read(words)


def test_the_page_has_the_tables_of_the_code_and_of_nobody_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert reference.with_tables(text) == text
    with pytest.raises(ConfigError, match="nobody knows"):
        reference.with_tables(text.replace("<!-- Dynamo -->", "<!-- Dinamo -->"))
    with pytest.raises(ConfigError, match="missing"):
        reference.with_tables(text.replace("<!-- Dynamo -->", ""))


def test_the_page_has_a_section_for_each_peer_and_tells_verbs_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for peer in (*BY_PEER, "AIBrix"):
        assert re.search(rf"^## {re.escape(peer)}", text, re.MULTILINE), peer
    for verb in re.findall(r"`trunkline ([a-z]+(?: [a-z]+)?)", text):
        assert verb in VERBS or verb.partition(" ")[0] in VERBS, verb
    assert "tenants policy" in tenant_commands.COMMANDS


FAMILY = [
    "--host",
    "--port",
    "--worker-urls",
    "--prefill",
    "--decode",
    "--prefill-policy",
    "--decode-policy",
    "--policy",
    "--cache-threshold",
    "--balance-abs-threshold",
    "--balance-rel-threshold",
    "--eviction-interval-secs",
    "--max-tree-size",
    "--max-payload-size",
    "--request-timeout-secs",
    "--max-concurrent-requests",
    "--queue-size",
    "--queue-timeout-secs",
    "--rate-limit-tokens-per-second",
    "--retry-max-retries",
    "--retry-initial-backoff-ms",
    "--retry-max-backoff-ms",
    "--retry-backoff-multiplier",
    "--retry-jitter-factor",
    "--disable-retries",
    "--cb-failure-threshold",
    "--cb-success-threshold",
    "--cb-timeout-duration-secs",
    "--disable-circuit-breaker",
    "--health-check-interval-secs",
    "--health-check-timeout-secs",
    "--health-failure-threshold",
    "--health-success-threshold",
    "--health-check-endpoint",
    "--service-discovery",
    "--selector",
    "--service-discovery-port",
    "--service-discovery-namespace",
    "--prometheus-host",
    "--prometheus-port",
    "--request-id-headers",
    "--cors-allowed-origins",
    "--api-key",
    "--log-level",
    "--log-dir",
    "--tokenizer-path",
    "--model-path",
    "--chat-template",
]
"""The flags of the SGLang and vLLM Router family, which users have in their scripts."""


@pytest.mark.parametrize("flag", FAMILY)
def test_every_flag_of_the_family_is_taken_or_told_what_takes_its_place(flag: str) -> None:
    name = flag.strip("-").replace("-", "_")
    assert (flag in OURS) is not (name in FOREIGN)


@pytest.mark.parametrize(
    ("policy", "meant"),
    [(theirs, ours) for theirs, ours in VALUES["policy"].items()]
    + [("round-robin", "round_robin"), ("cache-aware", "cache_aware"), ("powr_of_two", "power")],
)
def test_a_policy_of_another_router_is_refused_with_what_comes_nearest(
    policy: str, meant: str
) -> None:
    assert f"routing.policy = '{policy}'" in refusal("--policy", policy)
    assert f"did you mean {meant}" in refusal("--policy", policy)
    assert "did you mean" not in refusal("--policy", "xyz")


def test_what_a_value_of_another_router_is_taken_for_is_a_value_of_ours() -> None:
    for name, values in VALUES.items():
        leaf = leaves_by_name()[name]
        assert set(values.values()) <= set(leaf.setting.choices)
        assert not set(values) & {*leaf.setting.choices, *leaf.value_aliases}
