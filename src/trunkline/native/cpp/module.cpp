// The Python face of the native core. Every argument is checked here, so that nothing behind can read past
// a buffer; results and errors equal those of `_fallback.py`, whose docstrings describe both.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "blake2b.hpp"
#include "head.hpp"
#include "index.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trunkline {
namespace {

constexpr std::int64_t kMostBlockTokens = 65'536;

/// A contiguous view on unsigned items of one size: an `array`, or raw bytes of them.
class Items {
 public:
  Items(nb::handle source, std::size_t item_bytes, const char* name) : item_bytes_(item_bytes) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();
      refuse(name);
    }
    if (!is_fitting()) {
      PyBuffer_Release(&view_);
      refuse(name);
    }
  }
  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;
  ~Items() { PyBuffer_Release(&view_); }

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t count() const { return static_cast<std::size_t>(view_.len) / item_bytes_; }

 private:
  [[noreturn]] void refuse(const char* name) const {
    const std::string text = std::string(name) + " must be a contiguous buffer of unsigned " +
                             std::to_string(item_bytes_ * 8) + "-bit items";
    throw nb::value_error(text.c_str());
  }

  bool is_fitting() const {
    std::string format = view_.format == nullptr ? "B" : view_.format;
    if (format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == '<')) {
      format.erase(0, 1);
    }
    const auto item_bytes = static_cast<std::size_t>(view_.itemsize);
    if (format == "B") return static_cast<std::size_t>(view_.len) % item_bytes_ == 0;
    return (format == "I" || format == "L" || format == "Q") && item_bytes == item_bytes_;
  }

  Py_buffer view_;
  std::size_t item_bytes_;
};

const std::uint8_t* bytes_of(const nb::bytes& value) {
  return reinterpret_cast<const std::uint8_t*>(value.c_str());
}

const std::uint8_t* secret_of(const nb::bytes& value) {
  if (value.size() != kKeyBytes) throw nb::value_error("a chain key and its root have 32 bytes each");
  return bytes_of(value);
}

std::uint32_t checked_block_tokens(std::int64_t block_tokens) {
  if (block_tokens < 1 || block_tokens > kMostBlockTokens) {
    const std::string text =
        "block_tokens is " + std::to_string(block_tokens) + ", allowed are 1 to 65536";
    throw nb::value_error(text.c_str());
  }
  return static_cast<std::uint32_t>(block_tokens);
}

/// The blank result's bytes are written by the caller before anyone else can see it.
nb::bytes blank_bytes(std::size_t size) {
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(made);
}

std::uint8_t* writable(nb::bytes& fresh) {
  return reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(fresh.ptr()));
}

nb::bytes chain(const nb::bytes& key, const nb::bytes& root, nb::handle tokens,
                std::int64_t block_tokens, const nb::bytes& extra) {
  const Items ids(tokens, sizeof(std::uint32_t), "tokens");
  const std::uint32_t size = checked_block_tokens(block_tokens);
  const std::uint8_t* secret = secret_of(key);
  const std::uint8_t* start = secret_of(root);
  const std::size_t block_count = ids.count() / size;
  nb::bytes packed = blank_bytes(block_count * kKeyBytes);
  chain_keys(secret, start, ids.data(), block_count, size, bytes_of(extra),
             static_cast<std::uint32_t>(extra.size()), writable(packed));
  return packed;
}

nb::list list_of(const std::vector<std::uint32_t>& values) {
  PyObject* made = PyList_New(static_cast<Py_ssize_t>(values.size()));
  if (made == nullptr) throw nb::python_error();
  nb::list list = nb::steal<nb::list>(made);
  for (std::size_t index = 0; index < values.size(); ++index) {
    PyObject* value = PyLong_FromUnsignedLong(values[index]);
    if (value == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(index), value);
  }
  return list;
}

/// `Index` behind checks.
class BlockIndex {
 public:
  BlockIndex(std::int64_t max_blocks, const nb::int_& seed)
      : index_(checked_max_blocks(max_blocks), u64_of(seed, "a seed")) {}
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  std::size_t add_namespace(const nb::bytes& key, const nb::bytes& root) {
    return index_.add_namespace(secret_of(key), secret_of(root));
  }

  std::uint32_t add_slot() {
    if (!index_.can_add_slot()) throw nb::value_error("all 65535 slots are in use");
    return index_.add_slot();
  }
  void drop_slot(std::int64_t slot) { index_.drop_slot(checked(slot)); }
  std::size_t clear_slot(std::int64_t slot) { return index_.clear_slot(checked(slot)); }

