// Band (32) -> tridiagonal by bulge chasing, values only. Sweep s annihilates column s below its subdiagonal and chases the
// bulge down in steps of 32 rows. Step k of a sweep acts on the columns r .. r + 31, r = s + 1 + 32 k: the diagonal block D
// (both sides) and the block B below it (from the right; then its first column is annihilated, from the left).
//
// A block owns GROUP consecutive sweeps (a macro of the build). It moves a window of the band through a ring in shared memory; sweep g of the group
// runs 2 g steps behind the first, so that the band crosses the L2 once for GROUP sweeps. Groups of one matrix follow each
// other through `progress` (steps completed by the group's last sweep). Groups are handed out by a ticket, so whatever a
// group waits for belongs to a block that runs already: no deadlock however few blocks are resident.
// What the last sweep of a group finishes goes straight to global memory.

#ifndef BLOCKS
#define BLOCKS 1                             // resident on a multiprocessor: shared memory allows no more from GROUP 4 on
#endif
#define RING (64 * GROUP)                    // columns
#define WORKERS (128 * GROUP)                // 4 warps a sweep
#define POLLS (1 << 24)                      // many seconds of waiting; only a fault gets there

struct alignas(16) Sweep {                   // what the four warps of a sweep share
  double v[2][NB], tau[2];                   // the reflector of the step, and of the next one (by parity)
  double y[2][NB], top[NB], z[2][NB];        // bulge: sums of a warp's 16 rows; the first row of B H; the row to take off
  double w[NB], c[2];                        // diagonal: tau D v; its product with v, of a warp's 16 rows
};

