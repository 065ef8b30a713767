"""Public prefixes: who may hit which blocks, the bounds of a book, and keys in two zones."""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.directory import Directory, StoreOutcome
from trunkline.core.events import BlocksStored
from trunkline.core.identity import (
    Epochs,
    ModelIdentity,
    Namespace,
    Scope,
    ScopeKind,
    derive_namespace,
)
from trunkline.core.keys import KeyChain, as_tokens, chain
from trunkline.core.publics import (
    MAX_BOOK_TOKENS,
    MAX_PREFIX_TOKENS,
    MAX_PREFIXES,
    MAX_TERM_MS,
    PublicBook,
    PublicPrefix,
    check_term,
    packed,
    two_zone_chain,
)
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId

ROOT_KEY = bytes(range(32))
MODEL = ModelIdentity(model_id="llama", block_tokens=4, tokenizer_digest="t")
NOW_MS, LATER_MS = 1_000_000, 2_000_000
PROMPT = list(range(100, 140))

PINNED = [
    "81d74ca0d5595af0716004df72d083146a2c364cdb56aa5733b7598cbfd47c36",
    "9176f6902f9e27cf30e283b6fbca0861cc3ed7406d38ecf3ef8b818c311d313e",
    "615f9e89c242550a276c8285a10f3147e62bf8de91f03934fa3acdf80945fca5",
    "d5080eb94696487e5518153908d6f3b20b01378a285e0e524cd5160fbe3d6cb4",
]
PINNED_SALT = "cMKFwu0rR-V_JIKILb7xLXPaxw2jzWj4lUkSD-5br74"


def prefix(name: str = "handbook", tokens: list[int] = PROMPT, **other: Any) -> PublicPrefix:
    given_ = {
        "owner": "acme",
        "approvers": ("ann", "bob"),
        "audience": None,
        "model_id": "llama",
        "tokenizer_digest": "t",
        "not_after_ms": LATER_MS,
        "reason": "the staff handbook",
        **other,
    }
    return PublicPrefix(public_id=name, tokens=packed(as_tokens(tokens)), **given_)


def find(book: PublicBook, tokens: list[int], *, org: str = "acme", now_ms: float = NOW_MS,
         model: ModelIdentity = MODEL) -> tuple[str, int] | None:  # fmt: skip
    match = book.match(as_tokens(tokens), org=org, model=model, now_ms=now_ms)
    return None if match is None else (match.prefix.public_id, match.blocks)


# -- who matches what -------------------------------------------------------------------------


def test_only_blocks_wholly_inside_a_prefix_are_public() -> None:
    book = PublicBook([prefix(tokens=PROMPT[:10])])
    assert find(book, PROMPT) == ("handbook", 2), "ten tokens are two whole blocks of four"
    assert find(book, PROMPT[:11]) == ("handbook", 2)
    assert find(book, PROMPT[:7]) == ("handbook", 1)
    assert find(book, PROMPT[:3]) is None
    assert find(book, [1, *PROMPT]) is None


