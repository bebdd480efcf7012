// What compute-sanitizer says of a kernel that is right: four teams of 128 threads, each with a named barrier of its own.
//
//     nvcc -arch=sm_90 -o named_barriers named_barriers.cu
//     compute-sanitizer --tool synccheck ./named_barriers       "Divergent thread(s) in block"
//     compute-sanitizer --tool racecheck ./named_barriers       0 hazards
#include <cstdio>

__device__ void meet(int team) {
  if (team == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  else if (team == 1) asm volatile("bar.sync 2, 128;" ::: "memory");
  else if (team == 2) asm volatile("bar.sync 3, 128;" ::: "memory");
  else asm volatile("bar.sync 4, 128;" ::: "memory");
}

__global__ void exchange(int* out) {
  __shared__ int shared[4][128];
  const int team = threadIdx.x / 128, thread = threadIdx.x % 128;
  int sum = 0;
  for (int round = 0; round < 4; round++) {
    shared[team][thread] = round * thread;
    meet(team);
    sum += shared[team][127 - thread];
    meet(team);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main() {
  int* out;
  cudaMalloc(&out, 2 * 512 * sizeof(int));
  exchange<<<2, 512>>>(out);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
