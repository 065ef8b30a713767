#include "head.hpp"

#include <array>
#include <cstdint>

namespace trunkline {
namespace {

enum : std::uint8_t { kName = 1, kValue = 2, kTarget = 4 };

constexpr std::array<std::uint8_t, 256> make_classes() {
  std::array<std::uint8_t, 256> classes{};
  for (int byte = 0; byte < 256; ++byte) {
    std::uint8_t kinds = 0;
    const bool is_visible = byte >= '!' && byte <= '~';
    const bool is_letter = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
    if (is_letter || (byte >= '0' && byte <= '9')) kinds |= kName;
    for (const char sign : std::string_view("!#$%&'*+-.^_`|~")) {
      if (byte == sign) kinds |= kName;
    }
    if (is_visible || byte == ' ' || byte == '\t' || byte >= 0x80) kinds |= kValue;
    if (is_visible) kinds |= kTarget;
    classes[static_cast<std::size_t>(byte)] = kinds;
  }
  return classes;
}

constexpr auto kClasses = make_classes();
constexpr std::size_t kLongestMethod = 16;
constexpr std::size_t kUsualFields = 24;

bool is_blank(char byte) { return byte == ' ' || byte == '\t'; }

/// Reads forward; each step says whether what was wanted stood there.
class Cursor {
 public:
  explicit Cursor(std::string_view raw) : at_(raw.data()), end_(raw.data() + raw.size()) {}

  bool is_at_end() const { return at_ == end_; }

  bool take(std::string_view wanted) {
    if (static_cast<std::size_t>(end_ - at_) < wanted.size()) return false;
    if (std::string_view(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  std::string_view run(std::uint8_t kind) {
    const char* start = at_;
    while (at_ < end_ && (kClasses[static_cast<std::uint8_t>(*at_)] & kind) != 0) ++at_;
    return {start, static_cast<std::size_t>(at_ - start)};
  }

  bool take_minor(int& minor) {
    if (!take("HTTP/1.") || at_ == end_ || (*at_ != '0' && *at_ != '1')) return false;
    minor = *at_++ - '0';
    return true;
  }

  bool take_status(int& status) {
    if (end_ - at_ < 3 || at_[0] < '1') return false;
    status = 0;
    for (int place = 0; place < 3; ++place, ++at_) {
      if (*at_ < '0' || *at_ > '9') return false;
      status = status * 10 + (*at_ - '0');
    }
    return true;
  }

  /// All fields, the blank line, and nothing behind it.
  bool take_fields(std::vector<Field>& fields) {
    fields.reserve(kUsualFields);
    while (!take("\r\n")) {
      const std::string_view name = run(kName);
      if (name.empty() || !take(":")) return false;
      std::string_view value = run(kValue);
      if (!take("\r\n")) return false;
      while (!value.empty() && is_blank(value.front())) value.remove_prefix(1);
      while (!value.empty() && is_blank(value.back())) value.remove_suffix(1);
      fields.push_back({name, value});
    }
    return is_at_end();
  }

 private:
  const char* at_;
  const char* end_;
};

bool is_method(std::string_view word) {
  if (word.empty() || word.size() > kLongestMethod) return false;
  for (const char letter : word) {
    if (letter < 'A' || letter > 'Z') return false;
  }
  return true;
}

}  // namespace

bool split_request(std::string_view raw, RequestParts& parts) {
  Cursor cursor(raw);
  parts.method = cursor.run(kName);
  if (!is_method(parts.method) || !cursor.take(" ")) return false;
  parts.target = cursor.run(kTarget);
  return !parts.target.empty() && cursor.take(" ") && cursor.take_minor(parts.minor) &&
         cursor.take("\r\n") && cursor.take_fields(parts.fields);
}

bool split_answer(std::string_view raw, AnswerParts& parts) {
  Cursor cursor(raw);
  if (!cursor.take_minor(parts.minor) || !cursor.take(" ") || !cursor.take_status(parts.status)) {
    return false;
  }
  if (cursor.take(" ")) parts.reason = cursor.run(kValue);
  return cursor.take("\r\n") && cursor.take_fields(parts.fields);
}

}  // namespace trunkline
