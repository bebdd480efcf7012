// From Z = A W (A not yet updated by the aggregated pairs) to X, so that the two-sided transform is A - X V^T - V X^T:
//   M = VX^T W,  Z' = Z - XV M,  N = W^T Z',  X = Z' - V N / 2.
// With XV = [X V ...] and VX = [V X ...] in groups of 64 columns, XV^T W is M with the halves of each group swapped, so one
// pass over the rows (products) gives all that N needs, and a second one (pairs) gives X.

__device__ __forceinline__ unsigned cluster_rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ unsigned cluster_size() { unsigned r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ double load_remote(const double* local, unsigned rank) {
  unsigned a = (unsigned)__cvta_generic_to_shared(local), r; double v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(r) : "memory");
  return v;
}

#define PW 16            // warps of products

// G = [VX(:, :depth) | Z]^T W over rows s .. n - 1: (batch, ldg, 32), depth + 32 rows of it.
// grid (cluster size, batch), cluster (size, 1, 1), block 512. A warp makes 16 rows of G from one of `split` shares of its block's rows.
extern "C" __global__ void __launch_bounds__(32 * PW, 1) products(const double* VX, int ld, int depth, const double* Z, const double* W, double* G, int ldg, int n, int s) {
  extern __shared__ double part[];                   // split x (depth + 32) x 32
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  unsigned rank = cluster_rank(), C = cluster_size();
  size_t mat = blockIdx.y; VX += mat * n * ld; Z += mat * n * NB; W += mat * n * NB; G += mat * ldg * NB;
  int units = depth / 16 + 2, split = units <= 2 ? 8 : units <= 4 ? 4 : units <= 8 ? 2 : 1;
  int tiles = (n - s) / NB, share = (int)C * split, rows = (tiles + share - 1) / share * NB;
  for (int job = warp; job < units * split; job += PW) {
    int unit = job % units, piece = job / units;
    int i0 = s + ((int)rank * split + piece) * rows, i1 = min(n, i0 + rows);
    const double* a; int lda;
    if (unit < depth / 16) { a = VX + unit * 16; lda = ld; } else { a = Z + (unit * 16 - depth); lda = NB; }
    a += (size_t)(i0 + t) * lda + g; const double* b = W + (size_t)(i0 + t) * NB + g;
    double acc[2][4][2] = {};
#pragma unroll 4
    for (int i = i0; i < i1; i += 4) {
      double fa[2], fb[4];
      fa[0] = a[0]; fa[1] = a[8];
#pragma unroll
      for (int c = 0; c < 4; c++) fb[c] = b[8 * c];
      a += (size_t)4 * lda; b += 4 * NB;
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) mma_f64(acc[r][c][0], acc[r][c][1], fa[r], fb[c]);
    }
    double* o = part + ((size_t)piece * (depth + NB) + unit * 16 + g) * NB + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) *(double2*)(o + 8 * r * NB + 8 * c) = make_double2(acc[r][c][0], acc[r][c][1]);
  }
  __syncthreads();
  int total = (depth + NB) * NB;
  if (split > 1) {
    for (int i = threadIdx.x; i < total; i += blockDim.x) { double v = part[i]; for (int p = 1; p < split; p++) v += part[(size_t)p * total + i]; part[i] = v; }
    __syncthreads();
  }
  cluster_sync();
  for (int i = (int)rank * blockDim.x + threadIdx.x; i < total; i += (int)C * blockDim.x) {
    double v = 0;
    for (unsigned r = 0; r < C; r++) v += load_remote(part + i, r);
    G[i] = v;
  }
  cluster_sync();
}

#define LDM 36

// grid (row blocks of 128, batch), block 128
extern "C" __global__ void __launch_bounds__(128) pairs(double* XV, double* VX, int ld, int depth, const double* Z, const double* G, int ldg, int n, int s) {
  extern __shared__ double M[];                      // (depth + 32) x LDM
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  size_t mat = blockIdx.y; XV += mat * n * ld; VX += mat * n * ld; Z += mat * n * NB; G += mat * ldg * NB;
  for (int i = threadIdx.x; i < (depth + NB) * NB; i += blockDim.x) M[(i >> 5) * LDM + (i & 31)] = G[i];
  __syncthreads();
  double nn[4][2];
#pragma unroll
  for (int c = 0; c < 4; c++) { // row 8 warp + g of N, columns 8c + 2t, + 1: starts as (Z^T W)^T
    nn[c][0] = M[(depth + 8 * c + 2 * t) * LDM + 8 * warp + g]; nn[c][1] = M[(depth + 8 * c + 2 * t + 1) * LDM + 8 * warp + g];
  }
  for (int k = 0; k < depth; k += 4) {
    double fa = -M[((k + t) ^ 32) * LDM + 8 * warp + g];
#pragma unroll
    for (int c = 0; c < 4; c++) mma_f64(nn[c][0], nn[c][1], fa, M[(k + t) * LDM + 8 * c + g]);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 4; c++) *(double2*)(M + (depth + 8 * warp + g) * LDM + 8 * c + 2 * t) = make_double2(0.5 * nn[c][0], 0.5 * nn[c][1]);
  __syncthreads();
  int row = s + (blockIdx.x * 4 + warp) * NB + g;
  if (row - g >= n) return;
  double acc[4][4][2];
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) { double2 z = *(const double2*)(Z + (size_t)(row + 8 * r) * NB + 8 * c + 2 * t); acc[r][c][0] = z.x; acc[r][c][1] = z.y; }
  const double* x = XV + (size_t)row * ld + t;
#pragma unroll 2
  for (int k = 0; k < depth + NB; k += 4) {
    double fa[4], fb[4]; int col = k < depth ? k : k + NB;
#pragma unroll
    for (int r = 0; r < 4; r++) fa[r] = -x[(size_t)(8 * r) * ld + col];
#pragma unroll
    for (int c = 0; c < 4; c++) fb[c] = M[(k + t) * LDM + 8 * c + g];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) mma_f64(acc[r][c][0], acc[r][c][1], fa[r], fb[c]);
  }
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      size_t o = (size_t)(row + 8 * r) * ld + depth + 8 * c + 2 * t; double2 v = make_double2(acc[r][c][0], acc[r][c][1]);
      *(double2*)(XV + o) = v; *(double2*)(VX + o + NB) = v;
    }
}
