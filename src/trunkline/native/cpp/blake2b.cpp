#include "blake2b.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace trunkline {
namespace {

static_assert(std::endian::native == std::endian::little,
              "BLAKE2b reads little-endian words straight from memory here");

// RFC 7693, section 2.6: the initial values (those of SHA-512).
constexpr std::array<std::uint64_t, 8> kInitial = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// RFC 7693, section 2.7: the message word schedule. Rounds 10 and 11 use rows 0 and 1 again.
constexpr std::uint8_t kSchedule[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

constexpr int kRounds = 12;

inline void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d,
                std::uint64_t x, std::uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

// The schedule row is a template argument, so that every message index is a constant.
template <int Row>
inline void round(std::uint64_t (&v)[16], const std::uint64_t (&m)[16]) {
  constexpr auto& s = kSchedule[Row];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <int... Round>
inline void rounds(std::uint64_t (&v)[16], const std::uint64_t (&m)[16],
                   std::integer_sequence<int, Round...>) {
  (round<Round % 10>(v, m), ...);
}

}  // namespace

Blake2b::Blake2b(const std::uint8_t* key, const char* person) : state_(kInitial) {
  // Parameter block: digest 32, key 32, fanout 1, depth 1; `person` fills its last two words.
  state_[0] ^= 0x01010000 ^ (kKeyBytes << 8) ^ kKeyBytes;
  std::array<char, 16> padded{};
  std::memcpy(padded.data(), person, std::min(std::strlen(person), padded.size()));
  std::uint64_t words[2];
  std::memcpy(words, padded.data(), sizeof words);
  state_[6] ^= words[0];
  state_[7] ^= words[1];
  buffer_.fill(0);
  std::memcpy(buffer_.data(), key, kKeyBytes);
  hashed_bytes_ = kBlockBytes;
  compress(buffer_.data(), false);
}

void Blake2b::update(const void* data, std::size_t size) {
  const auto* next = static_cast<const std::uint8_t*>(data);
  while (size > 0) {
    if (buffered_bytes_ == kBlockBytes) {  // full and not the last, since more follows
      hashed_bytes_ += kBlockBytes;
      compress(buffer_.data(), false);
      buffered_bytes_ = 0;
    }
    const std::size_t taken = std::min(size, kBlockBytes - buffered_bytes_);
    std::memcpy(buffer_.data() + buffered_bytes_, next, taken);
    buffered_bytes_ += taken;
    next += taken;
    size -= taken;
  }
}

void Blake2b::finish(std::uint8_t* digest) {
  hashed_bytes_ += buffered_bytes_;
  std::memset(buffer_.data() + buffered_bytes_, 0, kBlockBytes - buffered_bytes_);
  compress(buffer_.data(), true);
  std::memcpy(digest, state_.data(), kKeyBytes);
}

void Blake2b::compress(const std::uint8_t* block, bool is_last) {
  std::uint64_t m[16];
  std::memcpy(m, block, sizeof m);
  std::uint64_t v[16];
  std::memcpy(v, state_.data(), 64);
  std::memcpy(v + 8, kInitial.data(), 64);
  v[12] ^= hashed_bytes_;  // the upper counter word stays 0: no chain block has 2**64 bytes
  if (is_last) v[14] = ~v[14];
  rounds(v, m, std::make_integer_sequence<int, kRounds>{});
  for (std::size_t i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
}

void chain_keys(const std::uint8_t* key, const std::uint8_t* root, const std::uint8_t* tokens,
                std::size_t block_count, std::uint32_t block_tokens, const std::uint8_t* extra,
                std::uint32_t extra_bytes, std::uint8_t* keys) {
  const Blake2b keyed(key, "blk");
  const std::size_t block_bytes = std::size_t{block_tokens} * sizeof(std::uint32_t);
  const std::uint8_t* previous = root;
  for (std::size_t block = 0; block < block_count; ++block) {
    Blake2b hash = keyed;
    hash.update(previous, kKeyBytes);
    hash.update(&block_tokens, sizeof block_tokens);
    hash.update(tokens + block * block_bytes, block_bytes);
    hash.update(&extra_bytes, sizeof extra_bytes);
    hash.update(extra, extra_bytes);
    hash.finish(keys + block * kKeyBytes);
    previous = keys + block * kKeyBytes;
  }
}

}  // namespace trunkline
