// A -= XV VX^T on the trailing rows and columns s .. n - 1. The product is symmetric: only tiles of the lower triangle are
// computed, and written to both sides.

#define TILE 64
#define DEPTH 16                 // columns of a stage
#define STAGES 3
#define LDT 20                   // row stride of a stage: conflict-free fragments
#define STAGE (TILE * LDT)

__device__ __forceinline__ void mma_16x8x8(double d[4], const double a[4], const double b[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3]) : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
__device__ __forceinline__ void copy16(double* shared, const double* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(inside ? 16 : 0) : "memory");
}

// grid (lower tiles, batch), block 128: four warps of 32 x 32. XV, VX: (batch, n, depth).
extern "C" __global__ void __launch_bounds__(128, 3) update(double* A, const double* XV, const double* VX, int n, int s, int depth) {
  extern __shared__ double stages[];   // STAGES x (rows of XV, rows of VX)
  int bi = (int)((sqrtf(8.0f * blockIdx.x + 1.0f) - 1.0f) * 0.5f);
  while ((bi + 1) * (bi + 2) / 2 <= (int)blockIdx.x) bi++;
  while (bi * (bi + 1) / 2 > (int)blockIdx.x) bi--;
  const int bj = blockIdx.x - bi * (bi + 1) / 2, i0 = s + bi * TILE, j0 = s + bj * TILE;
  const size_t mat = blockIdx.y;
  A += mat * n * n; XV += mat * n * depth; VX += mat * n * depth;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, wi = (warp >> 1) * 32, wj = (warp & 1) * 32;

  const int cr = threadIdx.x >> 3, cc = (threadIdx.x & 7) * 2;   // this thread copies rows cr + 16 q, columns cc, cc + 1
  auto fetch = [&](int k, int stage) {
    double* x = stages + stage * 2 * STAGE; double* y = x + STAGE;
#pragma unroll
    for (int q = 0; q < TILE / 16; q++) {
      int r = cr + 16 * q; bool ix = i0 + r < n, iy = j0 + r < n;
      copy16(x + r * LDT + cc, XV + (size_t)(ix ? i0 + r : s) * depth + k + cc, ix);
      copy16(y + r * LDT + cc, VX + (size_t)(iy ? j0 + r : s) * depth + k + cc, iy);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  double acc[2][4][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i * DEPTH, i);
  int stage = 0;
  for (int k = 0; k < depth; k += DEPTH) {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
    __syncthreads();
    if (k + (STAGES - 1) * DEPTH < depth) fetch(k + (STAGES - 1) * DEPTH, (stage + STAGES - 1) % STAGES);
    else asm volatile("cp.async.commit_group;" ::: "memory");
    const double* x = stages + stage * 2 * STAGE + (wi + g) * LDT + t; const double* y = stages + stage * 2 * STAGE + STAGE + (wj + g) * LDT + t;
#pragma unroll
    for (int kk = 0; kk < DEPTH; kk += 8) {
      double a[2][4], b[4][2];
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int v = 0; v < 4; v++) a[r][v] = x[(16 * r + 8 * (v & 1)) * LDT + kk + 4 * (v >> 1)];
#pragma unroll
      for (int c = 0; c < 4; c++)
#pragma unroll
        for (int v = 0; v < 2; v++) b[c][v] = y[8 * c * LDT + kk + 4 * v];
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) mma_16x8x8(acc[r][c], a[r], b[c]);
    }
    stage = (stage + 1) % STAGES;
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = i0 + wi + 16 * r + 8 * h + g, j = j0 + wj + 2 * t;
      if (i >= n) continue;
      double2 old[4];
#pragma unroll
      for (int c = 0; c < 4; c++) if (j + 8 * c < n) old[c] = *(const double2*)(A + (size_t)i * n + j + 8 * c);
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (j + 8 * c < n) {
          double2 v = make_double2(old[c].x - acc[r][c][2 * h], old[c].y - acc[r][c][2 * h + 1]);
          *(double2*)(A + (size_t)i * n + j + 8 * c) = v;
          if (bi != bj) { A[(size_t)(j + 8 * c) * n + i] = v.x; A[(size_t)(j + 8 * c + 1) * n + i] = v.y; }
        }
    }
}
