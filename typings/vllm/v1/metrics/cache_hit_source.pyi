from enum import Enum

class CacheHitSource(str, Enum):
    HOST = "host"