__device__ __forceinline__ int wrap(int slot) { return slot >= RING ? slot - RING : slot; }
// barriers 1 .. GROUP are a sweep's, then one for each pair of warps; 15 is the block's
__device__ __forceinline__ void sweep_sync(int g) { asm volatile("bar.sync %0, 128;" :: "r"(g + 1) : "memory"); }
__device__ __forceinline__ void pair_sync(int g, int role) { asm volatile("bar.sync %0, 64;" :: "r"(1 + GROUP + 2 * g + role) : "memory"); }
__device__ __forceinline__ void copy16(double* shared, const double* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ int load_acquire(const int* p) { int v; asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void store_release(int* p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }

__device__ __forceinline__ int steps(int s, int n) { return s >= n ? 0 : (n - 1 - s + NB - 1) / NB; }

struct Job {
  int mat, s0, n;
  double* band;
  int* progress;       // of this group; the one before lies before it
  int before, lead, last, rounds;   // steps of: the sweep before the group, its first sweep, its last; rounds of the block
};

__device__ __forceinline__ void block_sync() { asm volatile("bar.sync 15, %0;" :: "n"(WORKERS + 64) : "memory"); }   // met in different loops

// The loader warp brings one block of 32 columns a round, a round ahead of the first sweep.
__device__ __forceinline__ void load_loop(const Job& job, double* ring, int* verdict, int lane) {
  int ready = 0; bool stuck = false;           // steps that the group before has completed
  // block b: columns s0 + 1 + 32 b .. + 31; the slot of column j is (j - s0) mod RING
  auto load = [&](int b) {
    int need = job.s0 ? min(b + 2, job.before) : 0, polls = 0;
    while (ready < need && !stuck) {
      ready = load_acquire(job.progress - 1);
      if (ready >= need) break;
      if (++polls > POLLS || (polls % 1024 == 0 && (*(volatile int*)(verdict + job.mat) & STUCK))) { stuck = true; if (lane == 0) atomicOr(verdict + job.mat, STUCK); }
      if (polls > 256) __nanosleep(100);
    }
    __syncwarp();
    const double* from = job.band + (size_t)(job.s0 + 1 + NB * b) * LDB + 2 * lane; int slot = (1 + NB * b) % RING;
#pragma unroll 8
    for (int j = 0; j < NB; j++) copy16(ring + wrap(slot + j) * LDB + 2 * lane, from + j * LDB);
  };
  load(0);
  copy16(ring + 2 * lane, job.band + (size_t)job.s0 * LDB + 2 * lane);
  copy_wait();
  block_sync();
  for (int round = 0; round < job.rounds; round++) {
    if (round + 1 <= job.lead) load(round + 1);
    if (job.s0 && ready < job.before && !stuck) ready = load_acquire(job.progress - 1);
    copy_wait();
    block_sync();
  }
}

// Publishes, a round later, what the last sweep has completed. The barrier between makes the release cover the block's stores.
__device__ __forceinline__ void publish_loop(const Job& job, int lane) {
  block_sync();
  for (int round = 0; round < job.rounds; round++) {
    int done = min(round - 2 * (GROUP - 1), job.last);
    if (lane == 0 && done > 0) store_release(job.progress, done);
    __syncwarp();
    block_sync();
  }
  if (lane == 0) store_release(job.progress, 1 << 30);
}

// A warp holds 16 rows of a 32 x 32 block: with g = lane / 4, t = lane % 4 the rows 16 h + 8 r + g (r < 2) and the columns
// 4 t + i % 4 + 16 (i / 4) (i < 8). So sums over columns are mostly within a lane, sums over rows take three rounds, and the
// lanes fall on different banks.
__device__ __forceinline__ constexpr int column(int i) { return (i & 3) + 16 * (i >> 2); }   // less 4 t
__device__ __forceinline__ void load8(double x[8], const double* p) {   // p: of column 4 t
#pragma unroll
  for (int i = 0; i < 8; i += 2) { double2 y = *(const double2*)(p + column(i)); x[i] = y.x; x[i + 1] = y.y; }
}
__device__ __forceinline__ double sum_over_columns(double x) { x += __shfl_xor_sync(FULL, x, 1); return x + __shfl_xor_sync(FULL, x, 2); }
// Sums over g of eight values; a lane keeps the one of column kept_column(lane).
__device__ __forceinline__ int kept_column(int lane) { return 4 * (lane & 3) + 16 * (lane >> 4) + 2 * ((lane >> 3) & 1) + ((lane >> 2) & 1); }
__device__ __forceinline__ double sum_over_rows(double y[8], int lane) {
#pragma unroll
  for (int half = 4; half; half >>= 1) {
    const bool high = lane & (4 * half);
#pragma unroll
    for (int i = 0; i < half; i++) { double keep = high ? y[i + half] : y[i], give = high ? y[i] : y[i + half]; y[i] = keep + __shfl_xor_sync(FULL, give, 4 * half); }
  }
  return y[0];
}

// Two warps chase the bulge: B <- H2 B H, and make the next reflector.
__device__ __forceinline__ void bulge_loop(const Job& job, double* ring, Sweep& sw, double* d, double* e, int sweep, int h, int lane) {
  const int s = job.s0 + sweep, count = steps(s, job.n), t4 = 4 * (lane & 3), row = 16 * h + (lane >> 2), kept = kept_column(lane);
  const bool out = sweep == GROUP - 1;
  int base = 1 + sweep;                        // slot of column r
  block_sync();
  for (int round = 0; round < job.rounds; round++) {
    const int k = round - 2 * sweep, now = k & 1;
    if (k == 0 && s < job.n) {
      if (h == 0) {
        const double* col = ring + sweep * LDB;
        double x = col[1 + lane], tau, inv, beta;
        reflector(__shfl_sync(FULL, x, 0), warp_sum(lane ? x * x : 0.0), tau, beta, inv);
        sw.v[0][lane] = lane ? x * inv : 1.0;
        if (lane == 0) { sw.tau[0] = tau; d[s] = col[0]; e[s] = beta; }
        __syncwarp();
      }
      sweep_sync(sweep);
    }
    if (k >= 0 && k < count) {
      const bool whole = base <= RING - NB;    // the columns do not wrap in the ring
      double B[2][8], vc[8], x[2], y[8];
      double* const p = ring + base * LDB + NB + row + t4 * (LDB - 1);
      if (whole) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) B[r][i] = p[8 * r + column(i) * (LDB - 1)];
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) B[r][i] = ring[wrap(base + t4 + column(i)) * LDB + NB + row + 8 * r - t4 - column(i)];
      }
      load8(vc, sw.v[now] + t4);
      const double tau = sw.tau[now], b0 = ring[base * LDB + NB + row], b1 = ring[base * LDB + NB + row + 8];   // the first column
#pragma unroll
      for (int r = 0; r < 2; r++) {
        double u0 = 0, u1 = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) { u0 += B[r][i] * vc[i]; u1 += B[r][i + 4] * vc[i + 4]; }
        double u = tau * sum_over_columns(u0 + u1);
        x[r] = (r ? b1 : b0) - u;              // the first column of B H (v[0] = 1)
#pragma unroll
        for (int i = 0; i < 8; i++) B[r][i] -= u * vc[i];
      }
      if (row == 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) sw.top[t4 + column(i)] = B[0][i];
      }
      const double below = row ? x[0] : 0.0;
