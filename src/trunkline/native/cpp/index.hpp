// Block key -> which slots hold it, in which tier, or are expected to soon. `_fallback.py` beside this folder
// is the contract; this twin answers the same, in less time and memory. Knows no Python.
//
//   by_key_: key -> entry      entries_: key, namespace, who holds it      slots_[s]: engine hash -> entry
//   namespaces_: secrets, and a list through the links of its entries, newest first
//
// Who holds an entry: one slot that expects it and no more, up to three holder words inside it, or one row of
// bit masks over all slots.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#include "blake2b.hpp"
#include "table.hpp"

namespace trunkline {

inline constexpr std::int64_t kUnknownParent = -1;
inline constexpr std::int64_t kFull = -2;
inline constexpr std::int64_t kConflict = -3;
inline constexpr std::int64_t kRetired = -4;

inline constexpr std::size_t kTiers = 4;
inline constexpr std::size_t kEntryAhead = 8;  // blocks between finding an entry and reading it
inline constexpr std::size_t kMostSlots = 65'535;
inline constexpr std::uint16_t kMostCopies = 65'535;

/// How a slot holds a block; a holder has at least one of these. Near: on the device or in host memory.
enum Hold : std::uint32_t { kDevice = 1, kNear = 2, kResident = 4, kPredicted = 8, kAllHolds = 15 };
inline constexpr std::size_t kHolds = 4;
inline constexpr std::uint32_t kHolderShift = 4;

using EntryId = std::uint32_t;
inline constexpr EntryId kNoEntry = std::numeric_limits<EntryId>::max();

/// In place of a namespace: the block's own was retired. No key leads to it any more; it stays while a slot's
/// engine hashes name it, so that what is chained after them is told from an orphan.
inline constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();

struct Entry {
  std::array<std::uint8_t, kKeyBytes> key;
  std::uint32_t namespace_id;
  /// `slot << 4 | Hold bits`, packed to the front, 0 = free; or {kIsRow, row number, 0}; or {kIsLone, slot, batch}:
  /// one slot expects it, and that is all. Most of what is expected goes as it came, and costs no more than this.
  std::array<std::uint32_t, 3> holders;

  static constexpr std::uint32_t kIsRow = 1u << 31;
  static constexpr std::uint32_t kIsLone = 1u << 30;
  bool has_row() const { return holders[0] == kIsRow; }
  bool is_lone() const { return holders[0] == kIsLone; }
  bool is_lone_of(std::uint32_t slot) const { return is_lone() && holders[1] == slot; }
};
static_assert(sizeof(Entry) == 48);

/// Neighbours in the list of all blocks of one namespace. Beside the entries: only whoever makes or forgets a
/// block reads them, and a lookup must not.
struct Link {
  EntryId newer, older;
};

/// Entries in chunks: they never move, and freed ones are taken again, newest first. Small chunks first, so
/// that a small index is small; then chunks of whole huge pages.
class EntryPool {
 public:
  EntryPool() = default;
  EntryPool(const EntryPool&) = delete;
  EntryPool& operator=(const EntryPool&) = delete;
  ~EntryPool();

  EntryId take();
  void give_back(EntryId id);
  Entry& operator[](EntryId id) { return *place(id); }
  const Entry& operator[](EntryId id) const { return *place(id); }
  Link& link(EntryId id) {
    return id < kLarge ? small_links_[id / kSmall][id % kSmall] : large_links_[id / kLarge - 1][id % kLarge];
  }
  std::size_t size() const { return used_; }
  /// Whether the entry right after `id` has this key and may be matched. Blocks that came together lie together.
  bool is_followed_by(EntryId id, const std::uint8_t* key) const {
    if (id == kNoEntry || std::size_t{id} + 1 >= made_) return false;
    const Entry* next = place(id + 1);
    return next->holders[0] != 0 && next->namespace_id != kNobody &&
           std::memcmp(next->key.data(), key, kKeyBytes) == 0;
  }
  void prefetch_after(EntryId id) const {
    if (std::size_t{id} + kStride < made_) __builtin_prefetch(place(id + kStride));
  }
  std::size_t allocated_bytes() const {
    return (small_.size() * kSmall + large_.size() * kLarge) * (sizeof(Entry) + sizeof(Link)) +
           (small_.capacity() + large_.capacity()) * 2 * sizeof(Entry*);
  }

