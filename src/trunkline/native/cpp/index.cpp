#include "index.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <functional>

namespace trunkline {
namespace {

// Far enough to hide a memory access behind the work on the blocks before, and within one line-fill queue.
constexpr std::size_t kEntryAhead = 8;
constexpr std::size_t kCellAhead = 2 * kEntryAhead;

constexpr std::size_t kQueueSlack = 1024;  // queued ids that may be stale before they are looked through

std::uint32_t prefix_of(const std::uint8_t* key) {
  std::uint32_t prefix;
  std::memcpy(&prefix, key, sizeof prefix);
  return prefix;
}

std::uint64_t hash_at(const std::uint8_t* hashes, std::size_t index) {
  std::uint64_t hash;
  std::memcpy(&hash, hashes + index * sizeof hash, sizeof hash);
  return hash;
}

std::size_t find_hash(const Table<HeldCell>& held, std::uint64_t hash) {
  return held.find(spread(hash), [hash](const HeldCell& cell) { return cell.hash() == hash; });
}

std::size_t find_predicted(const Table<PredictedCell>& predicted, EntryId id) {
  return predicted.find(spread(id), [id](const PredictedCell& cell) { return cell.entry == id; });
}

}  // namespace

// -- storage -----------------------------------------------------------------------------------------

EntryId EntryPool::take() {
  ++used_;
  if (free_ != kNoEntry) {
    const EntryId id = free_;
    free_ = (*this)[id].namespace_id;
    return id;
  }
  if (made_ == chunks_.size() * kChunk) chunks_.push_back(std::make_unique<Entry[]>(kChunk));
  return static_cast<EntryId>(made_++);
}

void EntryPool::give_back(EntryId id) {
  --used_;
  (*this)[id].holders = {};
  (*this)[id].namespace_id = free_;
  free_ = id;
}

std::uint32_t MaskRows::take() {
  if (!free_.empty()) {
    const std::uint32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  bits_.resize(bits_.size() + 3 * words_, 0);
  return static_cast<std::uint32_t>(bits_.size() / (3 * words_) - 1);
}

void MaskRows::give_back(std::uint32_t row) {
  std::fill_n(bits_.begin() + static_cast<std::ptrdiff_t>(row * 3 * words_), 3 * words_, 0);
  free_.push_back(row);
}

std::uint64_t* MaskRows::mask(std::uint32_t row, Hold hold) {
  return bits_.data() + (std::size_t{row} * 3 + hold / 2) * words_;  // holds 1, 2, 4 -> 0, 1, 2
}

const std::uint64_t* MaskRows::mask(std::uint32_t row, Hold hold) const {
  return bits_.data() + (std::size_t{row} * 3 + hold / 2) * words_;
}

void MaskRows::widen(std::size_t slot_count) {
  while (words_ * 64 < slot_count) {
    std::vector<std::uint64_t> wide(bits_.size() * 2, 0);
    for (std::size_t mask = 0; mask * words_ < bits_.size(); ++mask) {
      std::copy_n(bits_.begin() + static_cast<std::ptrdiff_t>(mask * words_), words_,
                  wide.begin() + static_cast<std::ptrdiff_t>(mask * words_ * 2));
    }
    bits_.swap(wide);
    words_ *= 2;
  }
}

std::size_t SlotState::allocated_bytes() const {
  // A node of the map: its pair, a link and the allocator's word, rounded up; plus the bucket array.
  constexpr std::size_t kNodeBytes = 32;
  return sizeof(SlotState) + held.allocated_bytes() + predicted.allocated_bytes() +
         aliases.size() * kNodeBytes + aliases.bucket_count() * sizeof(void*) +
         batches.allocated_bytes() + queued.allocated_bytes();
}

std::size_t Index::allocated_bytes() const {
  std::size_t bytes = sizeof(Index) + entries_.allocated_bytes() + by_key_.allocated_bytes() +
                      rows_.allocated_bytes() + namespaces_.capacity() * sizeof(Namespace) +
                      slots_.capacity() * sizeof(slots_[0]) + free_slots_.capacity() * 4 +
                      chained_.capacity() + alive_.capacity() * sizeof(AliveWord) +
                      depths_.device.capacity() * 3 * sizeof(std::uint32_t);
  for (const auto& state : slots_) bytes += state ? state->allocated_bytes() : 0;
  return bytes;
}

// -- namespaces and slots ------------------------------------------------------------------------------

std::size_t Index::add_namespace(const std::uint8_t* key, const std::uint8_t* root) {
  Namespace& added = namespaces_.emplace_back();
  std::copy_n(key, kKeyBytes, added.key.begin());
  std::copy_n(root, kKeyBytes, added.root.begin());
  return namespaces_.size() - 1;
}

bool Index::is_slot(std::int64_t slot) const {
  return slot >= 0 && static_cast<std::size_t>(slot) < slots_.size() &&
         slots_[static_cast<std::size_t>(slot)];
}

std::uint32_t Index::add_slot() {
  if (free_slots_.empty()) {
    rows_.widen(slots_.size() + 1);
    slots_.push_back(std::make_unique<SlotState>());
    return static_cast<std::uint32_t>(slots_.size() - 1);
  }
  std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>{});
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[slot] = std::make_unique<SlotState>();
  return slot;
}

void Index::drop_slot(std::uint32_t slot) {
  clear_slot(slot);
  slots_[slot].reset();
  free_slots_.push_back(slot);
  std::push_heap(free_slots_.begin(), free_slots_.end(), std::greater<>{});
}

std::size_t Index::clear_slot(std::uint32_t slot) {
  std::size_t held_count = 0;
  // An entry may come twice (aliases, or held and predicted): the second time nothing holds it any more.
  slots_[slot]->held.each([&](const HeldCell& cell) {
    held_count += (holds(cell.entry, slot) & kResident) != 0;
    set_holds(cell.entry, slot, 0);
  });
  slots_[slot]->predicted.each([&](const PredictedCell& cell) { set_holds(cell.entry, slot, 0); });
  slots_[slot] = std::make_unique<SlotState>();
  return held_count;
}

// -- entries and their holders ---------------------------------------------------------------------------

std::size_t Index::find_key(const std::uint8_t* key) const {
  return by_key_.find(prefix_of(key), [&](const KeyCell& cell) {
    return cell.prefix == prefix_of(key) &&
           std::memcmp(entries_[cell.entry].key.data(), key, kKeyBytes) == 0;
  });
}

EntryId Index::find_or_make(const std::uint8_t* key, std::uint32_t namespace_id) {
  const std::size_t position = find_key(key);
  if (position != by_key_.kNone) return by_key_[position].entry;
  if (entries_.size() >= max_blocks_) return kNoEntry;
  const EntryId id = entries_.take();
  Entry& entry = entries_[id];
  std::copy_n(key, kKeyBytes, entry.key.begin());
  entry.namespace_id = namespace_id;
  entry.holders = {};
  by_key_.insert({prefix_of(key), id});
  return id;
}

void Index::forget(EntryId id) {
  by_key_.erase(find_key(entries_[id].key.data()));
  entries_.give_back(id);
}

std::uint32_t Index::holds(EntryId id, std::uint32_t slot) const {
  const Entry& entry = entries_[id];
  if (!entry.has_row()) {
    for (const std::uint32_t holder : entry.holders) {
      if (holder != 0 && holder >> 3 == slot) return holder & kAllHolds;
    }
    return 0;
  }
  std::uint32_t holds = 0;
  for (const Hold hold : {kDevice, kResident, kPredicted}) {
    if (rows_.mask(entry.holders[1], hold)[slot / 64] >> (slot % 64) & 1) holds |= hold;
  }
  return holds;
}

/// Sets how a slot holds a block. Forgets the block when nobody holds it any more.
void Index::set_holds(EntryId id, std::uint32_t slot, std::uint32_t holds) {
  if (entries_[id].has_row()) {
    set_in_row(id, slot, holds);
  } else {
    set_inline(id, slot, holds);
  }
}

void Index::set_inline(EntryId id, std::uint32_t slot, std::uint32_t holds) {
  Entry& entry = entries_[id];
  auto& holders = entry.holders;
  auto end = std::find(holders.begin(), holders.end(), 0u);
  auto place = std::find_if(holders.begin(), end, [slot](std::uint32_t h) { return h >> 3 == slot; });
  if (place != end && holds != 0) {
    *place = slot << 3 | holds;
  } else if (place != end) {
    *place = *(end - 1);
    *(end - 1) = 0;
    if (holders[0] == 0) forget(id);
  } else if (holds != 0 && end != holders.end()) {
    *end = slot << 3 | holds;
  } else if (holds != 0) {
    move_to_row(entry);
    set_in_row(id, slot, holds);
  }
}

void Index::set_in_row(EntryId id, std::uint32_t slot, std::uint32_t holds) {
  Entry& entry = entries_[id];
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  for (const Hold hold : {kDevice, kResident, kPredicted}) {
    std::uint64_t& word = rows_.mask(entry.holders[1], hold)[slot / 64];
    word = (holds & hold) != 0 ? word | bit : word & ~bit;
  }
  if (holds == 0) move_inline(entry);
}

void Index::move_to_row(Entry& entry) {
  const auto before = entry.holders;
  const std::uint32_t row = rows_.take();
  for (const std::uint32_t holder : before) {
    const std::uint32_t slot = holder >> 3;
    for (const Hold hold : {kDevice, kResident, kPredicted}) {
      if ((holder & hold) != 0) {
        rows_.mask(row, hold)[slot / 64] |= std::uint64_t{1} << (slot % 64);
      }
    }
  }
  entry.holders = {Entry::kIsRow, row, 0};
}

/// Back to holder words where two holders are left: one below what fits, so that one coming and going
/// holder does not move the block each time.
void Index::move_inline(Entry& entry) {
  const std::uint32_t row = entry.holders[1];
  std::array<std::uint32_t, 3> holders{};
  std::size_t count = 0;
  for (std::size_t word = 0; word < rows_.words(); ++word) {
    const std::uint64_t device = rows_.mask(row, kDevice)[word];
    const std::uint64_t resident = rows_.mask(row, kResident)[word];
    const std::uint64_t predicted = rows_.mask(row, kPredicted)[word];
    for (std::uint64_t left = resident | predicted; left != 0; left &= left - 1) {
      if (count == 2) return;
      const int bit = std::countr_zero(left);
      std::uint32_t holder = static_cast<std::uint32_t>(word * 64 + static_cast<std::size_t>(bit)) << 3;
      if (device >> bit & 1) holder |= kDevice;
      if (resident >> bit & 1) holder |= kResident;
      if (predicted >> bit & 1) holder |= kPredicted;
      holders[count++] = holder;
    }
  }
  assert(count == 2);
  rows_.give_back(row);
  entry.holders = holders;
}

// -- what workers announce ---------------------------------------------------------------------------------

std::int64_t Index::store(std::uint32_t slot, std::size_t tier, std::int64_t namespace_id,
                          std::uint64_t parent, const std::uint8_t* hashes, std::size_t count,
                          const std::uint8_t* tokens, std::uint32_t block_tokens) {
  SlotState& state = *slots_[slot];
  EntryId parent_entry = kNoEntry;
  if (namespace_id < 0) {
    const std::size_t position = find_hash(state.held, parent);
    if (position == state.held.kNone) return kUnknownParent;
    parent_entry = state.held[position].entry;
    namespace_id = entries_[parent_entry].namespace_id;
  }
  const Namespace& secrets = namespaces_[static_cast<std::size_t>(namespace_id)];
  const std::uint8_t* previous =
      parent_entry == kNoEntry ? secrets.root.data() : entries_[parent_entry].key.data();
  chained_.resize(count * kKeyBytes);
  chain_keys(secrets.key.data(), previous, tokens, count, block_tokens, nullptr, 0, chained_.data());

  for (std::size_t index = 0; index < count; ++index) {
    if (index + kEntryAhead < count) {
      by_key_.prefetch(prefix_of(chained_.data() + (index + kEntryAhead) * kKeyBytes));
      state.held.prefetch(spread(hash_at(hashes, index + kEntryAhead)));
    }
    const std::uint8_t* key = chained_.data() + index * kKeyBytes;
    const std::uint64_t hash = hash_at(hashes, index);
    std::size_t position = find_hash(state.held, hash);
    const bool is_new_hash = position == state.held.kNone;
    if (is_new_hash) {
      const EntryId id = find_or_make(key, static_cast<std::uint32_t>(namespace_id));
      if (id == kNoEntry) return kFull;
      position = state.held.insert({static_cast<std::uint32_t>(hash),
                                    static_cast<std::uint32_t>(hash >> 32), id, {}});
    } else if (std::memcmp(entries_[state.held[position].entry].key.data(), key, kKeyBytes) != 0) {
      return kConflict;
    }
    note_copy(state, slot, state.held[position], tier, is_new_hash);
  }
  return static_cast<std::int64_t>(count);
}

void Index::note_copy(SlotState& state, std::uint32_t slot, HeldCell& cell, std::size_t tier,
                      bool is_new_hash) {
  const std::uint32_t before = holds(cell.entry, slot);
  const bool is_first_on_device = tier == 0 && cell.copies[0] == 0;
  if (cell.copies[tier] < kMostCopies) ++cell.copies[tier];
  if (is_new_hash && (before & kResident) != 0) {
    auto [alias, is_made] =
        state.aliases.try_emplace(cell.entry, Aliases{1, (before & kDevice) != 0 ? 1u : 0u});
    ++alias->second.hashes;
  }
  if (is_first_on_device && !state.aliases.empty()) {
    const auto alias = state.aliases.find(cell.entry);
    if (alias != state.aliases.end()) ++alias->second.on_device;
  }
  const std::uint32_t after = before | kResident | (tier == 0 ? kDevice : 0u);
  if (after != before) set_holds(cell.entry, slot, after);
}

std::size_t Index::remove(std::uint32_t slot, std::size_t tier, const std::uint8_t* hashes,
                          std::size_t count) {
  SlotState& state = *slots_[slot];
  std::size_t known_count = 0;
  for (std::size_t index = 0; index < count; ++index) {
    if (index + kEntryAhead < count) {
      state.held.prefetch(spread(hash_at(hashes, index + kEntryAhead)));
    }
    const std::size_t position = find_hash(state.held, hash_at(hashes, index));
    if (position == state.held.kNone || state.held[position].copies[tier] == 0) continue;
    ++known_count;
    if (--state.held[position].copies[tier] == 0) drop_copy(state, slot, position, tier);
  }
  return known_count;
}

/// The last copy of one engine hash in a tier is gone.
void Index::drop_copy(SlotState& state, std::uint32_t slot, std::size_t position, std::size_t tier) {
  const HeldCell cell = state.held[position];
  const auto alias = state.aliases.find(cell.entry);
  const bool has_alias = alias != state.aliases.end();
  const bool is_gone = cell.copies == std::array<std::uint16_t, kTiers>{};
  const std::uint32_t before = holds(cell.entry, slot);
  std::uint32_t after = before;
  if (tier == 0 && (!has_alias || --alias->second.on_device == 0)) after &= ~std::uint32_t{kDevice};
  if (is_gone) {
    if (!has_alias) after &= ~std::uint32_t{kResident};
    if (has_alias && --alias->second.hashes == 1) state.aliases.erase(alias);
    state.held.erase(position);
  }
  if (after != before) set_holds(cell.entry, slot, after);
}

// -- what we expect ------------------------------------------------------------------------------------------

bool Index::may_predict_until(std::uint32_t slot, double expires_ms) const {
  return expires_ms >= slots_[slot]->last_expires_ms;  // false for NaN
}

void Index::predict(std::uint32_t slot, std::uint32_t namespace_id, const std::uint8_t* keys,
                    std::size_t count, double expires_ms, std::size_t max_predicted) {
  SlotState& state = *slots_[slot];
  state.last_expires_ms = expires_ms;
  const std::uint32_t batch = state.next_batch++;
  std::uint32_t taken = 0;
  for (std::size_t index = 0; index < count; ++index, ++taken) {
    if (index + kEntryAhead < count) {
      by_key_.prefetch(prefix_of(keys + (index + kEntryAhead) * kKeyBytes));
    }
    const EntryId id = find_or_make(keys + index * kKeyBytes, namespace_id);
    if (id == kNoEntry) break;
    const std::uint32_t before = holds(id, slot);
    if ((before & kPredicted) != 0) {
      state.predicted[find_predicted(state.predicted, id)].batch = batch;
    } else {
      state.predicted.insert({id, batch});
      set_holds(id, slot, before | kPredicted);
    }
    state.queued.items.push_back(id);
  }
  if (taken > 0) state.batches.items.push_back({expires_ms, batch, taken});
  while (state.predicted.size() > max_predicted) expire_oldest(slot, state);
  if (state.queued.size() > 2 * state.predicted.size() + kQueueSlack) drop_stale_queued(state);
}

void Index::unpredict(std::uint32_t slot, const std::uint8_t* keys, std::size_t count) {
  SlotState& state = *slots_[slot];
  for (std::size_t index = 0; index < count; ++index) {
    const std::size_t key_position = find_key(keys + index * kKeyBytes);
    if (key_position == by_key_.kNone) continue;
    const std::size_t position = find_predicted(state.predicted, by_key_[key_position].entry);
    if (position != state.predicted.kNone) forget_prediction(slot, state, position);
  }
}

void Index::expire(double now_ms) {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot]) continue;
    SlotState& state = *slots_[slot];
    while (state.batches.size() > 0 && state.batches.items[state.batches.front].expires_ms <= now_ms) {
      expire_oldest(static_cast<std::uint32_t>(slot), state);
    }
  }
}