  void retire_namespace(std::int64_t namespace_id) {
    index_.retire_namespace(checked_namespace(namespace_id));
  }

  std::size_t sweep(std::int64_t max_blocks) {
    if (max_blocks < 0) throw nb::value_error("max_blocks is negative");
    return index_.sweep(static_cast<std::size_t>(max_blocks));
  }

  std::int64_t store(std::int64_t slot, std::int64_t tier, std::int64_t namespace_id,
                     const nb::int_& parent, nb::handle hashes, nb::handle tokens,
                     std::int64_t block_tokens, bool is_zone) {
    const std::uint32_t checked_slot = checked(slot);
    const Items names(hashes, sizeof(std::uint64_t), "hashes");
    const Items ids(tokens, sizeof(std::uint32_t), "tokens");
    const std::uint32_t size = checked_block_tokens(block_tokens);
    if (ids.count() != names.count() * size) {
      throw nb::value_error("tokens do not fill the blocks of the run");
    }
    if (namespace_id != -1) checked_namespace(namespace_id);
    return index_.store(checked_slot, checked_tier(tier), namespace_id, u64_of(parent, "an engine hash"),
                        is_zone, names.data(), names.count(), ids.data(), size);
  }

  std::size_t remove(std::int64_t slot, std::int64_t tier, nb::handle hashes) {
    const std::uint32_t checked_slot = checked(slot);
    const Items names(hashes, sizeof(std::uint64_t), "hashes");
    return index_.remove(checked_slot, checked_tier(tier), names.data(), names.count());
  }

  nb::tuple export_rows(std::int64_t slot, std::int64_t start, std::int64_t max_rows) const {
    const std::uint32_t checked_slot = checked(slot);
    if (start < 0 || max_rows < 1 || max_rows > std::int64_t{1} << 31) {
      throw nb::value_error("rows are asked for from 0 on, and at least one");
    }
    const Rows rows = index_.export_rows(checked_slot, static_cast<std::size_t>(start),
                                         static_cast<std::size_t>(max_rows));
    nb::list ids;
    for (const std::int64_t id : rows.namespace_ids) ids.append(id);
    return nb::make_tuple(rows.next, nb::bytes(rows.packed.data(), rows.packed.size()), ids);
  }

  nb::tuple adopt_rows(std::int64_t slot, const nb::bytes& rows, const std::vector<std::int64_t>& namespace_ids) {
    const std::uint32_t checked_slot = checked(slot);
    for (const std::int64_t id : namespace_ids) {
      if (id != -1) checked_namespace(id);
    }
    const std::size_t count = checked_row_count(rows, namespace_ids.size());
    const Adopted made = index_.adopt_rows(checked_slot, bytes_of(rows), count, namespace_ids);
    return nb::make_tuple(made.outcome,
                          nb::bytes(made.left_out.data(), made.left_out.size() * sizeof(std::uint64_t)));
  }

  void predict(std::int64_t slot, std::int64_t namespace_id, const nb::bytes& packed,
               double expires_ms, std::int64_t max_predicted, std::int64_t lead_id,
               std::int64_t lead_count) {
    const std::uint32_t checked_slot = checked(slot);
    const std::size_t count = checked_key_count(packed);
    if (max_predicted < 0) throw nb::value_error("max_predicted is negative");
    if (lead_count < 0 || static_cast<std::size_t>(lead_count) > count) {
      throw nb::value_error("lead_count is outside the chain");
    }
    if (!index_.may_predict_until(checked_slot, expires_ms)) {
      throw nb::value_error("predictions of one slot must expire in the order they are made");
    }
    const std::uint32_t rest = checked_namespace(namespace_id);
    const std::uint32_t lead = lead_count > 0 ? checked_namespace(lead_id) : rest;
    index_.predict(checked_slot, {rest, lead, static_cast<std::size_t>(lead_count)}, bytes_of(packed),
                   count, expires_ms, static_cast<std::size_t>(max_predicted));
  }

  bool knows(const nb::bytes& key) const {
    if (key.size() != kKeyBytes) {
      const std::string text = "a key has 32 bytes, not " + std::to_string(key.size());
      throw nb::value_error(text.c_str());
    }
    return index_.knows(bytes_of(key));
  }

  void unpredict(std::int64_t slot, const nb::bytes& packed) {
    const std::uint32_t checked_slot = checked(slot);
    index_.unpredict(checked_slot, bytes_of(packed), checked_key_count(packed));
  }

  void expire(double now_ms) { index_.expire(now_ms); }