#pragma unroll
      for (int i = 0; i < 8; i++) y[i] = below * B[0][i] + x[1] * B[1][i];
      sw.y[h][kept] = sum_over_rows(y, lane);  // x below the first row, times B H; in the first column its own square
      pair_sync(sweep, 0);
      double tau2, beta, inv;
      reflector(sw.top[0], sw.y[0][0] + sw.y[1][0], tau2, beta, inv);
      sw.z[h][kept] = tau2 * (sw.top[kept] + (sw.y[0][kept] + sw.y[1][kept]) * inv);
      const double v0 = row ? x[0] * inv : 1.0, v1 = x[1] * inv;
      if (t4 == 0) { sw.v[now ^ 1][row] = v0; sw.v[now ^ 1][row + 8] = v1; }
      if (row == 0 && t4 == 0) sw.tau[now ^ 1] = tau2;
      __syncwarp();
      load8(y, sw.z[h] + t4);
#pragma unroll
      for (int i = 0; i < 8; i++) { B[0][i] -= v0 * y[i]; B[1][i] -= v1 * y[i]; }
      if (t4 == 0) { B[0][0] = row ? 0.0 : beta; B[1][0] = 0.0; }
      if (out) {
        double* o = job.band + (size_t)(s + 1 + NB * k) * LDB + NB + row + t4 * (LDB - 1);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) o[8 * r + column(i) * (LDB - 1)] = B[r][i];
      } else if (whole) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) p[8 * r + column(i) * (LDB - 1)] = B[r][i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) ring[wrap(base + t4 + column(i)) * LDB + NB + row + 8 * r - t4 - column(i)] = B[r][i];
      }
      base = wrap(base + NB);
    }
    block_sync();
  }
}

