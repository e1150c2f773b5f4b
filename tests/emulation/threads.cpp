// The scheduler of threads.h.
#include "threads.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "module.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStack = 128 * 1024;
constexpr unsigned char kGarbage = 0xff;  // a NaN in every floating point type

enum class State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Thread {
  State state;
  Site site;
  Combine combine;
  bool predicate;
  uint32_t mask;
  int source;
  uint64_t bits;

  // A fiber lives as long as the process and runs one thread after another.
  bool started = false;
  char* stack = nullptr;
  ucontext_t entry;
  void* resume[5];  // of __builtin_setjmp, since AddressSanitizer would look through the stacks at each longjmp
  void* fake_stack = nullptr;  // AddressSanitizer's
};

struct Grid {
  const char* kernel;
  const std::function<void()>* thread;
};

std::mutex one_launch_at_a_time;
Thread threads[kMaxThreads];
Thread* current = nullptr;
Grid grid;
void* scheduler[5];
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
int outcome_of_barrier = 0;
bool launch_is_unchecked = false;
int64_t launched = 0, blocks_launched = 0;
std::mt19937_64 random_numbers(0);

std::vector<std::pair<void*, size_t>>& shared_memories() {
  static std::vector<std::pair<void*, size_t>> memories;
  return memories;
}

[[noreturn]] void give_up(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "\nemulated CUDA: ");
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n  in %s, block %u of %u, launch %lld\n", grid.kernel, blockIdx.x, gridDim.x, static_cast<long long>(launched));
  va_end(arguments);
  abort();
}

template <class Item>
void shuffle_items(Item* first, size_t count) {
  for (size_t i = count; i > 1; --i) std::swap(first[i - 1], first[random_numbers() % i]);
}

// Switching

#if defined(__SANITIZE_ADDRESS__)
void leave_scheduler(Thread& to) { __sanitizer_start_switch_fiber(&scheduler_fake_stack, to.stack, kStack); }
void arrive_in_scheduler() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
void leave_fiber(Thread& from) { __sanitizer_start_switch_fiber(&from.fake_stack, scheduler_stack, scheduler_stack_size); }
void arrive_in_fiber(Thread& at) { __sanitizer_finish_switch_fiber(at.fake_stack, &scheduler_stack, &scheduler_stack_size); }
#else
void leave_scheduler(Thread&) {}
void arrive_in_scheduler() {}
void leave_fiber(Thread&) {}
void arrive_in_fiber(Thread&) {}
#endif

void wait_for_others(State state) {
  Thread& self = *current;
  self.state = state;
  leave_fiber(self);
  if (__builtin_setjmp(self.resume) == 0) __builtin_longjmp(scheduler, 1);
  arrive_in_fiber(self);
}

void fiber() {
  arrive_in_fiber(*current);
  for (;;) {
    (*grid.thread)();
    wait_for_others(State::kDone);
  }
}

void make_fiber(Thread& thread) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* memory = static_cast<char*>(
      mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) give_up("there is no memory for the threads' stacks");
  thread.stack = memory + page;  // it grows downwards, onto the page that may not be touched
  getcontext(&thread.entry);
  thread.entry.uc_stack.ss_sp = thread.stack;
  thread.entry.uc_stack.ss_size = kStack;
  thread.entry.uc_link = nullptr;
  makecontext(&thread.entry, fiber, 0);
}

void run(Thread& thread) {
  current = &thread;
  threadIdx.x = static_cast<unsigned>(&thread - threads);
  leave_scheduler(thread);
  if (__builtin_setjmp(scheduler) == 0) {
    if (std::exchange(thread.started, true)) __builtin_longjmp(thread.resume, 1);
    setcontext(&thread.entry);
  }
  arrive_in_scheduler();
}

// Meeting

const char* where(const Thread& thread) {
  return thread.state == State::kDone ? "has ended" : thread.state == State::kAtBarrier ? "is at a barrier" : "is at a shuffle";
}

[[noreturn]] void report_stray(const char* meeting, const Thread& here, const Thread& stray) {
  give_up("%s:%d: not all threads reach this %s: thread %d is here, thread %d %s (%s:%d)", here.site.file, here.site.line, meeting,
          static_cast<int>(&here - threads), static_cast<int>(&stray - threads), where(stray), stray.site.file, stray.site.line);
}

bool same_site(const Thread& a, const Thread& b) { return a.site.line == b.site.line && strcmp(a.site.file, b.site.file) == 0; }

