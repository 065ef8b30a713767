"""KV blocks between engines: a store with tiers, staging and pins. For use inside an engine's own
process: importing it takes msgspec and xxhash only.
"""

from trunkline.kv.records import (
    Block,
    Component,
    Judge,
    Kept,
    Layout,
    Manifest,
    Owner,
    Pins,
    Place,
    Published,
)
from trunkline.kv.staging import Staging
from trunkline.kv.store import BlockStore, StoreOptions

__all__ = [
    "Block",
    "BlockStore",
    "Component",
    "Judge",
    "Kept",
    "Layout",
    "Manifest",
    "Owner",
    "Pins",
    "Place",
    "Published",
    "Staging",
    "StoreOptions",
]