  nb::tuple match(const nb::bytes& packed) {
    const std::size_t count = checked_key_count(packed);
    const Depths& depths = index_.match(bytes_of(packed), count);
    return nb::make_tuple(list_of(depths.device), list_of(depths.resident), list_of(depths.expected));
  }

  nb::bytes held(std::int64_t slot) const {
    const auto keys = index_.held(checked(slot));
    nb::bytes packed = blank_bytes(keys.size() * kKeyBytes);
    if (!keys.empty()) std::memcpy(writable(packed), keys.data(), keys.size() * kKeyBytes);
    return packed;
  }

  std::size_t held_count(std::int64_t slot) const { return index_.held_count(checked(slot)); }
  std::vector<std::size_t> tier_counts(std::int64_t slot) const {
    const auto& counts = index_.tier_counts(checked(slot));
    return {counts.begin(), counts.end()};
  }
  std::size_t predicted_count(std::int64_t slot) const { return index_.predicted_count(checked(slot)); }
  std::size_t block_count() const { return index_.block_count(); }
  std::size_t memory_bytes() const { return index_.allocated_bytes(); }

 private:
  static std::size_t checked_max_blocks(std::int64_t max_blocks) {
    if (max_blocks < 1 || max_blocks > std::int64_t{1} << 31) {
      const std::string text =
          "max_blocks is " + std::to_string(max_blocks) + ", allowed are 1 to 2147483648";
      throw nb::value_error(text.c_str());
    }
    return static_cast<std::size_t>(max_blocks);
  }

  std::uint32_t checked(std::int64_t slot) const {
    if (!index_.is_slot(slot)) {
      const std::string text = "slot " + std::to_string(slot) + " is not in use";
      throw nb::value_error(text.c_str());
    }
    return static_cast<std::uint32_t>(slot);
  }

  static std::size_t checked_tier(std::int64_t tier) {
    if (tier < 0 || tier >= static_cast<std::int64_t>(kTiers)) {
      const std::string text = "tier " + std::to_string(tier) + " is unknown";
      throw nb::value_error(text.c_str());
    }
    return static_cast<std::size_t>(tier);
  }

  std::uint32_t checked_namespace(std::int64_t namespace_id) const {
    if (!index_.is_namespace(namespace_id)) {
      const std::string text = "namespace " + std::to_string(namespace_id) + " is unknown";
      throw nb::value_error(text.c_str());
    }
    return static_cast<std::uint32_t>(namespace_id);
  }

  static std::size_t checked_row_count(const nb::bytes& rows, std::size_t namespace_count) {
    if (rows.size() % Rows::kBytes != 0) {
      const std::string text =
          "rows have " + std::to_string(rows.size()) + " bytes, which is no multiple of 52";
      throw nb::value_error(text.c_str());
    }
    const std::size_t count = rows.size() / Rows::kBytes;
    for (std::size_t index = 0; index < count; ++index) {
      const std::uint8_t* row = bytes_of(rows) + index * Rows::kBytes;
      std::uint32_t place;
      std::uint64_t copies;
      std::memcpy(&place, row + Rows::kPlaceAt, sizeof place);
      std::memcpy(&copies, row + Rows::kCopiesAt, sizeof copies);
      if (place >= namespace_count || copies == 0) {
        throw nb::value_error("a row names no namespace, or a block without a copy");
      }
    }
    return count;
  }

  static std::size_t checked_key_count(const nb::bytes& packed) {
    if (packed.size() % kKeyBytes != 0) {
      const std::string text = "packed keys have " + std::to_string(packed.size()) +
                               " bytes, which is no multiple of 32";
      throw nb::value_error(text.c_str());
    }
    return packed.size() / kKeyBytes;
  }

  static std::uint64_t u64_of(const nb::int_& value, const char* name) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      const std::string text = std::string(name) + " is outside 0..2**64-1";
      throw nb::value_error(text.c_str());
    }
    return number;
  }

  Index index_;
};

// -- heads ------------------------------------------------------------------------------------------

enum : long { kReported = 1, kDropped = 2 };

std::string_view view_of(const nb::bytes& value) { return {value.c_str(), value.size()}; }

nb::bytes bytes_from(std::string_view span) { return nb::bytes(span.data(), span.size()); }

nb::bytes lowered(std::string_view name) {
  nb::bytes made = blank_bytes(name.size());
  char* out = PyBytes_AS_STRING(made.ptr());
  for (const char letter : name) *out++ = lower(letter);
  return made;
}

void put(const nb::dict& into, const nb::bytes& name, std::string_view value) {
  if (PyDict_SetItem(into.ptr(), name.ptr(), bytes_from(value).ptr()) != 0) throw nb::python_error();
}

