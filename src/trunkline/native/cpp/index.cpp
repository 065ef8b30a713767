#include "index.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <functional>

namespace trunkline {
namespace {

// Far enough to hide a memory access behind the work on the blocks before, and within one line-fill queue.
constexpr std::size_t kCellAhead = 2 * kEntryAhead;

// Blocks in a row that lay side by side, after which the walk goes along them and looks nothing up.
constexpr std::size_t kLongStreak = 16;

// Predictions that are dropped in one go, after what they need was begun to be read for all of them.
constexpr std::size_t kExpiredTogether = 32;

constexpr std::size_t kQueueSlack = 1024;  // queued ids that may be stale before they are looked through

/// Reads an entry ahead, which may lie in two lines.
void prefetch(const Entry& entry) {
  const auto* begin = reinterpret_cast<const char*>(&entry);
  __builtin_prefetch(begin);
  __builtin_prefetch(begin + sizeof(Entry) - 1);
}

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

// Where the masks of a hold lie among the four.
enum : std::size_t { kDeviceMask, kNearMask, kResidentMask, kPredictedMask };

std::uint32_t holds_at(const std::uint64_t* masks, std::uint32_t bit) {
  std::uint32_t holds = 0;
  for (std::size_t hold = 0; hold < kHolds; ++hold) {
    holds |= static_cast<std::uint32_t>(masks[hold] >> bit & 1) << hold;
  }
  return holds;
}

void set_holds_at(std::uint64_t* masks, std::uint32_t bit, std::uint32_t holds) {
  for (std::size_t hold = 0; hold < kHolds; ++hold) {
    const std::uint64_t value = holds >> hold & 1;
    masks[hold] = (masks[hold] & ~(std::uint64_t{1} << bit)) | value << bit;
  }
}

/// What a slot holds by the copies of one engine hash: bits of `Hold`.
std::uint32_t holds_of(const std::array<std::uint16_t, kTiers>& copies) {
  std::uint32_t holds = 0;
  if (copies[0] != 0) holds |= kDevice;
  if (copies[0] != 0 || copies[1] != 0) holds |= kNear;
  if (holds != 0 || copies[2] != 0 || copies[3] != 0) holds |= kResident;
  return holds;
}

}  // namespace

// -- storage -----------------------------------------------------------------------------------------

EntryPool::~EntryPool() {
  for (Entry* chunk : small_) PageAllocator<Entry>().deallocate(chunk, kSmall);
  for (Entry* chunk : large_) PageAllocator<Entry>().deallocate(chunk, kLarge);
  for (Link* chunk : small_links_) PageAllocator<Link>().deallocate(chunk, kSmall);
  for (Link* chunk : large_links_) PageAllocator<Link>().deallocate(chunk, kLarge);
}

EntryId EntryPool::take() {
  ++used_;
  if (free_ != kNoEntry) {
    const EntryId id = free_;
    free_ = (*this)[id].namespace_id;
    return id;
  }
  if (made_ < kLarge) {
    if (made_ == small_.size() * kSmall) {
      small_.push_back(PageAllocator<Entry>().allocate(kSmall));
      small_links_.push_back(PageAllocator<Link>().allocate(kSmall));
    }
  } else if (made_ == (large_.size() + 1) * kLarge) {
    large_.push_back(PageAllocator<Entry>().allocate(kLarge));
    large_links_.push_back(PageAllocator<Link>().allocate(kLarge));
  }
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
  bits_.resize(bits_.size() + kHolds * words_, 0);
  return static_cast<std::uint32_t>(bits_.size() / (kHolds * words_) - 1);
}

void MaskRows::give_back(std::uint32_t row) {
  std::fill_n(masks(row, 0), kHolds * words_, 0);
  free_.push_back(row);
}

void MaskRows::widen(std::size_t slot_count) {
  while (words_ * 64 < slot_count) {
    const std::size_t row_words = words_ * kHolds;
    std::vector<std::uint64_t> wide(bits_.size() * 2, 0);
    for (std::size_t start = 0; start < bits_.size(); start += row_words) {
      std::copy_n(bits_.begin() + static_cast<std::ptrdiff_t>(start), row_words,
                  wide.begin() + static_cast<std::ptrdiff_t>(start * 2));
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
                      (expecting_.capacity() + free_namespaces_.capacity()) * 4 +
                      retiring_.allocated_bytes() +
                      depths_.device.capacity() * 3 * sizeof(std::uint32_t);
  for (const auto& state : slots_) bytes += state ? state->allocated_bytes() : 0;
  return bytes;
}

// -- namespaces and slots ------------------------------------------------------------------------------

std::size_t Index::add_namespace(const std::uint8_t* key, const std::uint8_t* root) {
  std::size_t id = namespaces_.size();
  if (free_namespaces_.empty()) {
    namespaces_.emplace_back();
  } else {
    id = free_namespaces_.back();
    free_namespaces_.pop_back();
  }
  Namespace& added = namespaces_[id];
  added.is_retired = false;
  std::copy_n(key, kKeyBytes, added.key.begin());
  std::copy_n(root, kKeyBytes, added.root.begin());
  return id;
}

bool Index::is_namespace(std::int64_t id) const {
  return id >= 0 && static_cast<std::size_t>(id) < namespaces_.size() &&
         !namespaces_[static_cast<std::size_t>(id)].is_retired;
}

void Index::retire_namespace(std::uint32_t id) {
  Namespace& retired = namespaces_[id];
  retired.key.fill(0);
  retired.root.fill(0);
  retired.is_retired = true;
  retiring_.items.push_back(id);
}

/// Takes up to so many blocks of retired namespaces out of reach; how many namespaces are left to do.
std::size_t Index::sweep(std::size_t max_blocks) {
  while (retiring_.size() > 0) {
    const std::uint32_t id = retiring_.items[retiring_.front];
    const EntryId newest = namespaces_[id].newest;
    if (newest == kNoEntry) {
      free_namespaces_.push_back(id);
      retiring_.pop(1);
      continue;
    }
    if (max_blocks == 0) break;
    --max_blocks;
    bury(newest);
  }
  return retiring_.size();
}

bool Index::is_slot(std::int64_t slot) const {
  return slot >= 0 && static_cast<std::size_t>(slot) < slots_.size() &&
         slots_[static_cast<std::size_t>(slot)];
}

std::uint32_t Index::add_slot() {
  if (free_slots_.empty()) {
    rows_.widen(slots_.size() + 1);
    slots_.push_back(std::make_unique<SlotState>(spread_));
    return static_cast<std::uint32_t>(slots_.size() - 1);
  }
  std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>{});
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[slot] = std::make_unique<SlotState>(spread_);
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
  const Fifo<EntryId>& queued = slots_[slot]->queued;
  for (std::size_t at = queued.front; at < queued.items.size(); ++at) {
    if (entries_[queued.items[at]].is_lone_of(slot)) forget(queued.items[at]);
  }
  slots_[slot] = std::make_unique<SlotState>(spread_);
  return held_count;
}

// -- entries and their holders ---------------------------------------------------------------------------

std::size_t Index::find_key(const std::uint8_t* key) const {
  const std::uint32_t prefix = prefix_of(key);
  return by_key_.find(prefix, [&](const KeyCell& cell) { return is_of(cell, prefix, key); });
}

/// Where the key of an entry lies that has one.
std::size_t Index::find_entry(EntryId id) const {
  const std::uint32_t prefix = prefix_of(entries_[id].key.data());
  return by_key_.find(prefix, [id](const KeyCell& cell) { return cell.entry == id; });
}

EntryId Index::find_or_make(const std::uint8_t* key, std::uint32_t namespace_id) {
  const std::uint32_t prefix = prefix_of(key);
  const auto is_wanted = [&](const KeyCell& cell) { return is_of(cell, prefix, key); };
  Found found = by_key_.find_or_hole(prefix, is_wanted);
  if (found.is_there) {
    const EntryId known = by_key_[found.position].entry;
    if (!is_dead(known)) return known;
    bury(known);  // its namespace was retired and is back under another number
    found = by_key_.find_or_hole(prefix, is_wanted);
  }
  if (entries_.size() >= max_blocks_) return kNoEntry;
  const EntryId id = entries_.take();
  Entry& entry = entries_[id];
  std::copy_n(key, kKeyBytes, entry.key.begin());
  entry.namespace_id = namespace_id;
  entry.holders = {};
  by_key_.fill(found.position, {prefix, id});
  enlist(id);
  return id;
}

void Index::forget(EntryId id) {
  if (entries_[id].namespace_id != kNobody) {
    by_key_.erase(find_entry(id));
    delist(id);
  }
  entries_.give_back(id);
}

void Index::enlist(EntryId id) {
  EntryId& newest = namespaces_[entries_[id].namespace_id].newest;
  entries_.link(id) = {kNoEntry, newest};
  if (newest != kNoEntry) entries_.link(newest).newer = id;
  newest = id;
}

void Index::delist(EntryId id) {
  const Link own = entries_.link(id);
  if (own.older != kNoEntry) entries_.link(own.older).newer = own.newer;
  if (own.newer != kNoEntry) {
    entries_.link(own.newer).older = own.older;
  } else {
    namespaces_[entries_[id].namespace_id].newest = own.older;
  }
}

/// No key leads to the block from here on and nobody expects it; it goes when no engine hash names it.
void Index::bury(EntryId id) {
  Entry& entry = entries_[id];
  if (entry.is_lone()) {
    --slots_[entry.holders[1]]->lone_count;
    forget(id);
    return;
  }
  by_key_.erase(find_entry(id));
  delist(id);
  entry.namespace_id = kNobody;
  expecting_.clear();
  if (entry.has_row()) {
    for (std::size_t word = 0; word < rows_.words(); ++word) {
      std::uint64_t left = rows_.masks(entry.holders[1], word)[kPredictedMask];
      for (; left != 0; left &= left - 1) {
        expecting_.push_back(static_cast<std::uint32_t>(word * 64) +
                             static_cast<std::uint32_t>(std::countr_zero(left)));
      }
    }
  } else {
    for (const std::uint32_t holder : entry.holders) {
      if ((holder & kPredicted) != 0) expecting_.push_back(holder >> kHolderShift);
    }
  }
  for (const std::uint32_t slot : expecting_) {
    forget_prediction(slot, *slots_[slot], id);
  }
}

std::uint32_t Index::holds(EntryId id, std::uint32_t slot) const {
  const Entry& entry = entries_[id];
  if (entry.is_lone()) return entry.is_lone_of(slot) ? kPredicted : 0;
  if (!entry.has_row()) {
    for (const std::uint32_t holder : entry.holders) {
      if (holder != 0 && holder >> kHolderShift == slot) return holder & kAllHolds;
    }
    return 0;
  }
  return holds_at(rows_.masks(entry.holders[1], slot / 64), slot % 64);
}

/// Sets how a slot holds a block. Forgets the block when nobody holds it any more.
void Index::set_holds(EntryId id, std::uint32_t slot, std::uint32_t holds) {
  if (entries_[id].is_lone()) move_from_lone(id);
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
  auto place = std::find_if(holders.begin(), end, [slot](std::uint32_t h) { return h >> kHolderShift == slot; });
  if (place != end && holds != 0) {
    *place = slot << kHolderShift | holds;
  } else if (place != end) {
    *place = *(end - 1);
    *(end - 1) = 0;
    if (holders[0] == 0) forget(id);
  } else if (holds != 0 && end != holders.end()) {
    *end = slot << kHolderShift | holds;
  } else if (holds != 0) {
    move_to_row(entry);
    set_in_row(id, slot, holds);
  }
}

void Index::set_in_row(EntryId id, std::uint32_t slot, std::uint32_t holds) {
  Entry& entry = entries_[id];
  set_holds_at(rows_.masks(entry.holders[1], slot / 64), slot % 64, holds);
  if (holds == 0) move_inline(entry);
}

void Index::move_to_row(Entry& entry) {
  const auto before = entry.holders;
  const std::uint32_t row = rows_.take();
  for (const std::uint32_t holder : before) {
    const std::uint32_t slot = holder >> kHolderShift;
    set_holds_at(rows_.masks(row, slot / 64), slot % 64, holder & kAllHolds);
  }
  entry.holders = {Entry::kIsRow, row, 0};
}

/// Somebody else is to have it, or more than that it is expected.
void Index::move_from_lone(EntryId id) {
  auto& holders = entries_[id].holders;
  SlotState& state = *slots_[holders[1]];
  state.predicted.insert({id, holders[2]});
  --state.lone_count;
  holders = {holders[1] << kHolderShift | kPredicted, 0, 0};
}

/// Back to holder words where two holders are left: one below what fits, so that one coming and going
/// holder does not move the block each time.
void Index::move_inline(Entry& entry) {
  const std::uint32_t row = entry.holders[1];
  std::array<std::uint32_t, 3> holders{};
  std::size_t count = 0;
  for (std::size_t word = 0; word < rows_.words(); ++word) {
    const std::uint64_t* masks = rows_.masks(row, word);
    for (std::uint64_t left = masks[kResidentMask] | masks[kPredictedMask]; left != 0; left &= left - 1) {
      if (count == 2) return;
      const auto bit = static_cast<std::uint32_t>(std::countr_zero(left));
      const auto slot = static_cast<std::uint32_t>(word * 64) + bit;
      holders[count++] = slot << kHolderShift | holds_at(masks, bit);
    }
  }
  assert(count == 2);
  rows_.give_back(row);
  entry.holders = holders;
}

// -- what workers announce ---------------------------------------------------------------------------------

std::int64_t Index::store(std::uint32_t slot, std::size_t tier, std::int64_t namespace_id,
                          std::uint64_t parent, bool is_zone, const std::uint8_t* hashes,
                          std::size_t count, const std::uint8_t* tokens, std::uint32_t block_tokens) {
  SlotState& state = *slots_[slot];
  EntryId parent_entry = kNoEntry;
  if (namespace_id < 0 || is_zone) {
    const std::size_t position = find_hash(state, parent);
    if (position == state.held.kNone) return kUnknownParent;
    parent_entry = state.held[position].entry;
    if (is_dead(parent_entry)) return kRetired;
    if (namespace_id < 0) namespace_id = entries_[parent_entry].namespace_id;
  }
  const Namespace& secrets = namespaces_[static_cast<std::size_t>(namespace_id)];
  const std::uint8_t* previous =
      parent_entry == kNoEntry ? secrets.root.data() : entries_[parent_entry].key.data();
  chained_.resize(count * kKeyBytes);
  chain_keys(secrets.key.data(), previous, tokens, count, block_tokens, nullptr, 0, chained_.data());

  for (std::size_t index = 0; index < count; ++index) {
    if (index + kEntryAhead < count) {
      by_key_.prefetch(prefix_of(chained_.data() + (index + kEntryAhead) * kKeyBytes));
      state.held.prefetch(spread_(hash_at(hashes, index + kEntryAhead)));
    }
    const std::uint8_t* key = chained_.data() + index * kKeyBytes;
    const std::uint64_t hash = hash_at(hashes, index);
    const std::int64_t position = find_or_name(state, slot, hash, key, static_cast<std::uint32_t>(namespace_id));
    if (position < 0) return position;
    HeldCell& cell = state.held[static_cast<std::size_t>(position)];
    auto copies = cell.copies;
    if (copies[tier] < kMostCopies) ++copies[tier];
    raise_copies(state, slot, cell, copies);
  }
  return static_cast<std::int64_t>(count);
}

/// Where an engine hash lies that names the block with this key, put in where it is new; or a code.
std::int64_t Index::find_or_name(SlotState& state, std::uint32_t slot, std::uint64_t hash,
                                 const std::uint8_t* key, std::uint32_t namespace_id) {
  std::size_t position = find_hash(state, hash);
  if (position != state.held.kNone) {
    const EntryId known = state.held[position].entry;
    if (std::memcmp(entries_[known].key.data(), key, kKeyBytes) != 0) return kConflict;
    if (is_dead(known)) {  // what the hash named under a retired namespace counts no more
      drop_hash(state, slot, position);
      position = state.held.kNone;
    }
  }
  if (position == state.held.kNone) {
    const EntryId id = find_or_make(key, namespace_id);
    if (id == kNoEntry) return kFull;
    position = state.held.insert(
        {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32), id, {}});
  }
  return static_cast<std::int64_t>(position);
}

std::size_t Index::find_hash(const SlotState& state, std::uint64_t hash) const {
  return state.held.find(spread_(hash), [hash](const HeldCell& cell) { return cell.hash() == hash; });
}

std::size_t Index::find_predicted(const SlotState& state, EntryId id) const {
  return state.predicted.find(spread_.ours(id), [id](const PredictedCell& cell) { return cell.entry == id; });
}

void Index::raise_copies(SlotState& state, std::uint32_t slot, HeldCell& cell,
                         const std::array<std::uint16_t, kTiers>& least) {
  const std::uint32_t before = holds(cell.entry, slot);
  const std::uint32_t had = holds_of(cell.copies);
  const bool is_new_hash = had == 0;
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    state.tier_counts[tier] += cell.copies[tier] == 0 && least[tier] != 0;
    cell.copies[tier] = std::max(cell.copies[tier], least[tier]);
  }
  const std::uint32_t gained = holds_of(cell.copies) & ~had;
  if (is_new_hash && (before & kResident) != 0) {
    state.aliases.try_emplace(
        cell.entry, Aliases{(before & kDevice) / kDevice, (before & kNear) / kNear, 1});
  }
  if (gained != 0 && !state.aliases.empty()) {
    const auto found = state.aliases.find(cell.entry);
    if (found != state.aliases.end()) {
      found->second.on_device += (gained & kDevice) / kDevice;
      found->second.near += (gained & kNear) / kNear;
      found->second.resident += (gained & kResident) / kResident;
    }
  }
  if ((before | gained) != before) set_holds(cell.entry, slot, before | gained);
}

