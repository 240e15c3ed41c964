// One rank of reductions with the real Gloo over TCP.
// Usage: gloo_ends RANK RANKS FOLDER ADDRESS ELEMENTS ROUNDS.  The folder stands for the rendezvous: each rank waits there
// for `go` and, when it is through, for `end`.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

static void await(const std::string& file) {
  while (!std::ifstream(file).good()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

int main(int, char** argv) {
  const int rank = std::atoi(argv[1]), ranks = std::atoi(argv[2]), rounds = std::atoi(argv[6]);
  const std::string folder = argv[3];
  gloo::transport::tcp::attr where;
  where.hostname = argv[4];
  auto device = gloo::transport::tcp::CreateDevice(where);
  gloo::rendezvous::FileStore store(folder);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  context->connectFullMesh(store, device);
  std::vector<float> values(std::atoi(argv[5]), 1.0f);
  std::ofstream(folder + "/ready" + argv[1]).flush();
  await(folder + "/go");
  for (int round = 0; round < rounds; ++round) {
    gloo::AllreduceOptions options(context);
    options.setOutput(values.data(), values.size());
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
    gloo::allreduce(options);
  }
  std::printf("%.0f\n", values.back());
  std::fflush(stdout);
  std::ofstream(folder + "/done" + argv[1]).flush();
  await(folder + "/end");
}
