"""Registered public prefixes: which blocks of a prompt are of one, and keys in two zones.

Only registration makes a prefix public, never popularity: a popularity detector would itself sense
what other tenants ask. Only blocks wholly inside a registered prefix are public; where a prompt
leaves it, the caller's own chain goes on from the last public key:
`h = BLAKE2b-256(key=private ns_key, person="blk", h_public_last || ...)`. Public blocks are written
by the designated filler alone, so a tenant can poison none and being the first shows nowhere.

A book is immutable: whoever changes the registry makes a new one and swaps the reference. Cost of
`match`: linear in the prompt by comparing memory, 4 us at 8k tokens, and a quarter of a microsecond
for each prefix that is nested in another (`benchmarks/publics.py`). Must never: match for an
organisation outside the audience, or after the term. Read `keys.py` for the chain.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trunkline.core.identity import DIGEST_BYTES, ModelIdentity, Namespace, Scope, ScopeKind
from trunkline.core.keys import KeyChain, chain
from trunkline.native import chain_keys

MAX_PREFIXES = 256
MAX_PREFIX_TOKENS = 131_072
MAX_BOOK_TOKENS = 4_194_304
"""16 MiB of token ids, for each block size that is asked for."""
MAX_AUDIENCE = 4_096
MAX_TERM_MS = 90 * 86_400_000
"""Ninety days; a registration may be renewed."""

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefix:
    """One registration. Raises ValueError for what no registration may be."""

    public_id: str
    owner: str
    approvers: tuple[str, str]
    """Two different people."""
    tokens: bytes = field(repr=False)
    """The exact token ids, u32 in the machine's order: see `packed`."""
    audience: frozenset[str] | None
    """Ids of the organisations that may hit it; None for all."""
    model_id: str
    weights_digest: str = ""
    adapter_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    not_after_ms: int
    """Wall clock, since 1970: the first moment in which it is none any more."""
    epoch: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("public_id", "owner", "model_id", "reason"):
            if not getattr(self, name):
                raise ValueError(f"a public prefix needs {name}")
        if len(set(self.approvers)) != 2 or not all(self.approvers):
            raise ValueError(f"public prefix {self.public_id} needs two different approvers")
        if self.audience is not None and not 1 <= len(self.audience) <= MAX_AUDIENCE:
            raise ValueError(
                f"public prefix {self.public_id} is for {len(self.audience)} organisations, "
                f"allowed are 1 to {MAX_AUDIENCE}"
            )
        if len(self.tokens) % _TOKEN_BYTES or not 1 <= self.token_count <= MAX_PREFIX_TOKENS:
            raise ValueError(
                f"public prefix {self.public_id} has {self.token_count} tokens, "
                f"allowed are 1 to {MAX_PREFIX_TOKENS}"
            )

    @property
    def token_count(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def digest(self) -> bytes:
        """32 bytes that name the exact token ids, for records and receipts."""
        return hashlib.blake2b(self.tokens, digest_size=DIGEST_BYTES, person=b"public").digest()

    @property
    def scope(self) -> Scope:
        """What the namespace of its blocks is derived for, with `epoch` as its public epoch."""
        return Scope(kind=ScopeKind.PUBLIC, public_id=self.public_id)

    def has_ended(self, now_ms: float) -> bool:
        return has_ended(self.not_after_ms, now_ms)

    def is_for(self, org: str, now_ms: float) -> bool:
        """Whether a principal of an organisation may hit it now."""
        return not self.has_ended(now_ms) and (self.audience is None or org in self.audience)

    def is_of(self, model: ModelIdentity) -> bool:
        """Whether its tokens mean the same to a model, adapter, tokenizer and template included."""
        return _model_key(self) == _model_key(model)


def has_ended(not_after_ms: int, now_ms: float) -> bool:
    """Whether the term of a registration is over, for registry and data plane alike."""
    return now_ms >= not_after_ms


def packed(tokens: array[int]) -> bytes:
    """Token ids as a prefix keeps them."""
    assert tokens.itemsize == _TOKEN_BYTES
    return tokens.tobytes()


def require_room(prefix_count: int, token_count: int) -> None:
    """Raises ValueError where that is more than one book takes."""
    if prefix_count > MAX_PREFIXES:
        raise ValueError(f"{prefix_count} public prefixes, at most {MAX_PREFIXES} are allowed")
    if token_count > MAX_BOOK_TOKENS:
        raise ValueError(
            f"public prefixes of {token_count} tokens, at most {MAX_BOOK_TOKENS} are allowed"
        )


def check_term(prefix: PublicPrefix, now_ms: float) -> None:
    """Raises ValueError where a registration made now has ended already, or lasts too long."""
    if not now_ms < prefix.not_after_ms <= now_ms + MAX_TERM_MS:
        raise ValueError(
            f"public prefix {prefix.public_id} must end within 90 days from now, and not before"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicMatch:
    """The prefix that the leading `blocks` whole blocks of a prompt are of."""

    prefix: PublicPrefix
    blocks: int


class PublicBook:
    """All registered prefixes of a fleet, by model; a tree of runs of blocks for each."""

    def __init__(self, prefixes: Iterable[PublicPrefix] = ()) -> None:
        """Raises ValueError beyond 256 prefixes or 4 Mi tokens, or for an id that comes twice."""
        listed = tuple(prefixes)
        self._prefixes = {prefix.public_id: prefix for prefix in listed}
        if len(self._prefixes) < len(listed):
            raise ValueError("two public prefixes have one id")
        require_room(len(listed), sum(prefix.token_count for prefix in listed))
        self._by_model: dict[tuple[str, ...], list[PublicPrefix]] = {}
        for prefix in sorted(listed, key=lambda one: one.public_id):
            self._by_model.setdefault(_model_key(prefix), []).append(prefix)
        self._trees: dict[tuple[tuple[str, ...], int], _Tree] = {}
        """By model and block size, made when first asked for: no state but a memory of work."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[PublicPrefix]:
        return iter(self._prefixes.values())

    def get(self, public_id: str) -> PublicPrefix | None:
        return self._prefixes.get(public_id)

    def match(
        self, tokens: array[int], *, org: str, model: ModelIdentity, now_ms: float
    ) -> PublicMatch | None:
        """The allowed prefix that covers most whole leading blocks of a prompt; None for none.

        A prompt that leaves a prefix half way still has the blocks before that in common with it.
        Of several that cover as many, the shortest counts, then the smallest id.
        """
        if not self._by_model:
            return None
        tree = self._tree(_model_key(model), model.block_tokens)
        return None if tree is None else tree.match(tokens, org, now_ms)

    def _tree(self, model_key: tuple[str, ...], block_tokens: int) -> _Tree | None:
        prefixes = self._by_model.get(model_key)
        if prefixes is None:
            return None
        known = self._trees.get((model_key, block_tokens))
        if known is None:
            if len(self._trees) >= MAX_PREFIXES:
                self._trees.clear()  # more block sizes than any fleet has
            known = self._trees[model_key, block_tokens] = _Tree(prefixes, block_tokens)
        return known


def two_zone_chain(
    public: Namespace, private: Namespace, tokens: array[int], public_blocks: int
) -> KeyChain:
    """Key the first `public_blocks` blocks under `public`, and the rest under `private` on top.

    Raises ValueError where there are not so many full blocks, or the two are of different models.
    """
    if public_blocks == 0:
        return chain(private, tokens)
    size = private.model.block_tokens
    if not 0 < public_blocks <= len(tokens) // size:
        raise ValueError(f"{public_blocks} public blocks in a prompt of {len(tokens)} tokens")
    view, cut = memoryview(tokens), public_blocks * size
    head = chain_keys(public.key, public.root, view[:cut], size)
    tail = chain_keys(private.key, head[-DIGEST_BYTES:], view[cut:], size)
    return KeyChain(
        namespace=private, packed=head + tail, public=public, public_blocks=public_blocks
    )


# -- the tree -----------------------------------------------------------------------------------


class _Node:
    """A run of blocks that all prefixes below it share; a prefix ends where its run ends."""

    __slots__ = ("by_first_block", "prefixes", "run")

    def __init__(self, run: bytes, prefixes: list[PublicPrefix]) -> None:
        self.run = run
        self.prefixes = prefixes  # all that pass, the shortest first
        self.by_first_block: dict[bytes, _Node] = {}


class _Tree:
    """The prefixes of one model in blocks of one size. At most two nodes a prefix."""

    def __init__(self, prefixes: list[PublicPrefix], block_tokens: int) -> None:
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._longest_tokens = 0
        self._root = _Node(b"", [])
        for prefix in sorted(prefixes, key=lambda one: (one.token_count, one.public_id)):
            whole = len(prefix.tokens) // self._block_bytes * self._block_bytes
            if whole:
                self._longest_tokens = max(self._longest_tokens, whole // _TOKEN_BYTES)
                self._add(prefix, prefix.tokens[:whole])

    def match(self, tokens: array[int], org: str, now_ms: float) -> PublicMatch | None:
        raw = tokens[: self._longest_tokens].tobytes()
        for node, depth in reversed(self._way(raw)):
            allowed = next((one for one in node.prefixes if one.is_for(org, now_ms)), None)
            if allowed is not None:
                return PublicMatch(prefix=allowed, blocks=depth // self._block_bytes)
        return None

    def _way(self, raw: bytes) -> list[tuple[_Node, int]]:
        """The nodes that a prompt passes, and how many of its bytes it has in common down to each;
        the last it may leave half way.
        """
        way: list[tuple[_Node, int]] = []
        node, depth = self._root, 0
        while True:
            child = node.by_first_block.get(raw[depth : depth + self._block_bytes])
            if child is None:
                return way
            common = _common_bytes(child.run, raw, depth, self._block_bytes)
            depth += common
            way.append((child, depth))
            if common < len(child.run):
                return way
            node = child

    def _add(self, prefix: PublicPrefix, run: bytes) -> None:
        node = self._root
        while run:
            first = run[: self._block_bytes]
            child = node.by_first_block.get(first)
            if child is None:
                node.by_first_block[first] = _Node(run, [prefix])
                return
            common = _common_bytes(child.run, run, 0, self._block_bytes)
            if common < len(child.run):
                child = node.by_first_block[first] = self._split(child, common)
            child.prefixes.append(prefix)
            node, run = child, run[common:]

    def _split(self, node: _Node, at: int) -> _Node:
        """The upper part of a node, which others will share, with the rest below it."""
        upper = _Node(node.run[:at], list(node.prefixes))
        node.run = node.run[at:]
        upper.by_first_block[node.run[: self._block_bytes]] = node
        return upper


def _common_bytes(run: bytes, raw: bytes, start: int, block_bytes: int) -> int:
    """How many leading bytes, whole blocks, of `run` stand in `raw` at `start`; halving, so that
    memory is compared and not a loop over blocks.
    """
    if raw.startswith(run, start):
        return len(run)
    low, high = 0, len(run) // block_bytes  # `low` blocks are equal, `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if raw.startswith(run[low * block_bytes : middle * block_bytes], start + low * block_bytes):
            low = middle
        else:
            high = middle
    return low * block_bytes


def _model_key(of: PublicPrefix | ModelIdentity) -> tuple[str, ...]:
    return (
        of.model_id,
        of.weights_digest,
        of.adapter_digest,
        of.tokenizer_digest,
        of.template_digest,
    )
