// Eigenvalues of symmetric tridiagonal matrices by bisection on Sturm counts, and the check of every result.
//
// The counts come from p_i = (d_i - x) p_{i-1} - e_{i-1}^2 p_{i-2} (three operations a step, no division). The matrix is
// scaled to norm <= 1, so eight steps grow p by less than 3^8; e^2 is kept at or above FLOOR, so they shrink it by less
// than FLOOR^8; p is rescaled every eight steps. The floor moves no eigenvalue by more than 2e-17 of the norm.
#define FLOOR 1e-34
#define HALVINGS 60
#define TILE 512
#define BLOCK 128

struct Range { double lo, hi, exponent; };

static __device__ double block_reduce(double v, bool take_max, double* shared) {
  __syncthreads();
#pragma unroll
  for (int o = 16; o; o >>= 1) { double x = __shfl_xor_sync(FULL, v, o); v = take_max ? fmax(v, x) : v + x; }
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  v = shared[0];
  for (int w = 1; w < blockDim.x >> 5; w++) v = take_max ? fmax(v, shared[w]) : v + shared[w];
  return v;
}

// grid batch, block 256. de: (batch, ldt) pairs (d_i, e_{i-1}^2) scaled by 2^-range.exponent; range: bounds of the scaled spectrum
extern "C" __global__ void bounds(const double* ds, const double* es, int ldt, int n, double2* de, Range* range) {
  __shared__ double shared[8];
  const double* d = ds + (size_t)blockIdx.x * ldt; const double* e = es + (size_t)blockIdx.x * ldt; de += (size_t)blockIdx.x * ldt;
  double up = -1e300, down = -1e300, radius = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    double r = (i ? fabs(e[i - 1]) : 0.0) + (i < n - 1 ? fabs(e[i]) : 0.0);
    up = fmax(up, d[i] + r); down = fmax(down, r - d[i]); radius = fmax(radius, fabs(d[i]) + r);
  }
  up = block_reduce(up, true, shared); down = block_reduce(down, true, shared); radius = block_reduce(radius, true, shared);
  int ex = 0;
  if (radius > 0 && isfinite(radius)) frexp(radius, &ex);
  ex = max(ex, -1000);
  double scale = ldexp(1.0, -ex);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    double t = i ? e[i - 1] * scale : 0.0;
    de[i] = make_double2(d[i] * scale, fmax(t * t, FLOOR));
  }
  if (threadIdx.x == 0) range[blockIdx.x] = {-down * scale - 0x1p-50, up * scale + 0x1p-50, (double)ex};
}

// count[i] = how many eigenvalues lie below x[i], for POINTS shifts at once (they hide each other's latency)
template <int POINTS> __device__ __forceinline__ void sturm(const double2* de, int n, double2* tile, const double x[POINTS], int count[POINTS]) {
  double p[POINTS], before[POINTS];
#pragma unroll
  for (int i = 0; i < POINTS; i++) { p[i] = 1.0; before[i] = 0.0; count[i] = 0; }
  for (int base = 0; base < n; base += TILE) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += BLOCK) tile[i] = base + i < n ? de[base + i] : make_double2(4.0, FLOOR); // beyond n: no sign change
    __syncthreads();
    const int m = min(TILE, n - base);
    for (int j = 0; j < m; j += 8) {
#pragma unroll
      for (int u = 0; u < 8; u++) {
        const double2 t = tile[j + u];
#pragma unroll
        for (int i = 0; i < POINTS; i++) {
          double next = fma(t.x - x[i], p[i], -t.y * before[i]);
          count[i] += (unsigned)(__double2hiint(next) ^ __double2hiint(p[i])) >> 31;
          before[i] = p[i]; p[i] = next;
        }
      }
#pragma unroll
      for (int i = 0; i < POINTS; i++) {
        int ex = max(__double2hiint(p[i]) & 0x7ff00000, __double2hiint(before[i]) & 0x7ff00000);
        double f = __hiloint2double(min(0x7fd00000, 2 * (1023 << 20) - ex), 0);
        p[i] *= f; before[i] *= f;
      }
    }
  }
}

__device__ __forceinline__ double grid_point(Range r, int n, int i) { return r.lo + (r.hi - r.lo) * ((i + 1) / (n + 1.0)); }

// Counts at n equidistant points, for all eigenvalues of a matrix to start from. grid (ceil(n / BLOCK), batch). counts: (batch, ldt)
extern "C" __global__ void __launch_bounds__(BLOCK) survey(const double2* de, const Range* range, int ldt, int n, int* counts) {
  __shared__ double2 tile[TILE];
  int k = blockIdx.x * BLOCK + threadIdx.x, count[1]; double x[1] = {grid_point(range[blockIdx.y], n, k)};
  sturm<1>(de + (size_t)blockIdx.y * ldt, n, tile, x, count);
  if (k < n) counts[(size_t)blockIdx.y * ldt + k] = count[0];
}

