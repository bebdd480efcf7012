// Reads the Grams once for their largest entry, once more into the workspace: scaled by a power of two to below 1, lower
// triangle mirrored, padded with zero rows and columns to a multiple of 32. Padding stays exactly zero and decoupled.
// INPUT is float or double.
#ifndef INPUT
#define INPUT double
#endif

__device__ __forceinline__ int exponent_of(u64 bits) { // of 2^e > |x|; 0 for zero and for what is not finite
  double x = __longlong_as_double((long long)bits); int e = 0;
  if (x > 0 && isfinite(x)) frexp(x, &e);
  return max(e, -1000);
}

// largest |a_ij| of each lower triangle, as bits (they order as the values do; NaN above Inf). grid (blocks, batch)
extern "C" __global__ void largest(const INPUT* A, long long stride, long long row_stride, int n, u64* largest_bits) {
  A += blockIdx.y * stride; u64 best = 0;
  for (int i = blockIdx.x; i < n; i += gridDim.x)
    for (int j = threadIdx.x; j <= i; j += blockDim.x) best = max(best, (u64)__double_as_longlong(fabs((double)A[i * row_stride + j])));
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, __shfl_xor_sync(FULL, best, o));
  if ((threadIdx.x & 31) == 0 && best) atomicMax(largest_bits + blockIdx.y, best);
}

// grid (tiles of the lower triangle, batch), block (32, 8). moments: (batch, tiles, 2): sums of a_ii and of a_ij^2 of the scaled matrix
extern "C" __global__ void fill(const INPUT* A, long long stride, long long row_stride, int n, double* P, int padded, const u64* largest_bits, double2* moments, int* verdict) {
  __shared__ double tile[32][33]; __shared__ double sums[2][8];
  int x = threadIdx.x, y = threadIdx.y;
  int i = (int)((sqrt(8.0 * blockIdx.x + 1.0) - 1.0) * 0.5);
  while ((i + 1) * (i + 2) / 2 <= (int)blockIdx.x) i++;
  while (i * (i + 1) / 2 > (int)blockIdx.x) i--;
  int j = blockIdx.x - i * (i + 1) / 2;
  A += blockIdx.y * stride; P += (size_t)blockIdx.y * padded * padded;
  u64 bits = largest_bits[blockIdx.y]; bool finite = isfinite(__longlong_as_double((long long)bits));
  double scale = ldexp(1.0, -exponent_of(bits));
  if (!finite && blockIdx.x == 0 && x == 0 && y == 0) atomicOr(verdict + blockIdx.y, NONFINITE);
  double trace = 0, square = 0;
  for (int r = y; r < 32; r += 8) {
    int row = 32 * i + r, col = 32 * j + x;
    double v = finite && row < n && col <= row ? (double)A[row * row_stride + col] * scale : 0.0;
    if (row == col) trace += v;
    square += (row == col ? 1.0 : 2.0) * v * v;
    tile[r][x] = v;
  }
  trace = warp_sum(trace); square = warp_sum(square);
  if (x == 0) { sums[0][y] = trace; sums[1][y] = square; }
  __syncthreads();
  for (int r = y; r < 32; r += 8) {
    if (i == j) P[(size_t)(32 * i + r) * padded + 32 * i + x] = r >= x ? tile[r][x] : tile[x][r];
    else {
      P[(size_t)(32 * i + r) * padded + 32 * j + x] = tile[r][x];
      P[(size_t)(32 * j + r) * padded + 32 * i + x] = tile[x][r];
    }
  }
  if (x == 0 && y == 0) {
    double a = 0, b = 0;
    for (int w = 0; w < 8; w++) { a += sums[0][w]; b += sums[1][w]; }
    moments[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = make_double2(a, b);
  }
}