// -- what another index knows of the same worker -----------------------------------------------------------

Rows Index::export_rows(std::uint32_t slot, std::size_t start, std::size_t max_rows) const {
  const Table<HeldCell>& held = slots_[slot]->held;
  Rows made;
  std::unordered_map<std::uint32_t, std::uint32_t> places;
  std::size_t position = start;
  std::size_t row_count = 0;
  // A table that was emptied is wide still: its empty places are bounded, too.
  const std::size_t end = std::min(held.width(), start + 16 * max_rows);
  for (; position < end && row_count < max_rows; ++position) {
    const HeldCell& cell = held[position];
    if (cell.is_empty()) continue;
    const Entry& entry = entries_[cell.entry];
    const std::uint32_t of = is_dead(cell.entry) ? kNobody : entry.namespace_id;
    const auto [place, is_new] = places.try_emplace(of, static_cast<std::uint32_t>(places.size()));
    if (is_new) made.namespace_ids.push_back(of == kNobody ? -1 : std::int64_t{of});
    made.packed.resize(made.packed.size() + Rows::kBytes);
    std::uint8_t* row = made.packed.data() + row_count++ * Rows::kBytes;
    const std::uint64_t hash = cell.hash();
    std::memcpy(row, &hash, sizeof hash);
    std::memcpy(row + Rows::kKeyAt, entry.key.data(), kKeyBytes);
    std::memcpy(row + Rows::kPlaceAt, &place->second, sizeof place->second);
    std::memcpy(row + Rows::kCopiesAt, cell.copies.data(), sizeof cell.copies);
  }
  made.next = position < held.width() ? static_cast<std::int64_t>(position) : -1;
  return made;
}

