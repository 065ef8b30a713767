"""Settings: every name works everywhere, every mistake is refused with a remedy."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trunkline import reference, settings
from trunkline.cli import build_parser
from trunkline.config import Config, ListenConfig
from trunkline.errors import ConfigError
from trunkline.leaf import Leaf, leaves, read_root_key, toml_value
from trunkline.written import is_loopback, nearest

REPOSITORY = Path(__file__).parents[2]


def resolve(
    *words: str, environ: dict[str, str] | None = None, file: Path | None = None
) -> settings.Resolved:
    given = [*words, "--config", str(file)] if file else list(words)
    return settings.resolve(vars(build_parser("serve").read(given)), environ or {})


def refusal(*words: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*words, environ=environ, file=file)
    return str(caught.value)


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "trunkline.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


_SHAPED = {
    "health_check_endpoint": "/ready",
    "request_id_headers": ("x-request-id", "x-trace-id"),
    "cors_allowed_origins": ("https://app.example", "http://localhost:3000"),
    "worker_dns": ("engines.ml.svc:8000", "localhost:8001"),
    "worker_networks": ("10.0.0.0/8", "fd00::/8"),
    "selector": ("app=engine", "kubernetes.io/service-name=engines"),
    "service_discovery_namespace": "ml",
    "otlp_endpoint": "http://collector:4318",
}
"""Values of settings that not every text is one of."""


def another_value(leaf: Leaf) -> Any:
    """A valid value that is not the default."""
    if leaf.name in _SHAPED:
        return _SHAPED[leaf.name]
    if leaf.kind is bool:
        return not leaf.default
    if leaf.kind is tuple:
        return ("http://127.0.0.1:8001", "https://worker.example:8002#events=tcp://10.0.0.1:5557")
    if leaf.setting.choices:
        return next(choice for choice in leaf.setting.choices if choice != leaf.default)
    if leaf.kind is str:
        return f"{leaf.name}-ü"
    low, high = leaf.setting.low, leaf.setting.high
    assert low is not None
    assert high is not None
    middle = leaf.kind((leaf.default + low) / 2) if leaf.default != low else leaf.kind(high)
    return middle if middle != leaf.default else leaf.kind(high)


def file_line(leaf: Leaf, value: Any) -> str:
    return (f"[{leaf.section}]\n" if leaf.section else "") + f"{leaf.name} = {toml_value(value)}\n"


def flag_words(leaf: Leaf, value: Any) -> list[str]:
    if leaf.kind is bool:
        return [leaf.flag if value else leaf.flag.replace("--", "--no-", 1)]
    return [leaf.flag, *value] if leaf.kind is tuple else [leaf.flag, str(value)]


def companions(leaf: Leaf) -> list[str]:
    """What has to be said beside an unusual value for the whole to make sense."""
    beside = {
        "admin_host": ["--admin-api-key", "operator"],
        "selector": ["--service-discovery"],
        "service_discovery": ["--selector", "app=engine"],
    }
    return beside.get(leaf.name, [])


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.key)
def test_every_setting_is_accepted_by_flag_environment_and_file_with_equal_result(
    leaf: Leaf, tmp_path: Path
) -> None:
    value = another_value(leaf)
    text = " ".join(value) if leaf.kind is tuple else str(value)
    words = companions(leaf)

    by_flag = resolve(*flag_words(leaf, value), *words)
    by_environment = resolve(*words, environ={leaf.variable: text})
    by_file = resolve(*words, file=written(tmp_path, file_line(leaf, value)))

    assert leaf.value_in(by_flag.config) == value != leaf.default
    assert by_flag.config == by_environment.config == by_file.config
    assert by_flag.origins[leaf.name] == f"flag {leaf.flag}"
    assert by_environment.origins[leaf.name] == f"environment {leaf.variable}"
    assert by_file.origins[leaf.name].startswith("file ")


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.key)
def test_every_setting_has_a_sentence_and_every_number_a_unit_and_two_bounds(leaf: Leaf) -> None:
    assert leaf.setting.sentence.endswith(".")
    if leaf.kind in (int, float):
        assert leaf.setting.low is not None
        assert leaf.setting.high is not None
        assert leaf.setting.low <= leaf.default <= leaf.setting.high
        ports = ("port", "admin_port", "service_discovery_port", "ext_proc_port")
        assert leaf.unit or leaf.name in (*ports, "seed")


def test_names_are_unique_over_the_tree_and_no_alias_hides_one() -> None:
    flags = [flag for leaf in leaves() for flag in (leaf.flag, *leaf.flag_aliases)]
    assert len(set(flags)) == len(flags)
    for leaf in leaves():
        assert set(leaf.value_aliases.values()) <= set(leaf.setting.choices)


def test_nothing_given_gives_the_defaults() -> None:
    resolved = resolve()
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "[listen]\nport = 1\nadmin_port = 2\n[routing]\nseed = 3\n")
    environ = {"TRUNKLINE_PORT": "11", "TRUNKLINE_ADMIN_PORT": "12"}
    resolved = resolve("--port", "21", environ=environ, file=file)
    listen = resolved.config.listen
    assert (listen.port, listen.admin_port, resolved.config.routing.seed) == (21, 12, 3)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, "[listen]\nport = 4\n")
    resolved = resolve(environ={"TRUNKLINE_CONFIG": str(file)})
    assert resolved.config.listen.port == 4


def test_lists_in_the_environment_are_split_at_spaces_and_commas() -> None:
    environ = {"TRUNKLINE_WORKER_URLS": "http://a:1, http://b:2 http://c:3"}
    urls = resolve(environ=environ).config.worker_urls
    assert urls == ("http://a:1", "http://b:2", "http://c:3")


@pytest.mark.parametrize("alias", ["roundrobin", "round_robin"])
def test_another_spelling_of_a_value_means_the_same(alias: str, tmp_path: Path) -> None:
    file = written(tmp_path, f'[routing]\npolicy = "{alias}"\n')
    for resolved in (
        resolve("--policy", alias),
        resolve(environ={"TRUNKLINE_POLICY": alias}),
        resolve(file=file),
    ):
        assert resolved.config.routing.policy == "round_robin"


def test_another_name_of_a_flag_means_the_same() -> None:
    assert resolve("--prometheus-port", "9100").config.listen.admin_port == 9100


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--max-payload-size", "12"], ["limits.max_payload_size", "12", "1024", "bytes", "flag"]),
        (["--port", "65536"], ["listen.port", "65536", "above 65535"]),
        (["--port", "-1"], ["listen.port", "below 0"]),
        (["--port", "80.5"], ["is not a whole number"]),
        (["--port", "٣"], ["is not a whole number"]),
        (["--port", "9" * 5_000], ["is not a whole number", "..."]),
        (["--churn-weight", "nan"], ["routing.churn_weight", "not finite"]),
        (["--churn-weight", "inf"], ["not finite"]),
        (["--churn-weight", "heavy"], ["is not a number"]),
        (["--policy", "fastest"], ["routing.policy", "fastest", "one of", "cache_aware"]),
        (["--profile", "a\nb"], ["control characters"]),
        (["--host", ""], ["listen.host", "no address"]),
        (["--worker-urls", "10.0.0.1:8000"], ["worker_urls", "does not begin with http"]),
        (["--worker-urls", "http://a:1", "http://a:1"], ["worker_urls", "a:1 twice"]),
        (["--health-check-endpoint", "/é"], ["health_check_endpoint", "beyond ASCII"]),
        (["--health-check-endpoint", "x"], ["health_check_endpoint", "does not begin with /"]),
        (["--worker-urls", "http://A", "http://a:80/"], ["worker_urls", "a:80 twice"]),
        (["--worker-urls", "http://a/w", "http://a/w#events=tcp://*:1"], ["a:80/w twice"]),
        (["--admin-host", "0.0.0.0"], ["listen.admin_host", "--admin-api-key"]),
        (["--api-key", "x1", "--admin-api-key", "x1"], ["listen.admin_api_key", "operator"]),
        (["--request-id-headers", "X-Trace-Id"], ["request_id_headers", "in small letters"]),
        (["--request-id-headers", "authorization"], ["holds no id of a request"]),
        (["--cors-allowed-origins", "app.example"], ["cors_allowed_origins", "is no origin"]),
        (["--cors-allowed-origins", "https://app.example/"], ["is no origin"]),
        (["--port", "5", "--admin-port", "5"], ["listen.admin_port", "give another"]),
        (["--max-head-bytes", "1024"], ["limits.max_header_bytes", "max_head_bytes = 1024"]),
        (["--retry-initial-backoff-ms", "251"], ["retry_max_backoff_ms = 250"]),
        (["--health-check-endpoint", "health"], ["does not begin with /"]),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_bound_and_source(
    words: list[str], parts: list[str]
) -> None:
    message = refusal(*words)
    assert len(message) < 300
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", ["perhaps", "2", ""])
def test_a_boolean_in_the_environment_is_true_or_false_and_nothing_else(text: str) -> None:
    message = refusal(environ={"TRUNKLINE_DISABLE_RETRIES": text})
    assert "retry.disable_retries" in message
    assert "true or false" in message


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("[listen]\nport = '80'", "is not a whole number"),
        ("[listen]\nport = true", "is not a whole number"),
        ("[listen]\nport = 80.0", "is not a whole number"),
        ("[retry]\ndisable_retries = 1", "is not true or false"),
        ("[listen]\nhost = 5", "is not a string"),
        ("worker_urls = 'http://a:1'", "is not an array of strings"),
        ("worker_urls = [1]", "is not an array of strings"),
        ("[routing]\nchurn_weight = nan", "not finite"),
        ("[listen]\nports = 80", "did you mean port?"),
        ("port = 80", "belongs under [listen]"),
        ("[limits]\nport = 80", "belongs under [listen]"),
        ("[listen]\nworker_urls = []", "belongs at the top"),
        ("[listenn]\nport = 80", "did you mean [listen]?"),
        ("[listen]\nprometheus_port = 80", "is called admin_port here"),
        ("[routing]\ncache_threshold = 0.5", "has no thresholds"),
        ("[listen\nport = 80", "is not TOML"),
        ("[routing]\npolicy = cache_aware", "texts stand in quotes"),
        ("[listen]\nport = 80\nport = 81", "is not TOML"),
        ("port = " + "[" * 20_000, "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_a_remedy(
    line: str, part: str, tmp_path: Path
) -> None:
    message = refusal(file=written(tmp_path, line))
    assert part in message
    assert str(tmp_path) in message


def test_a_file_that_is_missing_too_large_or_no_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(file=tmp_path / "absent.toml")
    assert "cannot be read" in refusal(file=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(file=tmp_path / "pipe")
    assert "larger than" in refusal(file=written(tmp_path, "#" * ((1 << 20) + 1)))


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    message = refusal(environ={"TRUNKLINE_MAX_PAYLOAD": "1"})
    assert "did you mean TRUNKLINE_MAX_PAYLOAD_SIZE?" in message


def test_an_unknown_flag_is_refused_with_the_nearest_name() -> None:
    assert "did you mean --max-payload-size?" in refusal("--max-payload-sise=1")


def test_a_flag_is_not_accepted_cut_short() -> None:
    assert "did you mean --max-payload-size?" in refusal("--max-payload", "1024")


def test_what_kubernetes_says_of_a_service_with_our_name_is_no_setting() -> None:
    environ = {
        "TRUNKLINE_PORT": "tcp://10.0.0.1:80",
        "TRUNKLINE_SERVICE_HOST": "10.0.0.1",
        "TRUNKLINE_SERVICE_PORT_HTTP": "80",
        "TRUNKLINE_PORT_80_TCP_ADDR": "10.0.0.1",
        "TRUNKLINE_PURE": "1",
        "UNRELATED": "1",
    }
    assert resolve(environ=environ).config == Config()


def test_a_secret_is_read_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("operator-key\n")
    path.chmod(0o640)
    assert resolve("--admin-api-key", f"@{path}").config.listen.admin_api_key == "operator-key"
    path.chmod(0o644)
    assert "chmod 600" in refusal("--admin-api-key", f"@{path}")
    assert "chmod 600" in refusal(environ={"TRUNKLINE_API_KEY": f"@{path}"})


def test_a_secret_file_that_is_empty_large_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    assert "is empty" in refusal("--api-key", f"@{path}")
    path.write_text("k" * 5_000)
    assert "larger than" in refusal("--api-key", f"@{path}")
    assert "cannot be read" in refusal("--api-key", f"@{tmp_path / 'absent'}")


def test_a_settings_file_that_everyone_may_read_holds_no_secret(tmp_path: Path) -> None:
    text = '[listen]\napi_key = "client-key"\n'
    assert "chmod 600" in refusal(file=written(tmp_path, text, mode=0o644))
    assert resolve(file=written(tmp_path, text)).config.listen.api_key == "client-key"
    harmless = '[listen]\napi_key = ""\n'
    assert resolve(file=written(tmp_path, harmless, mode=0o644)).config == Config()


def test_no_refusal_shows_a_secret() -> None:
    assert "marked" not in refusal("--api-key", "marked\x01secret")


def test_what_is_printed_can_be_read_back_and_gives_the_same(tmp_path: Path) -> None:
    words = ["--port", "8080", "--profile", 'quote " back \\ ü', "--worker-urls", "http://a:1"]
    resolved = resolve(*words, "--disable-retries", environ={"TRUNKLINE_SEED": "7"})
    text = settings.to_toml(resolved)
    assert "port = 8080  # flag --port\n" in text
    assert "seed = 7  # environment TRUNKLINE_SEED\n" in text
    assert "admin_port = 29000  # default\n" in text
    assert resolve(file=written(tmp_path, text)).config == resolved.config


def test_what_is_printed_hides_secrets_and_cannot_set_them(tmp_path: Path) -> None:
    resolved = resolve("--api-key", "marked-secret")
    text = settings.to_toml(resolved)
    assert "marked-secret" not in text
    assert tomllib.loads(text)["listen"]["api_key"] == "***"
    assert "in place of a secret" in refusal(file=written(tmp_path, text))


def test_the_redacted_tree_has_every_setting_and_no_secret() -> None:
    config = Config(listen=ListenConfig(api_key="marked-secret", admin_api_key="marked-too"))
    tree = settings.redacted(config)
    assert "marked" not in repr(tree)
    assert sum(len(b) if isinstance(b, dict) else 1 for b in tree.values()) == len(leaves())
    assert settings.secret_values(config) == ("marked-secret", "marked-too")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"]
)
def test_an_address_of_this_machine_alone_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io"]
)
def test_any_other_address_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_a_root_key_is_64_hex_digits_that_nobody_else_may_read(tmp_path: Path) -> None:
    file = tmp_path / "root"
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o604)
    with pytest.raises(ConfigError, match="everyone may read"):
        read_root_key(str(file))
    file.chmod(0o600)
    assert read_root_key(str(file)) == b"\xab" * 32
    assert read_root_key("") == b""
    for text in ("ab" * 31, "zz" * 32, ""):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_root_key(str(file))
        assert "zz" not in str(caught.value)


def test_the_reference_page_is_current() -> None:
    page = REPOSITORY / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference.page(), "run `trunkline docs`"


def test_the_example_on_the_reference_page_is_accepted(tmp_path: Path) -> None:
    example = reference.page().partition("```toml\n")[2].partition("```")[0]
    key = tmp_path / "client-key"
    key.write_text("k")
    key.chmod(0o600)
    file = written(tmp_path, example.replace("/run/secrets/client-key", str(key)))
    assert resolve(file=file).config.listen.port == 8080


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("--max-payload", "--max-payload-size"),
        ("--porst", "--port"),
        ("--loud", None),
        ("--colour", None),
        ("--quiet", None),
    ],
)
def test_a_name_is_suggested_only_when_it_is_close(written: str, near: str | None) -> None:
    assert nearest(written, [leaf.flag for leaf in leaves()]) == near


def test_what_all_names_share_is_no_likeness() -> None:
    assert nearest("TRUNKLINE_COLOUR", [leaf.variable for leaf in leaves()]) is None


def test_the_collector_that_opentelemetry_names_counts_where_nothing_else_does(
    tmp_path: Path,
) -> None:
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://of-all:4318"}
    found = resolve(environ=otel)
    assert found.config.observe.otlp_endpoint == "http://of-all:4318"
    assert found.origins["otlp_endpoint"] == "environment OTEL_EXPORTER_OTLP_ENDPOINT"
    file = tmp_path / "trunkline.toml"
    file.write_text('[observe]\notlp_endpoint = "http://of-the-file:4318"\n')
    named = resolve(environ=otel, file=file).config.observe
    assert named.otlp_endpoint == "http://of-the-file:4318"
    ours = otel | {"TRUNKLINE_OTLP_ENDPOINT": "http://ours:4318"}
    assert resolve(environ=ours, file=file).config.observe.otlp_endpoint == "http://ours:4318"


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://user:secret@x:4318"])
def test_a_collector_that_is_no_plain_url_is_refused(endpoint: str) -> None:
    said = refusal("--otlp-endpoint", endpoint)
    assert "otlp_endpoint" in said
    assert ("OTEL_EXPORTER_OTLP_HEADERS" in said) == ("@" in endpoint)


def test_envoy_is_answered_by_one_process_alone() -> None:
    flags = {"ext_proc_port": "50051", "processes": "2"}
    with pytest.raises(ConfigError, match=r"ext_proc_port .* is one process's"):
        settings.resolve(flags, {})