void Index::expire_oldest(std::uint32_t slot, SlotState& state) {
  const Batch batch = state.batches.items[state.batches.front];
  for (std::size_t index = 0; index < batch.count; ++index) {
    // An id may have been freed and taken again; then its prediction is of a later batch.
    const EntryId id = state.queued.items[state.queued.front + index];
    const std::size_t position = find_predicted(state.predicted, id);
    if (position != state.predicted.kNone && state.predicted[position].batch == batch.number) {
      forget_prediction(slot, state, position);
    }
  }
  state.queued.pop(batch.count);
  state.batches.pop(1);
}

void Index::forget_prediction(std::uint32_t slot, SlotState& state, std::size_t position) {
  const EntryId id = state.predicted[position].entry;
  state.predicted.erase(position);
  set_holds(id, slot, holds(id, slot) & ~std::uint32_t{kPredicted});
}

/// Keeps the queue in proportion to what is expected, however often the same blocks are predicted anew.
void Index::drop_stale_queued(SlotState& state) {
  Fifo<Batch> batches;
  Fifo<EntryId> queued;
  std::size_t next = state.queued.front;
  for (std::size_t index = state.batches.front; index < state.batches.items.size(); ++index) {
    Batch batch = state.batches.items[index];
    const std::size_t end = next + batch.count;
    batch.count = 0;
    for (; next < end; ++next) {
      const EntryId id = state.queued.items[next];
      const std::size_t position = find_predicted(state.predicted, id);
      if (position == state.predicted.kNone || state.predicted[position].batch != batch.number) continue;
      queued.items.push_back(id);
      ++batch.count;
    }
    if (batch.count > 0) batches.items.push_back(batch);
  }
  state.batches = std::move(batches);
  state.queued = std::move(queued);
}