/// The caller has checked that each row counts a namespace, and has a copy.
Adopted Index::adopt_rows(std::uint32_t slot, const std::uint8_t* rows, std::size_t count,
                          const std::vector<std::int64_t>& namespace_ids) {
  SlotState& state = *slots_[slot];
  Adopted made{static_cast<std::int64_t>(count), {}};
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint8_t* row = rows + index * Rows::kBytes;
    if (index + kEntryAhead < count) {
      const std::uint8_t* ahead = row + kEntryAhead * Rows::kBytes;
      by_key_.prefetch(prefix_of(ahead + Rows::kKeyAt));
      state.held.prefetch(spread_(hash_at(ahead, 0)));
    }
    const std::uint64_t hash = hash_at(row, 0);
    std::uint32_t place;
    std::memcpy(&place, row + Rows::kPlaceAt, sizeof place);
    if (namespace_ids[place] < 0) {
      if (find_hash(state, hash) == state.held.kNone) made.left_out.push_back(hash);
      continue;
    }
    const auto of = static_cast<std::uint32_t>(namespace_ids[place]);
    const std::int64_t position = find_or_name(state, slot, hash, row + Rows::kKeyAt, of);
    if (position < 0) {
      made.outcome = position;
      return made;
    }
    std::array<std::uint16_t, kTiers> copies;
    std::memcpy(copies.data(), row + Rows::kCopiesAt, sizeof copies);
    raise_copies(state, slot, state.held[static_cast<std::size_t>(position)], copies);
  }
  return made;
}

