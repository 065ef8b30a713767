// A hash table of plain cells: linear probing, deletion by shifting back (no tombstones, so that churn
// with a constant live set neither grows nor slows it), and growth by 1.4 to keep slack small.
// Read index.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pages.hpp"

namespace trunkline {

/// Spreads numbers that are not random by themselves (an engine may count its hashes up from 1), by secrets:
/// who does not know the seed cannot choose numbers that fall together.
class Spread {
 public:
  explicit Spread(std::uint64_t seed) {
    for (std::uint64_t& secret : secrets_) {
      seed += 0x9e3779b97f4a7c15;
      std::uint64_t mixed = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9;
      mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
      secret = (mixed ^ mixed >> 31) | 1;
    }
  }

  std::uint32_t operator()(std::uint64_t value) const {
    const std::uint64_t once = folded(value ^ secrets_[0], secrets_[1]);
    return static_cast<std::uint32_t>(folded(once ^ secrets_[2], secrets_[3]) >> 32);
  }

  /// The same in one step, for numbers that we gave ourselves: nobody chose them.
  std::uint32_t ours(std::uint32_t value) const {
    return static_cast<std::uint32_t>(value * secrets_[0] >> 32);
  }

 private:
  __extension__ using Wide = unsigned __int128;

  static std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
    const Wide product = Wide{a} * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }

  std::uint64_t secrets_[4];
};

/// Where a cell lies, or would.
struct Found {
  std::size_t position;
  bool is_there;
};

/// `Cell` is trivially copyable and has `std::uint32_t order(const Spread&) const` (a uniform hash, always the
/// same for the cell's lifetime), `bool is_empty() const`, `static Cell empty()` and `kFilledOfTen`: of ten
/// places in the table, how many are filled before it grows.
template <class Cell>
class Table {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  explicit Table(const Spread& spread) : spread_(&spread) {}

  std::size_t size() const { return size_; }
  /// Positions are below it.
  std::size_t width() const { return cells_.size(); }
  std::size_t allocated_bytes() const { return rounded_bytes(cells_.capacity() * sizeof(Cell)); }
  Cell& operator[](std::size_t position) { return cells_[position]; }
  const Cell& operator[](std::size_t position) const { return cells_[position]; }

  /// Where the cell with this order that `is_wanted` accepts lies, or `kNone`.
  template <class Predicate>
  std::size_t find(std::uint32_t order, Predicate is_wanted) const {
    if (size_ == 0) return kNone;
    for (std::size_t position = home(order);; position = after(position)) {
      const Cell& cell = cells_[position];
      if (cell.is_empty()) return kNone;
      if (is_wanted(cell)) return position;
    }
  }

  /// Puts in a cell that is not there yet; where it lies until the next insertion or removal.
  std::size_t insert(const Cell& cell) {
    if (is_full()) grow();
    ++size_;
    return place(cell);
  }

  /// As `find`; where it does not lie there, the hole for `fill`.
  template <class Predicate>
  Found find_or_hole(std::uint32_t order, Predicate is_wanted) const {
    if (cells_.empty()) return {kNone, false};
    for (std::size_t position = home(order);; position = after(position)) {
      const Cell& cell = cells_[position];
      if (cell.is_empty()) return {position, false};
      if (is_wanted(cell)) return {position, true};
    }
  }

  /// `insert` at a hole that was found for this very cell, and nothing came or went since.
  void fill(std::size_t hole, const Cell& cell) {
    if (is_full()) {
      insert(cell);
    } else {
      ++size_;
      cells_[hole] = cell;
    }
  }

  void erase(std::size_t hole) {
    std::size_t gap = 1;  // from the hole to the cell that is looked at
    for (std::size_t position = after(hole);; position = after(position), ++gap) {
      const Cell cell = cells_[position];
      if (cell.is_empty()) break;
      // A cell may move back to the hole when its home does not lie behind the hole.
      if (distance(home(cell.order(*spread_)), position) >= gap) {
        cells_[hole] = cell;
        hole = position;
        gap = 0;
      }
    }
    cells_[hole] = Cell::empty();
    --size_;
  }

  void prefetch(std::uint32_t order) const {
    if (size_ != 0) __builtin_prefetch(&cells_[home(order)]);
  }

  template <class Visitor>
  void each(Visitor visit) const {
    for (const Cell& cell : cells_) {
      if (!cell.is_empty()) visit(cell);
    }
  }

 private:
  static constexpr std::size_t kLeastCells = 16;

  bool is_full() const { return (size_ + 1) * 10 > cells_.size() * Cell::kFilledOfTen; }

  // Monotone in `order`, so that growing walks both arrays once, front to back.
  std::size_t home(std::uint32_t order) const {
    return static_cast<std::size_t>((std::uint64_t{order} * cells_.size()) >> 32);
  }
  std::size_t after(std::size_t position) const {
    return position + 1 == cells_.size() ? 0 : position + 1;
  }
  std::size_t distance(std::size_t from, std::size_t to) const {
    return to >= from ? to - from : to + cells_.size() - from;
  }

  std::size_t place(const Cell& cell) {
    std::size_t position = home(cell.order(*spread_));
    while (!cells_[position].is_empty()) position = after(position);
    cells_[position] = cell;
    return position;
  }

  void grow() {
    const std::size_t wanted = cells_.size() + cells_.size() * 2 / 5;
    std::vector<Cell, PageAllocator<Cell>> old(wanted < kLeastCells ? kLeastCells : wanted, Cell::empty());
    old.swap(cells_);
    for (const Cell& cell : old) {
      if (!cell.is_empty()) place(cell);
    }
  }

  const Spread* spread_;
  std::vector<Cell, PageAllocator<Cell>> cells_;
  std::size_t size_ = 0;
};

}  // namespace trunkline