// Two warps keep the diagonal block: D <- H D H.
__device__ __forceinline__ void diagonal_loop(const Job& job, double* ring, Sweep& sw, int sweep, int h, int lane) {
  const int s = job.s0 + sweep, count = steps(s, job.n), t4 = 4 * (lane & 3), row = 16 * h + (lane >> 2), diag = row - t4;
  const bool out = sweep == GROUP - 1;
  int base = 1 + sweep;
  block_sync();
  for (int round = 0; round < job.rounds; round++) {
    const int k = round - 2 * sweep, now = k & 1;
    if (k == 0 && s < job.n) sweep_sync(sweep);
    if (k >= 0 && k < count) {
      const bool whole = base <= RING - NB;
      double D[2][8], vc[8], wc[8], w[2], c = 0;
      double* const low = ring + base * LDB + row + t4 * (LDB - 1);   // column 4 t; `high`: the same element, mirrored
      const double* const high = ring + base * LDB + t4 + row * (LDB - 1);
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const bool lower = column(i) - 8 * r <= diag;
          if (whole) D[r][i] = *(lower ? low + 8 * r + column(i) * (LDB - 1) : high + 8 * r * (LDB - 1) + column(i));
          else { int a = row + 8 * r, b = t4 + column(i), i0 = lower ? b : a, i1 = lower ? a : b; D[r][i] = ring[wrap(base + i0) * LDB + i1 - i0]; }
        }
      load8(vc, sw.v[now] + t4);
      const double tau = sw.tau[now], vr[2] = {sw.v[now][row], sw.v[now][row + 8]};
#pragma unroll
      for (int r = 0; r < 2; r++) {
        double u0 = 0, u1 = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) { u0 += D[r][i] * vc[i]; u1 += D[r][i + 4] * vc[i + 4]; }
        w[r] = tau * sum_over_columns(u0 + u1); c += w[r] * vr[r];
      }
      c += __shfl_xor_sync(FULL, c, 4); c += __shfl_xor_sync(FULL, c, 8); c += __shfl_xor_sync(FULL, c, 16);
      if (t4 == 0) { sw.w[row] = w[0]; sw.w[row + 8] = w[1]; }
      if (lane == 0) sw.c[h] = c;
      __syncwarp();
      pair_sync(sweep, 1);
      load8(wc, sw.w + t4);
      c = 0.5 * tau * (sw.c[0] + sw.c[1]);
#pragma unroll
      for (int i = 0; i < 8; i++) wc[i] -= c * vc[i];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        w[r] -= c * vr[r];
#pragma unroll
        for (int i = 0; i < 8; i++) D[r][i] -= vr[r] * wc[i] + w[r] * vc[i];
      }
      if (out) {
        double* o = job.band + (size_t)(s + 1 + NB * k) * LDB + row + t4 * (LDB - 1);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (column(i) - 8 * r <= diag) o[8 * r + column(i) * (LDB - 1)] = D[r][i];
      } else if (whole) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (column(i) - 8 * r <= diag) low[8 * r + column(i) * (LDB - 1)] = D[r][i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (column(i) - 8 * r <= diag) ring[wrap(base + t4 + column(i)) * LDB + row + 8 * r - t4 - column(i)] = D[r][i];
      }
      if (out && k) // columns whose bulge an earlier sweep of the group annihilated: clear what global memory still holds of it
        for (int back = 1 + h; back < GROUP; back += 2)
          if (NB + back + lane < LDB) job.band[(size_t)(s + 1 + NB * k - back) * LDB + NB + back + lane] = 0.0;
      base = wrap(base + NB);
    }
    block_sync();
  }
}

// grid: resident blocks, block 128 * GROUP + 64. band: (batch, stride) zero beyond column n - 1 for at least 64 columns.
// d, e: (batch, ldt). progress: (batch, groups) and ticket start at 0.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, BLOCKS) chase(double* bands, long long band_stride, int n, int batch, int groups, double* d, double* e, int ldt, int* progress, int* ticket, int* verdict) {
  extern __shared__ double ring[];
  __shared__ Sweep sweeps[GROUP];
  __shared__ int next;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  while (true) {
    if (threadIdx.x == 0) next = atomicAdd(ticket, 1);
    __syncthreads();
    const int mine = next;
    __syncthreads();
    if (mine >= batch * groups) return;
    Job job;
    const int group = mine / batch;
    job.mat = mine % batch; job.s0 = group * GROUP; job.n = n;
    job.band = bands + job.mat * band_stride; job.progress = progress + (size_t)job.mat * groups + group;
    job.lead = steps(job.s0, n); job.before = group ? steps(job.s0 - 1, n) : 0; job.last = steps(job.s0 + GROUP - 1, n);
    job.rounds = 0;
    for (int i = 0; i < GROUP; i++) if (job.s0 + i < n) job.rounds = max(job.rounds, 2 * i + max(1, steps(job.s0 + i, n)));
    const int g = (warp >> 1) % GROUP;         // the scheduler of a warp is warp % 4: this mixes the roles on each
    if (warp < 2 * GROUP) bulge_loop(job, ring, sweeps[g], d + (size_t)job.mat * ldt, e + (size_t)job.mat * ldt, g, warp & 1, lane);
    else if (warp < 4 * GROUP) diagonal_loop(job, ring, sweeps[g], g, warp & 1, lane);
    else if (warp == 4 * GROUP) load_loop(job, ring, verdict, lane);
    else publish_loop(job, lane);
  }
}
