"""Every path of vLLM 0.32, and which of them clients reach.

Nothing is computed without our salt by a way that we know.
"""

from __future__ import annotations

import pytest

from trunkline.gateway.contracts import Route
from trunkline.gateway.routes import Local, route_of

READ = {
    "/v1/chat/completions": Route.CHAT,
    "/v1/completions": Route.COMPLETION,
    "/v1/messages": Route.MESSAGES,
    "/v1/responses": Route.RESPONSES,
    "/v1/messages/count_tokens": Route.COUNT_TOKENS,
    "/v1/embeddings": Route.EMBEDDINGS,
    "/v1/rerank": Route.SCORES,
    "/rerank": Route.SCORES,
    "/v1/score": Route.SCORES,
    "/score": Route.SCORES,
    "/tokenize": Route.TOKENIZE,
    "/detokenize": Route.TOKENIZE,
    "/v1/audio/transcriptions": Route.AUDIO,
    "/v1/audio/translations": Route.AUDIO,
}
SALTED = (
    *("/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render"),
    *("/v1/chat/completions/derender", "/v1/completions/derender", "/v1/responses/render"),
    *("/v1/messages/render", "/v1/responses/r1", "/v1/responses/r1/cancel", "/v1/systemone"),
    "/v1/realtime",
)
"""Proxied unread: a JSON object bears our salt, and tenants reach them only where the operator says
that the engines keep it there (`--tenant-paths`)."""
ENGINE_ALONE = (
    *("/tokenizer_info", "/inference/v1/generate", "/invocations"),
    *("/pooling", "/classify", "/v2/rerank", "/v2/embed", "/cohere/v2/chat"),
    *("/cohere/v2/chat/render", "/generative_scoring", "/server_info", "/load", "/ping"),
    *("/metrics", "/kv_event_sources", "/collective_rpc", "/weight_info", "/update_weights"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory"),
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/abort_requests"),
    *("/start_profile", "/stop_profile", "/scale_elastic_ep", "/fault_tolerance/apply"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


@pytest.mark.parametrize("path", READ)
def test_prompts_are_read_where_we_know_how(path: str) -> None:
    assert route_of(path.encode()) is READ[path]


@pytest.mark.parametrize("path", SALTED)
def test_what_is_proxied_unread_is_known_as_such(path: str) -> None:
    """`test_gateway_salt.py` says what that means for a body."""
    assert route_of(path.encode()) is Route.OTHER


@pytest.mark.parametrize("path", [*ENGINE_ALONE, *(f"{path}/" for path in ENGINE_ALONE)])
def test_what_would_pass_by_the_salt_or_steers_the_engine_is_not_there(path: str) -> None:
    assert route_of(path.encode()) is None


def test_what_the_gateway_answers_itself_reaches_no_engine() -> None:
    assert {route_of(path) for path in (b"/health", b"/version", b"/v1/models")} == {
        Local.HEALTH,
        Local.VERSION,
        Local.MODELS,
    }