// One eigenvalue a thread, POINTS shifts a round: 1 where the device is full of threads, 3 where latency rules.
template <int POINTS> __device__ __forceinline__ void bisection(const double2* de, const Range r, int n, const int* counts, double2* tile, double* eigs) {
  const int k = blockIdx.x * BLOCK + threadIdx.x;
  int below = -1, above = n;                   // grid points with count <= k, > k
  while (above - below > 1) { int mid = (below + above) / 2; if (counts[mid] > k) above = mid; else below = mid; }
  double lo = below < 0 ? r.lo : grid_point(r, n, below), hi = above == n ? r.hi : grid_point(r, n, above);
  for (int bits = HALVINGS - (31 - __clz(n + 1)); bits > 0; bits -= (POINTS + 1) / 2) {
    double x[POINTS]; int count[POINTS], j = 0;
#pragma unroll
    for (int i = 0; i < POINTS; i++) x[i] = lo + (hi - lo) * ((i + 1) / (POINTS + 1.0));
    sturm<POINTS>(de, n, tile, x, count);
#pragma unroll
    for (int i = 0; i < POINTS; i++) if (j == i && count[i] <= k) { lo = x[i]; j++; }
#pragma unroll
    for (int i = 0; i < POINTS; i++) if (j == i) hi = x[i];
  }
  if (k < n) eigs[k] = 0.5 * (lo + hi);
}

// Same grid as survey. eigs: (batch, ldt), in units of `de`
extern "C" __global__ void __launch_bounds__(BLOCK) bisect(const double2* de, const Range* range, int ldt, int n, const int* counts, double* eigs) {
  __shared__ double2 tile[TILE];
  size_t o = (size_t)blockIdx.y * ldt;
  bisection<1>(de + o, range[blockIdx.y], n, counts + o, tile, eigs + o);
}
extern "C" __global__ void __launch_bounds__(BLOCK) multisect(const double2* de, const Range* range, int ldt, int n, const int* counts, double* eigs) {
  __shared__ double2 tile[TILE];
  size_t o = (size_t)blockIdx.y * ldt;
  bisection<3>(de + o, range[blockIdx.y], n, counts + o, tile, eigs + o);
}

// grid batch, block 256. Ascending order (rounding can swap neighbours by an ulp), trace and Frobenius norm against the
// matrix's own, units put back. out: (batch, n)
extern "C" __global__ void finish(const double* eigs, const Range* range, int ldt, int n, const double2* moments, int tiles, const u64* largest_bits, double tolerance, double* out, int* verdict) {
  __shared__ double shared[8], chunk_max[256];
  int mat = blockIdx.x; eigs += (size_t)mat * ldt; out += (size_t)mat * n; moments += (size_t)mat * tiles;
  double trace = 0, square = 0;
  for (int i = threadIdx.x; i < tiles; i += blockDim.x) { trace += moments[i].x; square += moments[i].y; }
  trace = block_reduce(trace, false, shared); square = block_reduce(square, false, shared);
  double unit = ldexp(1.0, (int)range[mat].exponent);
  int chunk = (n + 255) / 256, i0 = threadIdx.x * chunk, i1 = min(n, i0 + chunk);
  double top = -1e300, sum = 0, abs_sum = 0, sum2 = 0;
  for (int i = i0; i < i1; i++) { double v = eigs[i] * unit; top = fmax(top, v); sum += v; abs_sum += fabs(v); sum2 += v * v; }
  chunk_max[threadIdx.x] = top;
  sum = block_reduce(sum, false, shared); abs_sum = block_reduce(abs_sum, false, shared); sum2 = block_reduce(sum2, false, shared);
  double run = -1e300;
  for (int c = 0; c < (int)threadIdx.x; c++) run = fmax(run, chunk_max[c]);
  u64 bits = largest_bits[mat]; double big = __longlong_as_double((long long)bits); int ex = 0;
  if (big > 0 && isfinite(big)) frexp(big, &ex);
  ex = max(ex, -1000);
  bool finite = isfinite(big);
  for (int i = i0; i < i1; i++) { run = fmax(run, eigs[i] * unit); out[i] = !finite ? __longlong_as_double(0x7ff8000000000000LL) : bits ? ldexp(run, ex) : 0.0; }
  if (threadIdx.x == 0 && bits && finite) {
    int bad = 0;
    if (!(fabs(sum - trace) <= tolerance * abs_sum)) bad |= TRACE;
    if (!(fabs(sum2 - square) <= 2 * tolerance * square)) bad |= FROBENIUS;
    if (bad) atomicOr(verdict + mat, bad);
  }
}
