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
#include <typeinfo>
#include <vector>

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

// The name of a kernel as its type has it, mangled: what nvcc calls its entry, but for namespaces without a name.
template <auto kKernel>
struct Entry {};

// A launch, handed over to another machine: handover.cpp.
bool hands_over();
void begin_handover(const char* entry, const std::vector<char>& parameters, int64_t blocks, int64_t threads, size_t shared);
void end_handover();  // after the threads here have run too

// Parameters as they lie in a launch: one after the other, each at a multiple of its alignment.
template <class... Arguments>
std::vector<char> packed(const Arguments&... arguments) {
  std::vector<char> bytes;
  const auto add = [&](const auto& one) {
    const size_t start = (bytes.size() + alignof(decltype(one)) - 1) / alignof(decltype(one)) * alignof(decltype(one));
    bytes.resize(start + sizeof(one));
    std::memcpy(bytes.data() + start, &one, sizeof(one));
  };
  (add(arguments), ...);
  return bytes;
}

template <class Kernel>
class Launch {
 public:
  Launch(const char* name, const char* entry, Kernel kernel, int64_t blocks, int64_t threads, size_t shared, void* stream)
      : name_(name), entry_(entry), kernel_(kernel), blocks_(blocks), threads_(threads), shared_(shared), stream_(stream) {}

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
    if (hands_over()) begin_handover(entry_, packed(arguments...), blocks_, threads_, shared_);
    run_grid(name_, blocks_, threads_, [&] { std::apply(kernel_, copies); });
    if (hands_over()) end_handover();
#endif
  }

 private:
  const char *name_, *entry_;
  Kernel kernel_;
  int64_t blocks_, threads_;
  size_t shared_;
  void* stream_;
};

template <auto kKernel, class Kernel>
Launch<Kernel> launch(const char* name, Kernel kernel, int64_t blocks, int64_t threads, size_t shared, void* stream) {
  return {name, typeid(Entry<kKernel>).name(), kernel, blocks, threads, shared, stream};
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
