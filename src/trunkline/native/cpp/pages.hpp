// Memory for large tables on huge pages, where the system has them: a lookup jumps through the table at
// random, and with small pages each jump also misses the translation cache. Read table.hpp next.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace trunkline {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

/// What an allocation of so many bytes takes: large ones are rounded up to whole huge pages.
inline std::size_t rounded_bytes(std::size_t bytes) {
  if (bytes < 2 * kHugePageBytes) return bytes;
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

template <class T>
struct PageAllocator {
  using value_type = T;

  PageAllocator() = default;
  template <class Other>
  PageAllocator(const PageAllocator<Other>&) {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = rounded_bytes(count * sizeof(T));
    if (bytes < 2 * kHugePageBytes) return static_cast<T*>(::operator new(bytes));
    void* memory = std::aligned_alloc(kHugePageBytes, bytes);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);  // a wish; refused, it changes nothing
#endif
    return static_cast<T*>(memory);
  }

  void deallocate(T* memory, std::size_t count) {
    if (count * sizeof(T) < 2 * kHugePageBytes) {
      ::operator delete(memory);
    } else {
      std::free(memory);
    }
  }

  template <class Other>
  bool operator==(const PageAllocator<Other>&) const {
    return true;
  }
};

}  // namespace trunkline