// -- lookups ---------------------------------------------------------------------------------------------------

const Depths& Index::match(const std::uint8_t* keys, std::size_t count) {
  const std::size_t slot_count = slots_.size();
  for (auto* depths : {&depths_.device, &depths_.resident, &depths_.expected}) {
    depths->assign(slot_count, 0);
  }
  alive_.clear();
  for (std::size_t word = 0; word * 64 < slot_count; ++word) {
    const std::size_t left = slot_count - word * 64;
    const std::uint64_t everyone = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
    alive_.push_back({word, everyone, everyone, everyone});
  }

  for (std::size_t index = 0; index < std::min(count, kCellAhead); ++index) {
    by_key_.prefetch(prefix_of(keys + index * kKeyBytes));
  }
  std::array<EntryId, kEntryAhead> guesses;
  for (std::size_t index = 0; index < std::min(count, kEntryAhead); ++index) {
    guesses[index] = guess(keys + index * kKeyBytes);
  }
  for (std::size_t depth = 0; depth < count && !alive_.empty(); ++depth) {
    const std::uint8_t* key = keys + depth * kKeyBytes;
    if (depth + kCellAhead < count) by_key_.prefetch(prefix_of(key + kCellAhead * kKeyBytes));
    EntryId id = guesses[depth % kEntryAhead];
    if (depth + kEntryAhead < count) {
      guesses[depth % kEntryAhead] = guess(key + kEntryAhead * kKeyBytes);
    }
    if (id != kNoEntry && std::memcmp(entries_[id].key.data(), key, kKeyBytes) != 0) {
      const std::size_t position = find_key(key);
      id = position == by_key_.kNone ? kNoEntry : by_key_[position].entry;
    }
    match_block(id == kNoEntry ? nullptr : &entries_[id], static_cast<std::uint32_t>(depth));
  }
  match_block(nullptr, static_cast<std::uint32_t>(count));
  return depths_;
}