// -- what goes --------------------------------------------------------------------------------------------

std::size_t Index::remove(std::uint32_t slot, std::size_t tier, const std::uint8_t* hashes,
                          std::size_t count) {
  SlotState& state = *slots_[slot];
  std::size_t known_count = 0;
  for (std::size_t index = 0; index < count; ++index) {
    if (index + kEntryAhead < count) {
      state.held.prefetch(spread_(hash_at(hashes, index + kEntryAhead)));
    }
    const std::size_t position = find_hash(state, hash_at(hashes, index));
    if (position == state.held.kNone || state.held[position].copies[tier] == 0) continue;
    ++known_count;
    if (--state.held[position].copies[tier] == 0) drop_copy(state, slot, position, tier);
  }
  return known_count;
}

/// The last copy of one engine hash in a tier is gone.
void Index::drop_copy(SlotState& state, std::uint32_t slot, std::size_t position, std::size_t tier) {
  const HeldCell cell = state.held[position];
  --state.tier_counts[tier];
  auto copies_before = cell.copies;
  copies_before[tier] = 1;
  std::uint32_t lost = holds_of(copies_before) & ~holds_of(cell.copies);
  if ((lost & kResident) != 0) state.held.erase(position);
  const auto found = state.aliases.find(cell.entry);
  if (found != state.aliases.end()) {
    Aliases& alias = found->second;
    if ((lost & kDevice) != 0 && --alias.on_device != 0) lost &= ~std::uint32_t{kDevice};
    if ((lost & kNear) != 0 && --alias.near != 0) lost &= ~std::uint32_t{kNear};
    if ((lost & kResident) != 0 && --alias.resident == 1) state.aliases.erase(found);
    lost &= ~std::uint32_t{kResident};  // another hash still names the block
  }
  const std::uint32_t before = holds(cell.entry, slot);
  if ((lost & kNear) != 0 && (before & kPredicted) != 0) {  // it came, and went: nothing is on its way
    state.predicted.erase(find_predicted(state, cell.entry));
    lost |= kPredicted;
  }
  if ((before & lost) != 0) set_holds(cell.entry, slot, before & ~lost);
}