 private:
  static constexpr std::size_t kStride = 16;  // entries that the walk along neighbours reads ahead
  static constexpr std::size_t kSmall = 1024;
  static constexpr std::size_t kLarge = 128 * kSmall;
  static_assert(kLarge * sizeof(Entry) % kHugePageBytes == 0);

  Entry* place(EntryId id) const {
    return id < kLarge ? &small_[id / kSmall][id % kSmall] : &large_[id / kLarge - 1][id % kLarge];
  }

  std::vector<Entry*> small_, large_;
  std::vector<Link*> small_links_, large_links_;
  std::size_t made_ = 0;
  std::size_t used_ = 0;
  EntryId free_ = kNoEntry;  // a list through `namespace_id`
};

/// Bit masks over slots, one for each hold, for each block that many slots hold. The four masks of one word
/// of slots lie side by side.
class MaskRows {
 public:
  std::uint32_t take();
  void give_back(std::uint32_t row);
  /// Four masks over the slots `64 * word` and up, for the holds in their order.
  std::uint64_t* masks(std::uint32_t row, std::size_t word) {
    return bits_.data() + (std::size_t{row} * words_ + word) * kHolds;
  }
  const std::uint64_t* masks(std::uint32_t row, std::size_t word) const {
    return bits_.data() + (std::size_t{row} * words_ + word) * kHolds;
  }
  std::size_t words() const { return words_; }
  void widen(std::size_t slot_count);
  std::size_t allocated_bytes() const { return (bits_.capacity() + free_.capacity() / 2) * 8; }

 private:
  std::size_t words_ = 1;
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> free_;
};

struct KeyCell {
  static constexpr std::size_t kFilledOfTen = 8;
  std::uint32_t prefix;  // first four bytes of the key, which is uniformly random
  EntryId entry;
  std::uint32_t order(const Spread&) const { return prefix; }
  bool is_empty() const { return entry == kNoEntry; }
  static KeyCell empty() { return {0, kNoEntry}; }
};

struct HeldCell {
  static constexpr std::size_t kFilledOfTen = 8;
  std::uint32_t hash_low, hash_high;  // halves, so that a cell has 20 bytes and not 24
  EntryId entry;
  std::array<std::uint16_t, kTiers> copies;
  std::uint64_t hash() const { return std::uint64_t{hash_high} << 32 | hash_low; }
  std::uint32_t order(const Spread& spread) const { return spread(hash()); }
  bool is_empty() const { return entry == kNoEntry; }
  static HeldCell empty() { return {0, 0, kNoEntry, {}}; }
};
static_assert(sizeof(HeldCell) == 20);

struct PredictedCell {
  static constexpr std::size_t kFilledOfTen = 5;  // they come and go in seconds: time counts, not room
  EntryId entry;
  std::uint32_t batch;
  std::uint32_t order(const Spread& spread) const { return spread.ours(entry); }
  bool is_empty() const { return entry == kNoEntry; }
  static PredictedCell empty() { return {kNoEntry, 0}; }
};

/// One `predict` call: `count` entry ids of the slot's `queued` belong to it.
struct Batch {
  double expires_ms;
  std::uint32_t number;
  std::uint32_t count;
};

/// A vector that is taken from at the front; space before the front is given up when it is half of all.
template <class T>
struct Fifo {
  std::vector<T> items;
  std::size_t front = 0;

  std::size_t size() const { return items.size() - front; }
  void pop(std::size_t count) {
    front += count;
    if (front * 2 < items.size()) return;
    items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(front));
    front = 0;
  }
  std::size_t allocated_bytes() const { return items.capacity() * sizeof(T); }
};

/// Several engine hashes of one slot that name one block (an engine may key on more than we do).
struct Aliases {
  std::uint32_t on_device, near, resident;  // how many of the hashes; the last is all of them
};

