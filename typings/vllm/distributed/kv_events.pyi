from typing import Any

class KVCacheEvent: ...

class BlockStored(KVCacheEvent):
    def __init__(
        self,
        *,
        block_hashes: list[bytes],
        parent_block_hash: bytes | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str | None,
        lora_name: str | None,
        extra_keys: list[tuple[Any, ...] | None] | None = None,
    ) -> None: ...

class BlockRemoved(KVCacheEvent):
    def __init__(self, *, block_hashes: list[bytes], medium: str | None) -> None: ...