/// All copies of one engine hash are gone. Its cell goes with the last of them, not before.
void Index::drop_hash(SlotState& state, std::uint32_t slot, std::size_t position) {
  const auto copies = state.held[position].copies;
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    if (copies[tier] == 0) continue;
    state.held[position].copies[tier] = 0;
    drop_copy(state, slot, position, tier);
  }
}

// -- what we expect ------------------------------------------------------------------------------------------

bool Index::may_predict_until(std::uint32_t slot, double expires_ms) const {
  return expires_ms >= slots_[slot]->last_expires_ms;  // false for NaN
}

void Index::predict(std::uint32_t slot, const Zones& zones, const std::uint8_t* keys, std::size_t count,
                    double expires_ms, std::size_t max_predicted) {
  SlotState& state = *slots_[slot];
  state.last_expires_ms = expires_ms;
  const std::uint32_t batch = state.next_batch++;
  // First the blocks, then that they are expected: what the second walk reads is on its way by then.
  std::uint32_t taken = 0;
  for (std::size_t index = 0; index < std::min(count, kEntryAhead); ++index) {
    by_key_.prefetch(prefix_of(keys + index * kKeyBytes));
  }
  for (std::size_t index = 0; index < count; ++index, ++taken) {
    if (index + kEntryAhead < count) {
      by_key_.prefetch(prefix_of(keys + (index + kEntryAhead) * kKeyBytes));
    }
    const std::uint32_t namespace_id = index < zones.lead_count ? zones.lead : zones.rest;
    const EntryId id = find_or_make(keys + index * kKeyBytes, namespace_id);
    if (id == kNoEntry) break;
    state.queued.items.push_back(id);
  }
  for (std::size_t at = state.queued.items.size() - taken; at < state.queued.items.size(); ++at) {
    const EntryId id = state.queued.items[at];
    Entry& entry = entries_[id];
    if (entry.holders[0] == 0) {  // it is new
      entry.holders = {Entry::kIsLone, slot, batch};
      ++state.lone_count;
      continue;
    }
    if (entry.is_lone_of(slot)) {
      entry.holders[2] = batch;
      continue;
    }
    const std::uint32_t before = holds(id, slot);
    if ((before & kPredicted) != 0) {
      state.predicted[find_predicted(state, id)].batch = batch;
    } else {
      state.predicted.insert({id, batch});
      set_holds(id, slot, before | kPredicted);
    }
  }
  if (taken > 0) state.batches.items.push_back({expires_ms, batch, taken});
  while (state.predicted_count() > max_predicted) expire_oldest(slot, state);
  if (state.queued.size() > 2 * state.predicted_count() + kQueueSlack) drop_stale_queued(slot, state);
}

