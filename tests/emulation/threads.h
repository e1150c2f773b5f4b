// Blocks of CUDA threads on the host: what the sources of csrc/cuda find in the place of the GPU. See README.md beside this file.
//
// Every thread of a block is a fiber with a stack of its own. A fiber runs until it has to wait for others: at a barrier of its
// block, or at a shuffle of its warp. Which one runs next is drawn at random: blocks, warps of a block and lanes of a warp all
// come in random order, and a warp runs ahead of the others as far as the next barrier of the block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

namespace emulation {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block

// Where in the sources a thread waits: threads that meet must meet at one place.
struct Site {
  const char* file;
  int line;
};

enum class Combine { kNothing, kOr, kAnd, kCount };

// All threads of the block meet here.
int meet_block(Combine combine, bool predicate, Site site);
// The lanes of mask meet here, each gives eight bytes and takes those of another.
uint64_t exchange_in_warp(uint32_t mask, uint64_t given, int source, Site site);
int lane();

// Memory that the threads of a block share. It holds garbage when a block begins, as on a GPU.
void add_shared_memory(void* memory, size_t size);

template <class Type, class Site>
Type& shared(Site) {
  static std::aligned_storage_t<sizeof(Type), alignof(Type)> memory;
  static const bool added = (add_shared_memory(&memory, sizeof(Type)), true);
  (void)added;
  return reinterpret_cast<Type&>(memory);
}

void run_grid(const char* kernel, int64_t blocks, int64_t threads, const std::function<void()>& thread);
void check_launch();  // what follows every launch
#ifdef SIMULATED_CUDA
// Runs it, now and at each replay of the graph that the stream is captured into, if the stream is one of the current device's.
extern "C" void simulated_launch(void* stream, void (*run)(void*), void* what);
#endif

template <class Kernel>
class Launch {
 public:
  Launch(const char* name, Kernel kernel, int64_t blocks, int64_t threads, void* stream)
      : name_(name), kernel_(kernel), blocks_(blocks), threads_(threads), stream_(stream) {}

  template <class... Arguments>
  void operator()(const Arguments&... arguments) const {
    const std::tuple<Arguments...> copies(arguments...);  // a launch takes its arguments along
#ifdef SIMULATED_CUDA
    auto* run = new std::function<void()>([copies, launch = *this] {
      run_grid(launch.name_, launch.blocks_, launch.threads_, [&] { std::apply(launch.kernel_, copies); });
      check_launch();
    });
    simulated_launch(stream_, [](void* what) { (*static_cast<std::function<void()>*>(what))(); }, run);
#else
    run_grid(name_, blocks_, threads_, [&] { std::apply(kernel_, copies); });
#endif
  }

 private:
  const char* name_;
  Kernel kernel_;
  int64_t blocks_, threads_;
  void* stream_;
};

template <class Kernel>
Launch<Kernel> launch(const char* name, Kernel kernel, int64_t blocks, int64_t threads, size_t, void* stream) {
  return {name, kernel, blocks, threads, stream};
}

template <class Value>
Value shuffle(uint32_t mask, Value value, int source, Site site) {
  static_assert(sizeof(Value) <= 8 && std::is_trivially_copyable_v<Value>, "a shuffle moves up to eight bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = exchange_in_warp(mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

// A lane outside of the warp is oneself.
inline int down(int step) { return lane() + step < kWarp ? lane() + step : lane(); }
inline int up(int step) { return lane() - step >= 0 ? lane() - step : lane(); }

}  // namespace emulation
