// The grammar of an HTTP/1 head, as spans into the bytes it is in. Knows nothing of Python, nor of what a
// field means. The twin is `_heads.py`.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace trunkline {

struct Field {
  std::string_view name;
  std::string_view value;  // without the blanks around it
};

struct RequestParts {
  std::string_view method;
  std::string_view target;
  int minor = 0;
  std::vector<Field> fields;
};

struct AnswerParts {
  std::string_view reason;
  int minor = 0;
  int status = 0;
  std::vector<Field> fields;
};

/// Both take a head whole, its blank line included, or say no.
bool split_request(std::string_view raw, RequestParts& parts);
bool split_answer(std::string_view raw, AnswerParts& parts);

/// ASCII only, as names are.
inline char lower(char letter) {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + ('a' - 'A')) : letter;
}

}  // namespace trunkline
