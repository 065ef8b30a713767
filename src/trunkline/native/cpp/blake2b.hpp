// Keyed BLAKE2b-256 (RFC 7693), shaped for chains: the state after the key block is made once, and every
// block of the chain starts from a copy of it. Owns no memory, knows no Python. Read index.hpp next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace trunkline {

inline constexpr std::size_t kKeyBytes = 32;

/// One hash in progress. Copy it to fork; copies are independent.
class Blake2b {
 public:
  /// The state after the key block. `key` has 32 bytes; `person` at most 16, filled up with zeros.
  Blake2b(const std::uint8_t* key, const char* person);

  void update(const void* data, std::size_t size);

  /// Writes 32 bytes. At least one byte must have gone in since the key block; use once.
  void finish(std::uint8_t* digest);

 private:
  static constexpr std::size_t kBlockBytes = 128;

  void compress(const std::uint8_t* block, bool is_last);

  std::array<std::uint64_t, 8> state_;
  std::uint64_t hashed_bytes_ = 0;
  std::size_t buffered_bytes_ = 0;
  std::array<std::uint8_t, kBlockBytes> buffer_;
};

/// Chains `block_count` blocks of `block_tokens` u32 tokens from `root`; writes 32 bytes for each to `keys`:
/// key_i = H(key_{i-1} || u32 block_tokens || tokens || u32 extra_size || extra).
void chain_keys(const std::uint8_t* key, const std::uint8_t* root, const std::uint8_t* tokens,
                std::size_t block_count, std::uint32_t block_tokens, const std::uint8_t* extra,
                std::uint32_t extra_bytes, std::uint8_t* keys);

}  // namespace trunkline
