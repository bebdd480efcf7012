// Householder factorisation of one 32-column panel, every matrix of the batch at once: one cluster a matrix.
//
// A block holds 32 rows a warp in registers, in the layout of a tensor-core accumulator: with g = lane / 4, t = lane % 4,
// a[2r + h][c] is element (row 8r + 2t + h, column 8c + g) of the warp's 32 x 32 tile.
// The columns are first brought up to date with the aggregated pairs (X, V) of earlier panels: P -= XV VX^T.
// Each column costs one reduction over the cluster; it gives the norm, the products with later columns (the update) and
// with earlier reflectors (for T of the compact form H = I - V T V^T). Nothing here can break down: a zero column gives
// the identity.

__device__ __forceinline__ unsigned cluster_rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ unsigned cluster_size() { unsigned r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* bar) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(shared_address(bar)) : "memory"); }
__device__ __forceinline__ void barrier_expect(u64* bar, unsigned bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(shared_address(bar)), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_wait(u64* bar, unsigned parity) {
  asm volatile("{\n.reg .pred p;\nwait%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra wait%=;\n}" :: "r"(shared_address(bar)), "r"(parity) : "memory");
}
// stores v where block `rank` keeps *local, and counts the bytes on that block's barrier: no fence, no cluster-wide barrier
__device__ __forceinline__ void send(const double* local, u64* bar, unsigned rank, double v) {
  unsigned a, b;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(local)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(b) : "r"(shared_address(bar)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" :: "r"(a), "l"(__double_as_longlong(v)), "r"(b) : "memory");
}

#define MAXC 16
#define MAXW 16
#define LDV 36           // row stride of the staged V: conflict-free tensor-core fragments

struct Shared {
  double red[2][MAXW][NB];     // per warp: products of the column with every column
  double row[2][NB];           // first block: the pivot row
  double tot[2][MAXC][NB];     // as received: products per block of the cluster
  double piv[2][NB];           // as received: the pivot row
  u64 received[2];             // barriers
  double gram[NB][NB];         // gram[j][l] = v_l . v_j, l < j
  double T[NB][NB + 1], tmp[NB][NB + 1];
  double tau[NB];
};

// tile (32 x 32 at rows row0.. of the matrix, columns col0..) -= XV[rows] VX[col0..]^T over `depth` aggregated columns
__device__ __forceinline__ void bring_up_to_date(double a[8][4], const double* XV, const double* VX, int ld, int row0, int col0, int depth, int lane) {
  int g = lane >> 2, t = lane & 3;
  const double* y = VX + (size_t)(col0 + g) * ld + t;
  const double* x = XV + (size_t)(row0 + g) * ld + t;
#pragma unroll 2
  for (int k = 0; k < depth; k += 4) {
    double fa[4], fb[4];
#pragma unroll
    for (int c = 0; c < 4; c++) fa[c] = -y[(size_t)(8 * c) * ld + k];
#pragma unroll
    for (int r = 0; r < 4; r++) fb[r] = x[(size_t)(8 * r) * ld + k];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) mma_f64(a[2 * r][c], a[2 * r + 1][c], fa[c], fb[r]);   // transposed: D[column g][row 2t + h]
  }
}

// grid (cluster size, batch), cluster (size, 1, 1), block 32 * warps; the panel's rows k + 32 .. n - 1 are spread over all warps.
// A: (batch, n, n). XV, VX: (batch, n, ld) aggregated pairs, [X V] and [V X]; columns 0 .. depth - 1 are older panels, this
// panel's V goes to XV[:, depth + 32 ..] and VX[:, depth ..]. W = V T: (batch, n, 32). band: (batch, band columns, LDB).
extern "C" __global__ void __launch_bounds__(512, 1) panel(const double* A, int n, int k, double* XV, double* VX, int ld, int depth, double* W, double* band, long long band_stride) {
  extern __shared__ double dyn[];                    // staged V, 32 x LDV a warp
  __shared__ Shared sh;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, t = lane & 3;
  unsigned rank = cluster_rank(), C = cluster_size();
  size_t mat = blockIdx.y;
  A += mat * n * n; XV += mat * n * ld; VX += mat * n * ld; W += mat * n * NB; band += mat * band_stride + (size_t)k * LDB;
  int s = k + NB, m = n - s, row0 = ((int)rank * warps + warp) * NB;   // row0: in the panel
  bool first = rank == 0 && warp == 0;

  double a[8][4];
#pragma unroll
  for (int q = 0; q < 8; q++) {
    int row = row0 + 8 * (q >> 1) + 2 * t + (q & 1);
#pragma unroll
    for (int c = 0; c < 4; c++) a[q][c] = row < m ? A[(size_t)(s + row) * n + k + 8 * c + g] : 0.0;
  }
  if (depth && row0 < m) bring_up_to_date(a, XV, VX, ld, s + row0, k, depth, lane);
  if (threadIdx.x == 0) { barrier_init(&sh.received[0]); barrier_init(&sh.received[1]); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  cluster_sync();              // every block runs and has its barriers

#pragma unroll
  for (int c0 = 0; c0 < 4; c0++) {
#pragma unroll 1
    for (int jj = 0; jj < 8; jj++) {
      int j = 8 * c0 + jj, buf = j & 1;
      double x[8], p[4] = {0, 0, 0, 0};
#pragma unroll
      for (int q = 0; q < 8; q++) {
        x[q] = __shfl_sync(FULL, a[q][c0], jj * 4 + t);
        if (first && (q >> 1 < c0 || (q >> 1 == c0 && 2 * t + (q & 1) <= jj))) x[q] = 0.0;
#pragma unroll
        for (int c = 0; c < 4; c++) p[c] += x[q] * a[q][c];
      }
      { // sum over the four lanes of a column group; each lane keeps one of the four columns
        bool hi = lane & 1;
        double k0 = hi ? p[2] : p[0], k1 = hi ? p[3] : p[1], s0 = hi ? p[0] : p[2], s1 = hi ? p[1] : p[3];
        k0 += __shfl_xor_sync(FULL, s0, 1); k1 += __shfl_xor_sync(FULL, s1, 1);
        bool hi2 = lane & 2;
        double kk = hi2 ? k1 : k0, ss = hi2 ? k0 : k1;
        kk += __shfl_xor_sync(FULL, ss, 2);
        sh.red[buf][warp][8 * (2 * (lane & 1) + ((lane >> 1) & 1)) + g] = kk;
      }
      if (first && t == ((jj & 7) >> 1)) {            // row j = 8 c0 + 2t + h of the tile is the pivot row
#pragma unroll
        for (int c = 0; c < 4; c++) {
          sh.row[buf][8 * c + g] = (jj & 1) ? a[2 * c0 + 1][c] : a[2 * c0][c];
        }
      }
      if (threadIdx.x == 0 && C > 1) barrier_expect(&sh.received[buf], (C + 1) * NB * 8);
      __syncthreads();
      double gl = 0, pl;       // lane l: column l
      if (C == 1) {
        for (int w = 0; w < warps; w++) gl += sh.red[buf][w][lane];
        pl = sh.row[buf][lane];
      } else {
        for (unsigned r = warp; r < C; r += warps) {
          double v[4] = {0, 0, 0, 0};
          for (int w = 0; w < warps; w += 4)
  #pragma unroll
            for (int i = 0; i < 4; i++) if (w + i < warps) v[i] += sh.red[buf][w + i][lane];
          send(&sh.tot[buf][rank][lane], &sh.received[buf], r, (v[0] + v[1]) + (v[2] + v[3]));
          if (rank == 0) send(&sh.piv[buf][lane], &sh.received[buf], r, sh.row[buf][lane]);
        }
        barrier_wait(&sh.received[buf], (j >> 1) & 1);
        for (unsigned r = 0; r < C; r++) gl += sh.tot[buf][r][lane];
        pl = sh.piv[buf][lane];
      }
      double alpha = __shfl_sync(FULL, pl, j), sigma = __shfl_sync(FULL, gl, j);
      double tau, inv, beta;
      reflector(alpha, sigma, tau, beta, inv);
      double u = pl + gl * inv, f = lane > j ? tau * u : 0.0;
      if (warp == 0) {
        if (lane < j) sh.gram[j][lane] = u;
        if (lane == 0) sh.tau[j] = tau;
        if (rank == 0 && lane >= j) band[(size_t)lane * LDB + NB + j - lane] = lane == j ? beta : pl - f;
      }
      double fc[4];
#pragma unroll
      for (int c = 0; c < 4; c++) fc[c] = __shfl_sync(FULL, f, 8 * c + g);
#pragma unroll
      for (int q = 0; q < 8; q++) {
        double v = x[q] * inv;
        if (first && q >> 1 == c0 && 2 * t + (q & 1) == jj) v = 1.0;
#pragma unroll
        for (int c = 0; c < 4; c++) if (c >= c0) a[q][c] -= v * fc[c];
        if (g == jj) a[q][c0] = v;
      }
    }
  }
  // V to both aggregates (the compact form's T is built meanwhile)
  double* vs = dyn + (size_t)warp * NB * LDV;
#pragma unroll
  for (int q = 0; q < 8; q++) {
    int lr = 8 * (q >> 1) + 2 * t + (q & 1), row = row0 + lr;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int col = 8 * c + g;
      vs[lr * LDV + col] = a[q][c];
      if (row < m) { size_t o = (size_t)(s + row) * ld + depth + col; XV[o + NB] = a[q][c]; VX[o] = a[q][c]; }
    }
  }
  // T by doubling: T of [V1 V2] has the off-diagonal block -T1 (V1^T V2) T2
  __syncthreads();
  for (int i = threadIdx.x; i < NB * NB; i += blockDim.x) sh.T[i / NB][i % NB] = i / NB == i % NB ? sh.tau[i / NB] : 0.0;
  for (int h = 1; h < NB; h *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < NB / 2 * h; i += blockDim.x) {
      int blk = i / (h * h), r = blk * 2 * h + (i / h) % h, c = blk * 2 * h + h + i % h; double v = 0;
      for (int l = blk * 2 * h + h; l <= c; l++) v += sh.gram[l][r] * sh.T[l][c];
      sh.tmp[r][c] = v;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NB / 2 * h; i += blockDim.x) {
      int blk = i / (h * h), r = blk * 2 * h + (i / h) % h, c = blk * 2 * h + h + i % h; double v = 0;
      for (int l = r; l < blk * 2 * h + h; l++) v -= sh.T[r][l] * sh.tmp[l][c];
      sh.T[r][c] = v;
    }
  }
  __syncthreads();
  if (row0 < m) { // W = V T
    double ft[8][4];
#pragma unroll
    for (int kk = 0; kk < 8; kk++)
#pragma unroll
      for (int c = 0; c < 4; c++) if (4 * kk < 8 * c + 8) ft[kk][c] = sh.T[4 * kk + t][8 * c + g];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      double acc[4][2] = {};
#pragma unroll
      for (int kk = 0; kk < 8; kk++) {
        double fa = vs[(8 * r + g) * LDV + 4 * kk + t];
#pragma unroll
        for (int c = 0; c < 4; c++) if (4 * kk < 8 * c + 8) mma_f64(acc[c][0], acc[c][1], fa, ft[kk][c]);
      }
      int row = row0 + 8 * r + g;
      if (row < m)
#pragma unroll
        for (int c = 0; c < 4; c++) *(double2*)(W + (size_t)(s + row) * NB + 8 * c + 2 * t) = make_double2(acc[c][0], acc[c][1]);
    }
  }
  if (rank == C - 1 && warp == warps - 1) { // the diagonal block, lower half, into the band; offsets above 32 are zero
    double d[8][4];
#pragma unroll
    for (int q = 0; q < 8; q++)
#pragma unroll
      for (int c = 0; c < 4; c++) d[q][c] = A[(size_t)(k + 8 * (q >> 1) + 2 * t + (q & 1)) * n + k + 8 * c + g];
    if (depth) bring_up_to_date(d, XV, VX, ld, k, k, depth, lane);
#pragma unroll
    for (int q = 0; q < 8; q++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        int i = 8 * (q >> 1) + 2 * t + (q & 1), col = 8 * c + g;
        if (i >= col) band[(size_t)col * LDB + i - col] = d[q][c];
        // the band above column k + 32 * 1 stays zero from the start of the solve
      }
  }
  // a block leaves only after it has received all that others send it
}