struct SlotState {
  explicit SlotState(const Spread& spread) : held(spread), predicted(spread) {}

  Table<HeldCell> held;
  std::array<std::size_t, kTiers> tier_counts{};  // of `held`, those with a copy in a tier
  Table<PredictedCell> predicted;  // but for lone blocks, which bear their batch themselves
  std::size_t lone_count = 0;
  std::unordered_map<EntryId, Aliases> aliases;  // only blocks with two hashes or more
  Fifo<Batch> batches;
  Fifo<EntryId> queued;
  double last_expires_ms = -std::numeric_limits<double>::infinity();
  std::uint32_t next_batch = 0;

  std::size_t predicted_count() const { return predicted.size() + lone_count; }
  std::size_t allocated_bytes() const;
};

/// What a slot holds, row by row as `_rows.py` has it, and the namespaces that the rows count.
struct Rows {
  static constexpr std::size_t kBytes = 52;
  static constexpr std::size_t kKeyAt = 8, kPlaceAt = 40, kCopiesAt = 44;
  std::vector<std::uint8_t> packed;
  std::vector<std::int64_t> namespace_ids;
  std::int64_t next = -1;
};

/// What became of rows that were handed in.
struct Adopted {
  std::int64_t outcome;
  std::vector<std::uint64_t> left_out;
};

/// Leading blocks of a chain for every slot.
struct Depths {
  std::vector<std::uint32_t> device, resident, expected;
};

class Index {
 public:
  Index(std::size_t max_blocks, std::uint64_t seed)
      : max_blocks_(max_blocks), spread_(seed), by_key_(spread_) {}
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  std::size_t add_namespace(const std::uint8_t* key, const std::uint8_t* root);
  bool is_namespace(std::int64_t id) const;
  void retire_namespace(std::uint32_t id);
  std::size_t sweep(std::size_t max_blocks);

  bool is_slot(std::int64_t slot) const;
  bool can_add_slot() const { return !free_slots_.empty() || slots_.size() < kMostSlots; }
  std::uint32_t add_slot();
  void drop_slot(std::uint32_t slot);
  std::size_t clear_slot(std::uint32_t slot);

  std::int64_t store(std::uint32_t slot, std::size_t tier, std::int64_t namespace_id,
                     std::uint64_t parent, bool is_zone, const std::uint8_t* hashes, std::size_t count,
                     const std::uint8_t* tokens, std::uint32_t block_tokens);
  std::size_t remove(std::uint32_t slot, std::size_t tier, const std::uint8_t* hashes,
                     std::size_t count);

  Rows export_rows(std::uint32_t slot, std::size_t start, std::size_t max_rows) const;
  Adopted adopt_rows(std::uint32_t slot, const std::uint8_t* rows, std::size_t count,
                     const std::vector<std::int64_t>& namespace_ids);

  /// Whose blocks a chain's keys are: the first `lead_count` are of `lead`, the rest of `rest`.
  struct Zones {
    std::uint32_t rest, lead;
    std::size_t lead_count;
  };
  bool may_predict_until(std::uint32_t slot, double expires_ms) const;
  void predict(std::uint32_t slot, const Zones& zones, const std::uint8_t* keys, std::size_t count,
               double expires_ms, std::size_t max_predicted);
  void unpredict(std::uint32_t slot, const std::uint8_t* keys, std::size_t count);
  void expire(double now_ms);

  bool knows(const std::uint8_t* key) const;
  const Depths& match(const std::uint8_t* keys, std::size_t count);

  /// The distinct keys of a slot, sorted and packed.
  std::vector<std::array<std::uint8_t, kKeyBytes>> held(std::uint32_t slot) const;
  std::size_t held_count(std::uint32_t slot) const { return slots_[slot]->held.size(); }
  const std::array<std::size_t, kTiers>& tier_counts(std::uint32_t slot) const {
    return slots_[slot]->tier_counts;
  }
  std::size_t predicted_count(std::uint32_t slot) const { return slots_[slot]->predicted_count(); }
  std::size_t block_count() const { return entries_.size(); }
  std::size_t allocated_bytes() const;