void Index::unpredict(std::uint32_t slot, const std::uint8_t* keys, std::size_t count) {
  SlotState& state = *slots_[slot];
  for (std::size_t index = 0; index < count; ++index) {
    const std::size_t key_position = find_key(keys + index * kKeyBytes);
    if (key_position == by_key_.kNone) continue;
    const EntryId id = by_key_[key_position].entry;
    if ((holds(id, slot) & kPredicted) != 0) forget_prediction(slot, state, id);
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
  const EntryId* const ids = state.queued.items.data() + state.queued.front;
  for (std::size_t index = 0; index < batch.count; ++index) {
    if (index % kExpiredTogether == 0) {
      prepare_to_forget(ids + index, std::min(batch.count - index, kExpiredTogether));
    }
    if (is_predicted_by(slot, state, ids[index], batch.number)) forget_prediction(slot, state, ids[index]);
  }
  state.queued.pop(batch.count);
  state.batches.pop(1);
}

/// Sets in motion what it takes to drop the predictions of these entries, in the order of need.
void Index::prepare_to_forget(const EntryId* ids, std::size_t count) {
  for (std::size_t index = 0; index < count; ++index) {
    prefetch(entries_[ids[index]]);
    __builtin_prefetch(&entries_.link(ids[index]));
  }
  for (std::size_t index = 0; index < count; ++index) {
    by_key_.prefetch(prefix_of(entries_[ids[index]].key.data()));
  }
}

/// Whether a block that a batch named is expected because of it still: a later one may have named it since, and
/// its id may have been freed and taken again.
bool Index::is_predicted_by(std::uint32_t slot, const SlotState& state, EntryId id, std::uint32_t batch) const {
  const Entry& entry = entries_[id];
  if (entry.is_lone()) return entry.is_lone_of(slot) && entry.holders[2] == batch;
  const std::size_t position = find_predicted(state, id);
  return position != state.predicted.kNone && state.predicted[position].batch == batch;
}

/// The slot expects the block no more, as it did.
void Index::forget_prediction(std::uint32_t slot, SlotState& state, EntryId id) {
  if (entries_[id].is_lone()) {
    --state.lone_count;
    forget(id);
  } else {
    state.predicted.erase(find_predicted(state, id));
    set_holds(id, slot, holds(id, slot) & ~std::uint32_t{kPredicted});
  }
}

/// Keeps the queue in proportion to what is expected, however often the same blocks are predicted anew.
void Index::drop_stale_queued(std::uint32_t slot, SlotState& state) {
  Fifo<Batch> batches;
  Fifo<EntryId> queued;
  std::size_t next = state.queued.front;
  for (std::size_t index = state.batches.front; index < state.batches.items.size(); ++index) {
    Batch batch = state.batches.items[index];
    const std::size_t end = next + batch.count;
    batch.count = 0;
    for (; next < end; ++next) {
      const EntryId id = state.queued.items[next];
      if (!is_predicted_by(slot, state, id, batch.number)) continue;
      queued.items.push_back(id);
      ++batch.count;
    }
    if (batch.count > 0) batches.items.push_back(batch);
  }
  state.batches = std::move(batches);
  state.queued = std::move(queued);
}

// -- lookups ---------------------------------------------------------------------------------------------------

bool Index::knows(const std::uint8_t* key) const {
  const std::size_t position = find_key(key);
  return position != by_key_.kNone && !is_dead(by_key_[position].entry);
}

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

  Walk walk{keys, count, 0, {}};
  look_ahead(walk, 0);
  EntryId id = kNoEntry;
  for (std::size_t depth = 0; depth < count && !alive_.empty(); ++depth) {
    id = step(walk, depth, id);
    const bool is_missing = id == kNoEntry || (retiring_.size() > 0 && is_dead(id));
    match_block(is_missing ? nullptr : &entries_[id], static_cast<std::uint32_t>(depth));
  }
  match_block(nullptr, static_cast<std::uint32_t>(count));
  return depths_;
}

