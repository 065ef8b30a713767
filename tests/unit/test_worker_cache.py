"""The prefix cache of the simulated worker: what hits, what leaves, what is told, and false KV
shows."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.simkv import answer_tokens
from trunkline.ports.publisher import BlockRemoved, CacheCleared, RunStored
from trunkline.worker.cache import BlockCache, KvSequence

VOCAB = 4_096
BLOCK = 16


def _tokens(count: int, first: int = 300) -> array[int]:
    return array("I", (first + index % 977 for index in range(count)))


def _prefilled(
    cache: BlockCache, tokens: array[int], salt: str | None = None, answer: int = 1
) -> KvSequence:
    sequence = cache.admit(tokens, salt, answer)
    assert sequence is not None
    cache.compute(sequence, len(tokens))
    return sequence


def _run(cache: BlockCache, tokens: array[int], salt: str | None = None) -> tuple[int, array[int]]:
    """Cached tokens and answer of a whole request."""
    sequence = _prefilled(cache, tokens, salt)
    answer = cache.answer(sequence, 8, VOCAB)
    cache.release(sequence)
    return sequence.cached_tokens, answer


def test_a_second_equal_prompt_hits_and_gives_the_right_answer() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    prompt = _tokens(70)
    assert _run(cache, prompt) == (0, answer_tokens(prompt, 8, VOCAB))
    assert _run(cache, prompt) == (64, answer_tokens(prompt, 8, VOCAB))


def test_the_last_token_is_always_computed() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    _run(cache, _tokens(64))
    assert _run(cache, _tokens(64))[0] == 48


def test_another_salt_hits_nothing_and_gives_the_same_answer() -> None:
    cache = BlockCache(capacity=32, block_tokens=BLOCK)
    prompt = _tokens(70)
    right = answer_tokens(prompt, 8, VOCAB)
    assert _run(cache, prompt, "a") == (0, right)
    assert _run(cache, prompt, "b") == (0, right)
    assert _run(cache, prompt, None) == (0, right)
    assert _run(cache, prompt, "a") == (64, right)


@pytest.mark.parametrize("place", [0, 17, 1_024, 2_047])
def test_one_damaged_byte_of_a_block_gives_a_wrong_answer(place: int) -> None:
    cache = BlockCache(capacity=16, block_tokens=32)
    prompt = _tokens(70)
    sequence = _prefilled(cache, prompt)
    block = sequence.blocks[0]
    cache.release(sequence)
    block.kv = block.kv[:place] + bytes([block.kv[place] ^ 1]) + block.kv[place + 1 :]
    cached, answer = _run(cache, prompt)
    assert cached == 64
    assert answer != answer_tokens(prompt, 8, VOCAB)


def test_kv_of_other_tokens_under_the_right_name_gives_a_wrong_answer() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    prompt = _tokens(40)
    sequence = _prefilled(cache, prompt)
    other = _prefilled(cache, _tokens(40, first=900))
    sequence.blocks[1].kv = other.blocks[1].kv
    cache.release(sequence)
    assert _run(cache, prompt)[1] != answer_tokens(prompt, 8, VOCAB)


def test_kv_of_another_salt_under_the_right_name_gives_a_wrong_answer() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    prompt = _tokens(40)
    mine, theirs = _prefilled(cache, prompt, "mine"), _prefilled(cache, prompt, "theirs")
    mine.blocks[0].kv = theirs.blocks[0].kv
    cache.release(mine)
    assert _run(cache, prompt, "mine")[1] != answer_tokens(prompt, 8, VOCAB)


def test_a_run_is_announced_once_with_its_parent_and_a_hit_is_not() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    _run(cache, _tokens(40), "s")
    (first,) = cache.take_events()
    assert isinstance(first, RunStored)
    assert (len(first.hashes), first.parent, first.salt) == (2, None, "s")
    assert first.tokens == _tokens(40)[:32]
    _run(cache, _tokens(70), "s")
    (second,) = cache.take_events()
    assert isinstance(second, RunStored)
    assert second.parent == first.hashes[-1]
    assert second.tokens == _tokens(70)[32:64]
    _run(cache, _tokens(70), "s")
    assert cache.take_events() == []


def test_eviction_takes_the_tail_of_the_oldest_prefix_first_and_tells() -> None:
    cache = BlockCache(capacity=4, block_tokens=BLOCK)
    _run(cache, _tokens(48))
    stored = cache.take_events()[0]
    assert isinstance(stored, RunStored)
    _run(cache, _tokens(32, first=2_000))
    events = cache.take_events()
    assert events[0] == BlockRemoved(hash=stored.hashes[2])
    assert isinstance(events[1], RunStored)
    assert _run(cache, _tokens(48))[0] == 32


def test_blocks_of_a_running_sequence_are_never_evicted() -> None:
    cache = BlockCache(capacity=4, block_tokens=BLOCK)
    running = _prefilled(cache, _tokens(40), answer=8)
    assert cache.admit(_tokens(32, first=2_000), None, 1) is None
    cache.release(running)
    assert cache.admit(_tokens(32, first=2_000), None, 1) is not None


def test_what_a_sequence_reserved_cannot_be_given_to_another() -> None:
    cache = BlockCache(capacity=4, block_tokens=BLOCK)
    growing = cache.admit(_tokens(16), None, 48)
    assert growing is not None
    assert cache.admit(_tokens(8, first=2_000), None, 1) is None


def test_idle_blocks_that_hit_do_not_count_as_room_for_the_rest() -> None:
    cache = BlockCache(capacity=6, block_tokens=BLOCK)
    _run(cache, _tokens(33))
    running = cache.admit(_tokens(30, first=2_000), None, 1)
    assert running is not None
    # Four places are free, two of them hit; three more are needed.
    assert cache.admit(_tokens(70), None, 1) is None
    cache.release(running)
    assert cache.admit(_tokens(70), None, 1) is not None


def test_a_block_computed_twice_is_two_copies_and_goes_twice() -> None:
    cache = BlockCache(capacity=4, block_tokens=BLOCK)
    prompt = _tokens(16)
    # A full prompt of one block never hits: its last token is computed again.
    _run(cache, prompt)
    _run(cache, prompt)
    stored = [event for event in cache.take_events() if isinstance(event, RunStored)]
    assert len(stored) == 2
    assert stored[0].hashes == stored[1].hashes
    _run(cache, _tokens(63, first=2_000))
    removed = [event for event in cache.take_events() if isinstance(event, BlockRemoved)]
    assert [event.hash for event in removed] == [stored[0].hashes[0]]
    assert cache.is_resident(stored[0].hashes[0])


def test_generated_tokens_fill_blocks_that_the_next_turn_hits() -> None:
    cache = BlockCache(capacity=16, block_tokens=BLOCK)
    sequence = _prefilled(cache, _tokens(20), answer=30)
    answer = cache.answer(sequence, 30, VOCAB)
    sequence.tokens.extend(answer)
    cache.compute(sequence, 48)
    cache.release(sequence)
    follow_up = _tokens(20) + answer + _tokens(10, first=1_500)
    assert _run(cache, follow_up) == (48, answer_tokens(follow_up, 8, VOCAB))


def test_a_reset_forgets_all_and_is_refused_while_a_sequence_runs() -> None:
    cache = BlockCache(capacity=8, block_tokens=BLOCK)
    running = _prefilled(cache, _tokens(40))
    assert not cache.reset()
    cache.release(running)
    cache.take_events()
    assert cache.reset()
    assert cache.take_events() == [CacheCleared()]
    assert _run(cache, _tokens(40))[0] == 0


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([300, 301, 900]), st.sampled_from("ab")),
        max_size=25,
    )
)
def test_events_replayed_give_exactly_what_is_resident_and_every_answer_is_right(
    requests: list[tuple[int, int, str]],
) -> None:
    cache = BlockCache(capacity=8, block_tokens=BLOCK)
    copies: dict[bytes, int] = {}
    for length, first, salt in requests:
        prompt = _tokens(length, first)
        assert _run(cache, prompt, salt)[1] == answer_tokens(prompt, 8, VOCAB)
        for event in cache.take_events():
            if isinstance(event, RunStored):
                for name in event.hashes:
                    copies[name] = copies.get(name, 0) + 1
            elif isinstance(event, BlockRemoved):
                copies[event.hash] -= 1
        assert all(count >= 0 for count in copies.values())
        assert {n for n, count in copies.items() if count} == {
            n for n in copies if cache.is_resident(n)
        }
        assert sum(copies.values()) == cache.resident_blocks <= 8
    assert cache.used_share == 0