 private:
  struct Namespace {
    std::array<std::uint8_t, kKeyBytes> key, root;
    EntryId newest = kNoEntry;  // head of the list of its entries
    bool is_retired = false;
  };

  std::size_t find_key(const std::uint8_t* key) const;
  std::size_t find_entry(EntryId id) const;
  bool is_of(const KeyCell& cell, std::uint32_t prefix, const std::uint8_t* key) const {
    return cell.prefix == prefix && std::memcmp(entries_[cell.entry].key.data(), key, kKeyBytes) == 0;
  }
  EntryId find_or_make(const std::uint8_t* key, std::uint32_t namespace_id);
  std::uint32_t holds(EntryId id, std::uint32_t slot) const;
  void set_holds(EntryId id, std::uint32_t slot, std::uint32_t holds);
  void set_inline(EntryId id, std::uint32_t slot, std::uint32_t holds);
  void set_in_row(EntryId id, std::uint32_t slot, std::uint32_t holds);
  void move_to_row(Entry& entry);
  void move_from_lone(EntryId id);
  void move_inline(Entry& entry);
  void forget(EntryId id);
  void enlist(EntryId id);
  void delist(EntryId id);
  void bury(EntryId id);
  bool is_dead(EntryId id) const {
    const std::uint32_t of = entries_[id].namespace_id;
    return of == kNobody || namespaces_[of].is_retired;
  }

  std::size_t find_hash(const SlotState& state, std::uint64_t hash) const;
  std::size_t find_predicted(const SlotState& state, EntryId id) const;
  std::int64_t find_or_name(SlotState& state, std::uint32_t slot, std::uint64_t hash, const std::uint8_t* key,
                            std::uint32_t namespace_id);
  void raise_copies(SlotState& state, std::uint32_t slot, HeldCell& cell,
                    const std::array<std::uint16_t, kTiers>& least);
  void drop_copy(SlotState& state, std::uint32_t slot, std::size_t position, std::size_t tier);
  void drop_hash(SlotState& state, std::uint32_t slot, std::size_t position);
  void expire_oldest(std::uint32_t slot, SlotState& state);
  void prepare_to_forget(const EntryId* ids, std::size_t count);
  bool is_predicted_by(std::uint32_t slot, const SlotState& state, EntryId id, std::uint32_t batch) const;
  void forget_prediction(std::uint32_t slot, SlotState& state, EntryId id);
  void drop_stale_queued(std::uint32_t slot, SlotState& state);

  /// A walk along one chain. Finding an entry takes two accesses to memory, so both are begun some blocks
  /// ahead; along entries that lie side by side neither is needed.
  struct Walk {
    const std::uint8_t* keys;
    std::size_t count;
    std::size_t streak;
    std::array<EntryId, kEntryAhead> guesses;
  };
  EntryId step(Walk& walk, std::size_t depth, EntryId previous);
  void look_ahead(Walk& walk, std::size_t depth) const;
  EntryId guess(const std::uint8_t* key) const;
  void match_block(const Entry* entry, std::uint32_t depth);
  void end_runs(std::vector<std::uint32_t>& depths, std::uint64_t& alive, std::uint64_t held,
                std::size_t word, std::uint32_t depth) const;

  std::size_t max_blocks_;
  Spread spread_;
  std::vector<Namespace> namespaces_;
  std::vector<std::uint32_t> free_namespaces_;
  Fifo<std::uint32_t> retiring_;  // retired, and not all of their blocks swept yet
  EntryPool entries_;
  Table<KeyCell> by_key_;
  MaskRows rows_;
  std::vector<std::unique_ptr<SlotState>> slots_;
  std::vector<std::uint32_t> free_slots_;  // a heap, lowest first
  std::vector<std::uint8_t> chained_;      // scratch of `store`
  std::vector<std::uint32_t> expecting_;   // scratch of `bury`

  // Scratch of `match`: for words of slots where a run is still unbroken, who is alive in each view.
  struct AliveWord {
    std::size_t word;
    std::uint64_t device, resident, expected;
  };
  std::vector<AliveWord> alive_;
  Depths depths_;
};

}  // namespace trunkline