// Lets the lanes of a warp go that wait for each other. Returns whether any did.
bool release_shuffles(int first, int count) {
  bool released = false;
  for (int lane = 0; lane < count; ++lane) {
    const Thread& one = threads[first + lane];
    if (one.state != State::kAtShuffle) continue;
    const uint32_t mask = one.mask;
    for (int other = 0; other < kWarp; ++other) {
      if ((mask >> other & 1) == 0) continue;
      if (other >= count) give_up("%s:%d: a shuffle of lane %d, where the warp has %d threads", one.site.file, one.site.line, other, count);
      const Thread& peer = threads[first + other];
      if (peer.state != State::kAtShuffle || peer.mask != mask || !same_site(peer, one)) report_stray("shuffle", one, peer);
      if ((mask >> peer.source & 1) == 0)
        give_up("%s:%d: a shuffle reads lane %d, which takes no part in it", one.site.file, one.site.line, peer.source);
    }
    uint64_t taken[kWarp];
    for (int other = 0; other < count; ++other) taken[other] = mask >> other & 1 ? threads[first + threads[first + other].source].bits : 0;
    for (int other = 0; other < count; ++other)
      if (mask >> other & 1) {
        threads[first + other].bits = taken[other];
        threads[first + other].state = State::kReady;
      }
    released = true;
  }
  return released;
}

// Runs a warp until each of its lanes has ended or waits for other warps.
void run_warp(int first, int count) {
  int lanes[kWarp];
  do {
    int ready = 0;
    for (int lane = 0; lane < count; ++lane)
      if (threads[first + lane].state == State::kReady) lanes[ready++] = first + lane;
    shuffle_items(lanes, static_cast<size_t>(ready));
    for (int i = 0; i < ready; ++i) run(threads[lanes[i]]);
  } while (release_shuffles(first, count));
}

// Lets all threads go from the barrier where they wait. Returns false if all have ended.
bool release_barrier(int count) {
  const Thread* waiting = std::find_if(threads, threads + count, [](const Thread& one) { return one.state == State::kAtBarrier; });
  if (waiting == threads + count) return false;
  int agree = 0;
  for (int i = 0; i < count; ++i) {
    if (threads[i].state != State::kAtBarrier || !same_site(threads[i], *waiting)) report_stray("barrier", *waiting, threads[i]);
    agree += threads[i].predicate;
  }
  const Combine combine = waiting->combine;
  outcome_of_barrier = combine == Combine::kOr ? agree > 0 : combine == Combine::kAnd ? agree == count : agree;
  for (int i = 0; i < count; ++i) threads[i].state = State::kReady;
  return true;
}

void run_block(int count) {
  for (const auto& [memory, size] : shared_memories()) memset(memory, kGarbage, size);
  for (int i = 0; i < count; ++i) {
    threads[i].state = State::kReady;
    threads[i].site = {"", 0};
  }
  std::vector<int> warps((count + kWarp - 1) / kWarp);
  std::iota(warps.begin(), warps.end(), 0);
  do {
    shuffle_items(warps.data(), warps.size());
    for (int warp : warps) run_warp(warp * kWarp, std::min(kWarp, count - warp * kWarp));
  } while (release_barrier(count));
}

}  // namespace

int lane() { return static_cast<int>(threadIdx.x % kWarp); }

int meet_block(Combine combine, bool predicate, Site site) {
  current->site = site;
  current->combine = combine;
  current->predicate = predicate;
  wait_for_others(State::kAtBarrier);
  return outcome_of_barrier;
}

uint64_t exchange_in_warp(uint32_t mask, uint64_t given, int source, Site site) {
  if ((mask >> lane() & 1) == 0) give_up("%s:%d: lane %d is not in the mask %08x of its own shuffle", site.file, site.line, lane(), mask);
  current->site = site;
  current->mask = mask;
  current->bits = given;
  current->source = source;
  wait_for_others(State::kAtShuffle);
  return current->bits;
}

void add_shared_memory(void* memory, size_t size) {
  memset(memory, kGarbage, size);
  shared_memories().emplace_back(memory, size);
}

void run_grid(const char* kernel, int64_t blocks, int64_t count, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  grid = {kernel, &thread};
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(count);
  blockIdx.x = 0;
  if (launch_is_unchecked) give_up("nothing has checked the launch before this one");
  if (blocks < 1 || blocks > INT32_MAX || count < 1 || count > kMaxThreads)
    give_up("an invalid launch: %lld blocks of %lld threads", static_cast<long long>(blocks), static_cast<long long>(count));
  ++launched;
  blocks_launched += blocks;
  launch_is_unchecked = true;
  for (int i = 0; i < count; ++i)
    if (threads[i].stack == nullptr) make_fiber(threads[i]);
  std::vector<unsigned> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0u);
  shuffle_items(order.data(), order.size());
  for (unsigned block : order) {
    blockIdx.x = block;
    run_block(static_cast<int>(count));
  }
}

void check_launch() { launch_is_unchecked = false; }

int64_t launches() { return launched; }
int64_t blocks() { return blocks_launched; }
void seed(uint64_t value) { random_numbers.seed(value); }

}  // namespace emulation