def test_a_prompt_that_leaves_a_prefix_half_way_keeps_what_it_has_in_common() -> None:
    book = PublicBook([prefix()])
    for at in range(len(PROMPT)):
        changed = [*PROMPT[:at], 7, *PROMPT[at + 1 :]]
        expected = ("handbook", at // 4) if at >= 4 else None
        assert find(book, changed) == expected


def test_the_longest_match_counts_then_the_shortest_prefix_then_the_smallest_id() -> None:
    book = PublicBook([prefix("c", PROMPT), prefix("b", PROMPT[:16]), prefix("a", PROMPT[:8])])
    assert find(book, PROMPT) == ("c", 10)
    assert find(book, PROMPT[:20]) == ("c", 5)
    assert find(book, PROMPT[:16]) == ("b", 4)
    assert find(book, PROMPT[:8]) == ("a", 2)
    twins = PublicBook([prefix("y"), prefix("x")])
    assert find(twins, PROMPT) == ("x", 10)


def test_an_organisation_outside_the_audience_matches_nothing_of_it() -> None:
    book = PublicBook([prefix("inner", audience=frozenset({"acme"})), prefix("outer", PROMPT[:8])])
    assert find(book, PROMPT, org="acme") == ("inner", 10)
    assert find(book, PROMPT, org="rival") == ("outer", 2), "the part that is for everyone"
    alone = PublicBook([prefix(audience=frozenset({"acme"}))])
    assert find(alone, PROMPT, org="rival") is None


def test_a_prefix_ends_with_its_term() -> None:
    book = PublicBook([prefix()])
    assert find(book, PROMPT, now_ms=LATER_MS - 0.5) == ("handbook", 10)
    assert find(book, PROMPT, now_ms=LATER_MS) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "other"},
        {"weights_digest": "w"},
        {"adapter_digest": "a"},
        {"tokenizer_digest": "u"},
        {"template_digest": "c"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_prefix_of_another_model_matches_nothing(other: dict[str, str]) -> None:
    book = PublicBook([prefix()])
    assert find(book, PROMPT, model=replace(MODEL, **other)) is None
    assert not prefix().is_of(replace(MODEL, **other))
    assert prefix().is_of(MODEL)


def test_each_block_size_has_whole_blocks_of_its_own() -> None:
    book = PublicBook([prefix(tokens=PROMPT[:10])])
    sizes = {1: 10, 2: 5, 5: 2, 10: 1}
    for size, blocks in sizes.items():
        assert find(book, PROMPT, model=replace(MODEL, block_tokens=size)) == ("handbook", blocks)
    assert find(book, PROMPT, model=replace(MODEL, block_tokens=11)) is None


def match_by_definition(
    prefixes: list[PublicPrefix], tokens: list[int], org: str, now_ms: float
) -> tuple[str, int] | None:
    """Block by block, prefix by prefix."""
    best: tuple[int, int, str] | None = None
    for one in prefixes:
        known = array("I", one.tokens).tolist()
        blocks = 0
        while True:
            end = 4 * (blocks + 1)
            if end > min(len(known), len(tokens)) or known[:end] != tokens[:end]:
                break
            blocks += 1
        if blocks and one.is_for(org, now_ms):
            rank = (-blocks, one.token_count, one.public_id)
            best = rank if best is None else min(best, rank)
    return None if best is None else (best[2], -best[0])


few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(
    prefixes=st.lists(
        st.tuples(few_tokens, st.sampled_from([None, "acme", "rival"]), st.booleans()), max_size=12
    ),
    prompt=few_tokens,
    shares=st.integers(0, 11),
)
def test_the_tree_finds_what_a_search_through_all_prefixes_finds(
    prefixes: list[tuple[list[int], str | None, bool]], prompt: list[int], shares: int
) -> None:
    made = [
        prefix(
            f"p{number}",
            tokens,
            audience=None if org is None else frozenset({org}),
            not_after_ms=LATER_MS if lasts else NOW_MS,
        )
        for number, (tokens, org, lasts) in enumerate(prefixes)
    ]
    if shares < len(prefixes):
        prompt = prefixes[shares][0][:30] + prompt
    assert find(PublicBook(made), prompt) == match_by_definition(made, prompt, "acme", NOW_MS)


# -- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"name": ""}, "needs public_id"),
        ({"owner": ""}, "needs owner"),
        ({"reason": ""}, "needs reason"),
        ({"model_id": ""}, "needs model_id"),
        ({"approvers": ("ann", "ann")}, "two different approvers"),
        ({"approvers": ("ann", "")}, "two different approvers"),
        ({"approvers": ("ann",)}, "two different approvers"),
        ({"audience": frozenset()}, "0 organisations"),
        ({"audience": frozenset(map(str, range(4_097)))}, "4097 organisations"),
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [1] * (MAX_PREFIX_TOKENS + 1)}, "131073 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_registration_that_may_not_be_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prefix(**other)


def test_the_longest_prefix_is_taken_whole() -> None:
    tokens = [1] * MAX_PREFIX_TOKENS
    assert find(PublicBook([prefix(tokens=tokens)]), [*tokens, 2]) == ("handbook", 32_768)


def test_a_term_is_at_most_ninety_days_and_not_over() -> None:
    for end_ms in (NOW_MS + 1, NOW_MS + MAX_TERM_MS):
        check_term(prefix(not_after_ms=end_ms), NOW_MS)
    for end_ms in (NOW_MS, NOW_MS + MAX_TERM_MS + 1):
        with pytest.raises(ValueError, match="within 90 days"):
            check_term(prefix(not_after_ms=end_ms), NOW_MS)


def test_a_book_is_bounded_in_prefixes_and_in_tokens() -> None:
    many = [prefix(f"p{number}", [number] * 4) for number in range(MAX_PREFIXES + 1)]
    book = PublicBook(many[:MAX_PREFIXES])
    assert len(book) == len(list(book)) == MAX_PREFIXES
    assert book.get("p3") is many[3]
    assert book.get("p256") is None
    with pytest.raises(ValueError, match="257 public prefixes"):
        PublicBook(many)
    count = MAX_BOOK_TOKENS // MAX_PREFIX_TOKENS
    long = [prefix(f"p{number}", [number] * MAX_PREFIX_TOKENS) for number in range(count)]
    assert len(PublicBook(long)) == count
    with pytest.raises(ValueError, match="4194305 tokens"):
        PublicBook([*long, prefix("more", [1])])
    with pytest.raises(ValueError, match="one id"):
        PublicBook([many[0], many[0]])


