// Gives Python time to report where the ranks are before std::terminate ends the process.
//
// gloo throws in threads of its own, where no program can catch it, for example if the ranks send different sizes; nccl's
// watchdog does so after a time-out. C++ then calls the terminate handler, which prints the exception and aborts. Ours
// waits before that until a thread of Python has reported, but for 3 s at most. It calls nothing of Python, as it would
// wait for ever if the thread that holds the GIL waits for this one. Python looks at the state: see termination.py.

#include <poll.h>

#include <atomic>
#include <exception>

namespace {

enum State : int { unwatched = 0, watched = 1, terminating = 2 };
constexpr int most_milliseconds = 3000, pause_milliseconds = 10;

std::atomic<int> state{unwatched};
std::terminate_handler previous = nullptr;

void wait_for_report() {
  int expected = watched;
  state.compare_exchange_strong(expected, terminating);
  for (int waited = 0; state == terminating && waited < most_milliseconds; waited += pause_milliseconds)
    poll(nullptr, 0, pause_milliseconds);
  previous();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) std::atomic<int>* syncbn_install_terminate_handler() {
  if (!previous) previous = std::set_terminate(wait_for_report);
  return &state;
}
