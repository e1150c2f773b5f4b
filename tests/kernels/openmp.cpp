// OpenMP for ThreadSanitizer, which sees threads and joins of pthreads, but not those of libgomp. It is preloaded, and has what
// at::parallel_for uses: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html
#include <thread>
#include <vector>

namespace {
thread_local int number = 0, team = 1, wanted = 4;
}

extern "C" {
int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return team; }
int omp_get_max_threads() { return wanted; }
int omp_get_num_procs() { return wanted; }
int omp_in_parallel() { return team > 1; }
void omp_set_num_threads(int threads) { wanted = threads; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  const int size = team > 1 ? 1 : threads > 0 ? static_cast<int>(threads) : wanted;
  const auto run_as = [=](int index) {
    const int number_before = number, team_before = team;
    number = index;
    team = size;
    body(data);
    number = number_before;
    team = team_before;
  };
  std::vector<std::thread> others;
  for (int index = 1; index < size; ++index) others.emplace_back(run_as, index);
  run_as(0);
  for (auto& other : others) other.join();
}
}