def test_an_empty_book_matches_nothing() -> None:
    assert find(PublicBook(), PROMPT) is None


def test_what_is_printed_of_a_prefix_has_no_tokens() -> None:
    assert "tokens" not in repr(prefix())
    assert prefix().digest == hashlib.blake2b(
        packed(as_tokens(PROMPT)), digest_size=32, person=b"public"
    ).digest()  # fmt: skip


# -- keys in two zones --------------------------------------------------------------------------


def namespace(scope: Scope, epochs: Epochs | None = None, block_tokens: int = 4) -> Namespace:
    model = replace(MODEL, block_tokens=block_tokens)
    return derive_namespace(ROOT_KEY, scope, model, epochs)


PUBLIC = namespace(prefix().scope)
TENANT = namespace(Scope(kind=ScopeKind.TENANT, org="acme", tenant="blue"))
RIVAL = namespace(Scope(kind=ScopeKind.TENANT, org="rival", tenant="red"))


def keys_of(block_chain: KeyChain) -> list[bytes]:
    return [bytes(block_chain[index]) for index in range(len(block_chain))]


def zones_by_definition(tokens: list[int], public_blocks: int) -> list[bytes]:
    """The formula of the module, written a second time and slowly."""
    keys: list[bytes] = []
    for number in range(len(tokens) // 4):
        key = PUBLIC.key if number < public_blocks else TENANT.key
        message = keys[-1] if keys else PUBLIC.root
        message += (4).to_bytes(4, "little")
        for token in tokens[4 * number : 4 * number + 4]:
            message += token.to_bytes(4, "little")
        message += (0).to_bytes(4, "little")
        keys.append(hashlib.blake2b(message, digest_size=32, key=key, person=b"blk").digest())
    return keys


def test_a_chain_of_two_zones_follows_its_definition() -> None:
    for public_blocks in range(1, 11):
        made = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), public_blocks)
        assert keys_of(made) == zones_by_definition(PROMPT, public_blocks)


def test_a_chain_of_two_zones_equals_the_pinned_vector() -> None:
    """A change of these values orphans every public block of every running fleet."""
    made = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT[:16]), 2)
    assert [key.hex() for key in keys_of(made)] == PINNED
    assert PUBLIC.salt == PINNED_SALT


def test_without_public_blocks_it_is_the_plain_chain() -> None:
    made = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 0)
    assert made == chain(TENANT, as_tokens(PROMPT))
    assert [region.namespace for region in made.regions()] == [TENANT]
    assert made.salt_regions() == [(0, TENANT.salt)]


def test_tenants_share_the_public_keys_and_none_behind_them() -> None:
    ours, theirs = (
        keys_of(two_zone_chain(PUBLIC, of, as_tokens(PROMPT), 6)) for of in (TENANT, RIVAL)
    )
    assert ours[:6] == theirs[:6] == keys_of(chain(PUBLIC, as_tokens(PROMPT)))[:6]
    everything_else = [ours[6:], theirs[6:], keys_of(chain(PUBLIC, as_tokens(PROMPT)))[6:],
                       keys_of(chain(TENANT, as_tokens(PROMPT)))]  # fmt: skip
    seen = [key for keys in everything_else for key in keys]
    assert len(set(seen)) == len(seen)


def test_a_chain_tells_its_regions_and_their_salts() -> None:
    made = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 6)
    spans = [(r.namespace, r.first_block, r.block_count) for r in made.regions()]
    assert spans == [(PUBLIC, 0, 6), (TENANT, 6, 4)]
    assert made.salt_regions() == [(0, PUBLIC.salt), (24, TENANT.salt)]
    whole = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 10)
    assert whole.salt_regions() == [(0, PUBLIC.salt), (40, TENANT.salt)], "the answer is private"


def test_a_public_part_that_does_not_fit_is_refused() -> None:
    for public_blocks in (-1, 11):
        with pytest.raises(ValueError, match="public blocks in a prompt of 40 tokens"):
            two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), public_blocks)
    other = derive_namespace(ROOT_KEY, prefix().scope, replace(MODEL, model_id="other"))
    with pytest.raises(ValueError, match="2 public blocks"):
        two_zone_chain(other, TENANT, as_tokens(PROMPT), 2)
    with pytest.raises(ValueError, match="1 public blocks in a chain of 0"):
        KeyChain(namespace=TENANT, packed=b"", public=PUBLIC, public_blocks=1)
    with pytest.raises(ValueError, match="3 public blocks"):
        KeyChain(namespace=TENANT, packed=bytes(320), public_blocks=3)