/// The entry of the block at `depth`; `previous` is the one before it.
EntryId Index::step(Walk& walk, std::size_t depth, EntryId previous) {
  const std::uint8_t* key = walk.keys + depth * kKeyBytes;
  if (walk.streak >= kLongStreak) {
    if (entries_.is_followed_by(previous, key)) {
      entries_.prefetch_after(previous);
      return previous + 1;
    }
    look_ahead(walk, depth);
  }
  EntryId id = walk.guesses[depth % kEntryAhead];
  if (depth + kCellAhead < walk.count) by_key_.prefetch(prefix_of(key + kCellAhead * kKeyBytes));
  if (depth + kEntryAhead < walk.count) {
    walk.guesses[depth % kEntryAhead] = guess(key + kEntryAhead * kKeyBytes);
  }
  if (id != kNoEntry && std::memcmp(entries_[id].key.data(), key, kKeyBytes) != 0) {
    const std::size_t position = find_key(key);
    id = position == by_key_.kNone ? kNoEntry : by_key_[position].entry;
  }
  const bool is_neighbour = previous != kNoEntry && id == previous + 1;
  walk.streak = is_neighbour ? walk.streak + 1 : 0;
  return id;
}

/// Sets memory in motion for the blocks from `depth` on.
void Index::look_ahead(Walk& walk, std::size_t depth) const {
  for (std::size_t at = depth; at < std::min(walk.count, depth + kCellAhead); ++at) {
    by_key_.prefetch(prefix_of(walk.keys + at * kKeyBytes));
  }
  for (std::size_t at = depth; at < std::min(walk.count, depth + kEntryAhead); ++at) {
    walk.guesses[at % kEntryAhead] = guess(walk.keys + at * kKeyBytes);
  }
}

