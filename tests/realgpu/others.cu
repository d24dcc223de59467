// A program of the CUDA runtime, built by nvcc: a kernel changes an array in place, step by step, on a stream of its own and through a captured
// graph; a line "STEP SUM" for each. Usage: others FILE
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

#define CHECK(call)                                                                    \
    do {                                                                               \
        cudaError_t error = (call);                                                    \
        if (error != cudaSuccess) {                                                    \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));             \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

__global__ void step(uint64_t *data, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        data[i] = data[i] * 6364136223846793005ull + 1442695040888963407ull + i;
}

__global__ void sum(const uint64_t *data, size_t count, unsigned long long *out) {
    unsigned long long own = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) own += data[i];
    atomicAdd(out, own);  // addition of integers: the order does not matter
}

int main(int count, char **words) {
    if (count != 2) return 2;
    const size_t items = 32u << 20;
    uint64_t *data;
    unsigned long long *out, *pinned;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    CHECK(cudaMalloc(&data, items * sizeof *data));
    CHECK(cudaMalloc(&out, sizeof *out));
    CHECK(cudaMallocHost(&pinned, sizeof *pinned));
    CHECK(cudaMemset(data, 1, items * sizeof *data));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    step<<<256, 256, 0, stream>>>(data, items);
    CHECK(cudaMemsetAsync(out, 0, sizeof *out, stream));
    sum<<<256, 256, 0, stream>>>(data, items, out);
    CHECK(cudaMemcpyAsync(pinned, out, sizeof *out, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&run, graph, 0));
    FILE *file = fopen(words[1], "a");
    if (!file) return 1;
    for (unsigned long number = 1;; number++) {
        CHECK(cudaGraphLaunch(run, stream));
        CHECK(cudaStreamSynchronize(stream));
        fprintf(file, "%lu %llu\n", number, *pinned);
        fflush(file);
        usleep(5000);
    }
}