nb::object split_request_head(const nb::bytes& raw) {
  RequestParts parts;
  if (!split_request(view_of(raw), parts)) return nb::none();
  nb::dict fields;
  std::size_t longest = 0;
  for (const Field& field : parts.fields) {
    put(fields, lowered(field.name), field.value);
    longest = std::max(longest, field.name.size() + field.value.size());
  }
  return nb::make_tuple(nb::str(parts.method.data(), parts.method.size()), bytes_from(parts.target),
                        parts.minor, fields, parts.fields.size(), longest);
}

long role_of(const nb::dict& roles, const nb::bytes& name) {
  PyObject* role = PyDict_GetItemWithError(roles.ptr(), name.ptr());
  if (role == nullptr) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return 0;
  }
  const long bits = PyLong_AsLong(role);
  if (bits == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return bits;
}

nb::object split_answer_head(const nb::bytes& raw, const nb::dict& roles) {
  AnswerParts parts;
  if (!split_answer(view_of(raw), parts)) return nb::none();
  nb::dict told;
  bool is_plain = true;
  std::string passed;
  passed.reserve(raw.size());
  for (const Field& field : parts.fields) {
    const nb::bytes name = lowered(field.name);
    const long role = role_of(roles, name);
    if ((role & kReported) != 0) {
      is_plain = is_plain && !told.contains(name);
      put(told, name, field.value);
    }
    if ((role & kDropped) == 0) {
      passed.append(view_of(name)).append(": ").append(field.value).append("\r\n");
    }
  }
  return nb::make_tuple(parts.minor, parts.status, bytes_from(parts.reason), told, is_plain,
                        bytes_from(passed));
}

}  // namespace
}  // namespace trunkline

NB_MODULE(_core, m) {
  using trunkline::BlockIndex;
  m.doc() = "Compiled twins of trunkline.native._fallback and _heads, where everything is described.";
  nb::set_leak_warnings(false);  // what a gateway holds at its end goes with the process
  m.attr("VERSION") = 2;  // CORE_VERSION of _choice.py says when to raise both
  m.def("chain_keys", &trunkline::chain, "key"_a, "root"_a, "tokens"_a, "block_tokens"_a,
        "extra"_a = nb::bytes("", 0));
  m.def("split_request", &trunkline::split_request_head, "raw"_a);
  m.def("split_answer", &trunkline::split_answer_head, "raw"_a, "roles"_a);
  nb::class_<BlockIndex>(m, "BlockIndex")
      .def(nb::init<std::int64_t, const nb::int_&>(), "max_blocks"_a, "seed"_a = 0)
      .def("add_namespace", &BlockIndex::add_namespace, "key"_a, "root"_a)
      .def("retire_namespace", &BlockIndex::retire_namespace, "namespace_id"_a)
      .def("sweep", &BlockIndex::sweep, "max_blocks"_a)
      .def("add_slot", &BlockIndex::add_slot)
      .def("drop_slot", &BlockIndex::drop_slot, "slot"_a)
      .def("clear_slot", &BlockIndex::clear_slot, "slot"_a)
      .def("store", &BlockIndex::store, "slot"_a, "tier"_a, "namespace_id"_a, "parent"_a, "hashes"_a,
           "tokens"_a, "block_tokens"_a, "is_zone"_a = false)
      .def("remove", &BlockIndex::remove, "slot"_a, "tier"_a, "hashes"_a)
      .def("export_rows", &BlockIndex::export_rows, "slot"_a, "start"_a, "max_rows"_a)
      .def("adopt_rows", &BlockIndex::adopt_rows, "slot"_a, "rows"_a, "namespace_ids"_a)
      .def("predict", &BlockIndex::predict, "slot"_a, "namespace_id"_a, "packed"_a, "expires_ms"_a,
           "max_predicted"_a, "lead_id"_a = -1, "lead_count"_a = 0)
      .def("knows", &BlockIndex::knows, "key"_a)
      .def("unpredict", &BlockIndex::unpredict, "slot"_a, "packed"_a)
      .def("expire", &BlockIndex::expire, "now_ms"_a)
      .def("match", &BlockIndex::match, "packed"_a)
      .def("held", &BlockIndex::held, "slot"_a)
      .def("held_count", &BlockIndex::held_count, "slot"_a)
      .def("tier_counts", &BlockIndex::tier_counts, "slot"_a)
      .def("predicted_count", &BlockIndex::predicted_count, "slot"_a)
      .def("block_count", &BlockIndex::block_count)
      .def("memory_bytes", &BlockIndex::memory_bytes);
}