def test_raising_the_public_epoch_changes_every_key_of_both_zones() -> None:
    raised = namespace(prefix().scope, Epochs(public=1))
    before, after = (
        keys_of(two_zone_chain(of, TENANT, as_tokens(PROMPT), 6)) for of in (PUBLIC, raised)
    )
    assert not set(before) & set(after)


# -- in the directory ---------------------------------------------------------------------------

WORKER = WorkerId("w")


def stored(tokens: list[int], first: int, of: Namespace, base: int = 0) -> BlocksStored:
    count = len(tokens) // 4
    return BlocksStored(
        hashes=array("Q", range(base + first, base + first + count)),
        parent=EngineHash(first - 1) if first else None,
        tokens=as_tokens(tokens),
        block_tokens=4,
        tier=Tier.DEVICE,
        salt=of.salt,
    )


def directory() -> Directory:
    made = Directory(max_blocks=1_000)
    for one in (PUBLIC, TENANT, RIVAL):
        made.admit_namespace(one)
    made.join(WORKER, block_tokens=4)
    return made


def test_one_lookup_matches_across_both_zones() -> None:
    made = directory()
    assert made.stored(WORKER, stored(PROMPT[:24], 0, PUBLIC)) is StoreOutcome.STORED
    for tenant in (TENANT, RIVAL):
        both = two_zone_chain(PUBLIC, tenant, as_tokens(PROMPT), 6)
        assert made.match(both).device == [6], "the filler's blocks, for everyone"
    assert made.stored(WORKER, stored(PROMPT[24:], 6, TENANT)) is StoreOutcome.STORED
    assert made.match(two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 6)).device == [10]
    assert made.match(two_zone_chain(PUBLIC, RIVAL, as_tokens(PROMPT), 6)).device == [6]
    assert made.match(chain(TENANT, as_tokens(PROMPT))).device == [0]
    assert made.match(chain(PUBLIC, as_tokens(PROMPT))).device == [6]


def test_a_prediction_of_two_zones_is_continued_in_the_right_one() -> None:
    """What a worker then stores after the last predicted block is chained in the private zone."""
    made = directory()
    both = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 6)
    made.predict(WORKER, both, now=Instant(0.0), ttl_ms=100.0)
    assert made.match(both).expected == [10]
    assert made.match(two_zone_chain(PUBLIC, RIVAL, as_tokens(PROMPT), 6)).expected == [6]
    made.stored(WORKER, stored(PROMPT[:24], 0, PUBLIC))
    run = stored(PROMPT[24:32], 6, TENANT)
    made.stored(WORKER, run)
    made.stored(WORKER, replace(stored(PROMPT[32:], 8, TENANT), salt=None))
    made.expire(Instant(100.0))
    assert made.match(both).device == [10]
    made.unpredict(WORKER, both)
    assert made.match(both).device == [10]


def test_retiring_a_public_namespace_takes_what_is_chained_on_it() -> None:
    made = directory()
    made.stored(WORKER, stored(PROMPT[:24], 0, PUBLIC))
    made.stored(WORKER, stored(PROMPT[24:32], 6, TENANT))
    assert made.retire_namespace(PUBLIC.tag)
    both = two_zone_chain(PUBLIC, TENANT, as_tokens(PROMPT), 6)
    match = made.match(both)
    assert match.device == match.resident == match.expected == [0]
    late = replace(stored(PROMPT[32:], 8, TENANT), parent=EngineHash(3))
    assert made.stored(WORKER, late) is StoreOutcome.UNKNOWN_SALT


def test_random_books_and_prompts_never_make_two_tenants_meet() -> None:
    draw = random.Random(5)
    for _ in range(200):
        tokens = [draw.randrange(3) for _ in range(40)]
        made = [prefix(f"p{n}", tokens[: draw.randrange(1, 40)]) for n in range(3)]
        book = PublicBook(made)
        match = book.match(as_tokens(tokens), org="o", model=MODEL, now_ms=NOW_MS)
        public_blocks = 0 if match is None else match.blocks
        assert public_blocks == max(one.token_count for one in made) // MODEL.block_tokens
        ours, theirs = (
            keys_of(two_zone_chain(PUBLIC, of, as_tokens(tokens), public_blocks))
            for of in (TENANT, RIVAL)
        )
        assert ours[:public_blocks] == theirs[:public_blocks]
        assert set(ours[public_blocks:]).isdisjoint(theirs[public_blocks:])
        assert public_blocks < len(ours)