/// The first entry whose key begins alike: almost surely the right one, and on its way from memory now.
EntryId Index::guess(const std::uint8_t* key) const {
  const std::uint32_t prefix = prefix_of(key);
  const std::size_t position =
      by_key_.find(prefix, [prefix](const KeyCell& cell) { return cell.prefix == prefix; });
  if (position == by_key_.kNone) return kNoEntry;
  const EntryId id = by_key_[position].entry;
  prefetch(entries_[id]);
  return id;
}

/// Ends the runs of the slots that lack the block at `depth`; `entry` is null where nobody has it.
void Index::match_block(const Entry* entry, std::uint32_t depth) {
  std::size_t kept = 0;
  for (AliveWord alive : alive_) {
    std::uint64_t masks[kHolds] = {0, 0, 0, 0};
    if (entry != nullptr && entry->has_row()) {
      std::memcpy(masks, rows_.masks(entry->holders[1], alive.word), sizeof masks);
    } else if (entry != nullptr && entry->is_lone()) {
      const std::uint32_t slot = entry->holders[1];
      if (slot / 64 == alive.word) masks[kPredictedMask] = std::uint64_t{1} << (slot % 64);
    } else if (entry != nullptr) {
      for (const std::uint32_t holder : entry->holders) {
        const std::uint32_t slot = holder >> kHolderShift;
        if (holder == 0 || slot / 64 != alive.word) continue;
        for (std::size_t hold = 0; hold < kHolds; ++hold) {
          masks[hold] |= std::uint64_t{holder >> hold & 1} << (slot % 64);
        }
      }
    }
    const std::uint64_t expected = masks[kNearMask] | masks[kPredictedMask];
    end_runs(depths_.device, alive.device, masks[kDeviceMask], alive.word, depth);
    end_runs(depths_.resident, alive.resident, masks[kResidentMask], alive.word, depth);
    end_runs(depths_.expected, alive.expected, expected, alive.word, depth);
    if ((alive.resident | alive.expected) != 0) alive_[kept++] = alive;  // device is a subset
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
  slots_[slot]->held.each([&](const HeldCell& cell) {
    if (!is_dead(cell.entry)) keys.push_back(entries_[cell.entry].key);
  });
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

}  // namespace trunkline
