// A program that uses the CUDA runtime, built by nvcc, with state in rarer places than cudaMalloc: arrays read through textures and written
// through surfaces, constant memory, module variables, the device heap, the stream-ordered pool, pitched memory, mapped and registered host
// memory, host functions in a stream, kernels that print, and kernels that launch others. Writes a line "STEP SUM" for each step.
// Usage: features FILE
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

struct Node {
    Node *next;
    unsigned long long value;
};

constexpr int SIDE = 512;
__constant__ unsigned factors[64];
__device__ unsigned long long total;
__device__ Node *list;

__global__ void change(cudaTextureObject_t from, cudaSurfaceObject_t to, unsigned number) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    unsigned near = tex2D<unsigned>(from, (x + 1) % SIDE, (y + number) % SIDE);
    surf2Dwrite(near * 1664525u + 1013904223u + factors[(x + y) % 64], to, x * 4, y);
}

// What a kernel allocates outlives the kernel.
__global__ void grow(unsigned number) {
    Node *node = (Node *)malloc(sizeof *node);
    if (node) {
        *node = {list, (list ? list->value : 0) * 31 + number};
        list = node;
    }
    if (number % 64 == 0) {
        while (list && list->next) {
            Node *rest = list->next;
            list->next = rest->next;
            free(rest);
        }
        printf("kernel %u\n", number);
    }
}

__global__ void add(cudaTextureObject_t from, const unsigned *pool, const unsigned *pitched, size_t pitch, volatile unsigned long long *mapped) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    unsigned row = ((const unsigned *)((const char *)pitched + y * pitch))[x];
    atomicAdd(&total, (unsigned long long)tex2D<unsigned>(from, x, y) + pool[y * SIDE + x] + row);
    if (x == 0 && y == 0) *mapped += list ? list->value : 1;
}

__device__ unsigned long long launched;

__global__ void child(unsigned number) { atomicAdd(&launched, (unsigned long long)number * threadIdx.x); }

// Launches from the GPU.
__global__ void parent(unsigned number) { child<<<2, 32>>>(number); }

__global__ void fill(unsigned *out, unsigned seed) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    out[at] = seed + at * 2654435761u;
}

static void CUDART_CB counted(void *counter) { ++*(unsigned long long *)counter; }

int main(int count, char **words) {
    if (count != 2) return 2;
    cudaArray_t arrays[2];
    cudaTextureObject_t textures[2];
    cudaSurfaceObject_t surfaces[2];
    cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    static unsigned start[SIDE * SIDE], some[64];
    for (int i = 0; i < SIDE * SIDE; i++) start[i] = i * 40503u;
    CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMallocArray(&arrays[i], &format, SIDE, SIDE, cudaArraySurfaceLoadStore));
        cudaResourceDesc what = {};
        what.resType = cudaResourceTypeArray;
        what.res.array.array = arrays[i];
        cudaTextureDesc how = {};
        CHECK(cudaCreateTextureObject(&textures[i], &what, &how, nullptr));
        CHECK(cudaCreateSurfaceObject(&surfaces[i], &what));
    }
    CHECK(cudaMemcpy2DToArray(arrays[0], 0, 0, start, SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
    cudaStream_t stream, other;
    cudaEvent_t begun, done;
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamCreate(&other));
    CHECK(cudaEventCreate(&begun));
    CHECK(cudaEventCreate(&done));
    unsigned *pitched;
    size_t pitch;
    CHECK(cudaMallocPitch(&pitched, &pitch, SIDE * 4, SIDE));
    CHECK(cudaMemcpy2D(pitched, pitch, start, SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
    volatile unsigned long long *mapped;
    unsigned long long *seen, *calls, sum = 0, more = 0;
    CHECK(cudaHostAlloc((void **)&mapped, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer((void **)&seen, (void *)mapped, 0));
    calls = new unsigned long long(0);
    unsigned *own = (unsigned *)aligned_alloc(4096, 1 << 20);
    CHECK(cudaHostRegister(own, 1 << 20, cudaHostRegisterDefault));
    FILE *file = fopen(words[1], "a");
    if (!file) return 1;
    dim3 grid(SIDE / 128, SIDE);
    for (unsigned number = 1;; number++) {
        for (int i = 0; i < 64; i++) some[i] = number * 97 + i;
        CHECK(cudaMemcpyToSymbolAsync(factors, some, sizeof some, 0, cudaMemcpyHostToDevice, stream));
        CHECK(cudaEventRecord(begun, stream));
        unsigned *pool;
        CHECK(cudaMallocAsync(&pool, SIDE * SIDE * 4, stream));
        fill<<<SIDE * SIDE / 256, 256, 0, stream>>>(pool, number);
        change<<<grid, 128, 0, stream>>>(textures[1 - number % 2], surfaces[number % 2], number);
        grow<<<1, 1, 0, stream>>>(number);
        parent<<<1, 1, 0, stream>>>(number);
        CHECK(cudaGetLastError());
        add<<<grid, 128, 0, stream>>>(textures[number % 2], pool, pitched, pitch, seen);
        CHECK(cudaMemcpyFromSymbolAsync(&sum, total, sizeof sum, 0, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaMemcpyFromSymbolAsync(&more, launched, sizeof more, 0, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(pool, stream));
        CHECK(cudaLaunchHostFunc(stream, counted, calls));
        CHECK(cudaEventRecord(done, stream));
        CHECK(cudaStreamWaitEvent(other, done, 0));
        CHECK(cudaMemcpy2DAsync(own, SIDE * 4, pitched, pitch, SIDE * 4, SIDE, cudaMemcpyDeviceToHost, other));
        CHECK(cudaStreamSynchronize(other));
        CHECK(cudaStreamSynchronize(stream));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begun, done));
        fprintf(file, "%u %llu\n", number, sum + more * 5 + *mapped * 3 + *calls * 7 + own[number % (SIDE * SIDE)]);
        fflush(file);
        usleep(5000);
    }
}