/// The first entry whose key begins alike: almost surely the right one, and on its way from memory now.
EntryId Index::guess(const std::uint8_t* key) const {
  const std::uint32_t prefix = prefix_of(key);
  const std::size_t position =
      by_key_.find(prefix, [prefix](const KeyCell& cell) { return cell.prefix == prefix; });
  if (position == by_key_.kNone) return kNoEntry;
  const EntryId id = by_key_[position].entry;
  const auto* entry = reinterpret_cast<const char*>(&entries_[id]);
  __builtin_prefetch(entry);
  __builtin_prefetch(entry + sizeof(Entry) - 1);
  return id;
}

/// Ends the runs of the slots that lack the block at `depth`; `entry` is null where nobody has it.
void Index::match_block(const Entry* entry, std::uint32_t depth) {
  std::size_t kept = 0;
  for (AliveWord alive : alive_) {
    std::uint64_t device = 0, resident = 0, predicted = 0;
    if (entry != nullptr && entry->has_row()) {
      const std::uint32_t row = entry->holders[1];
      device = rows_.mask(row, kDevice)[alive.word];
      resident = rows_.mask(row, kResident)[alive.word];
      predicted = rows_.mask(row, kPredicted)[alive.word];
    } else if (entry != nullptr) {
      for (const std::uint32_t holder : entry->holders) {
        const std::uint32_t slot = holder >> 3;
        if (holder == 0 || slot / 64 != alive.word) continue;
        const std::uint64_t one = 1;
        device |= (one & (holder & kDevice)) << (slot % 64);
        resident |= (one & (holder & kResident) / kResident) << (slot % 64);
        predicted |= (one & (holder & kPredicted) / kPredicted) << (slot % 64);
      }
    }
    end_runs(depths_.device, alive.device, device, alive.word, depth);
    end_runs(depths_.resident, alive.resident, resident, alive.word, depth);
    end_runs(depths_.expected, alive.expected, resident | predicted, alive.word, depth);
    if (alive.expected != 0) alive_[kept++] = alive;  // the other two are subsets
  }
  alive_.resize(kept);
}

void Index::end_runs(std::vector<std::uint32_t>& depths, std::uint64_t& alive, std::uint64_t held,
                     std::size_t word, std::uint32_t depth) const {
  const std::uint64_t ended = alive & ~held;
  if (depth > 0) {  // depths are 0 to begin with
    for (std::uint64_t left = ended; left != 0; left &= left - 1) {
      depths[word * 64 + static_cast<std::size_t>(std::countr_zero(left))] = depth;
    }
  }
  alive &= held;
}

std::vector<std::array<std::uint8_t, kKeyBytes>> Index::held(std::uint32_t slot) const {
  std::vector<std::array<std::uint8_t, kKeyBytes>> keys;
  keys.reserve(slots_[slot]->held.size());
  slots_[slot]->held.each([&](const HeldCell& cell) { keys.push_back(entries_[cell.entry].key); });
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

bool Index::holds_engine_hash(std::uint32_t slot, std::uint64_t hash) const {
  return find_hash(slots_[slot]->held, hash) != Table<HeldCell>::kNone;
}

}  // namespace trunkline
