// Shared by every kernel of the two-stage eigensolver. Prepended to each source before it is compiled.
#define NB 32            // bandwidth after the first stage, and the width of a panel
#define LDB 64           // band storage: element (i, j) of the lower band, 0 <= i - j < LDB, lies at j * LDB + (i - j)
#define FULL 0xffffffffu
#define TINY 1e-280      // a squared norm below this is taken as zero: reflectors stay orthogonal, the loss is < 1e-139

typedef unsigned long long u64;

enum Verdict { NONFINITE = 1, TRACE = 2, FROBENIUS = 4, STUCK = 8 };

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}

// H = I - tau v v^T with v = (1, x * inv) takes (alpha, x) with |x|^2 = sigma to (beta, 0, ..). The hardware's approximations of
// rsqrt and 1 / x are good to about 2^-20; a cubic correction makes them good to the last bits, without division or branches.
__device__ __forceinline__ void reflector(double alpha, double sigma, double& tau, double& beta, double& inv) {
  tau = 0; inv = 0; beta = alpha;
  if (!(sigma < TINY)) {
    double s = fma(alpha, alpha, sigma), y, r, e;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(s));
    e = fma(-s * y, y, 1.0); y = fma(y * e, fma(0.375, e, 0.5), y);
    double size = fabs(alpha), norm = s * y, sum = size + norm;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(sum));
    e = fma(-sum, r, 1.0); r = fma(r * e, 1.0 + e, r);
    tau = fma(size, y, 1.0); beta = alpha >= 0 ? -norm : norm; inv = alpha >= 0 ? r : -r;
  }
}

// Tensor-core product of one 8x4 and one 4x8 tile: (d0, d1) += a * b. With g = lane / 4 and t = lane % 4 a lane holds
// a = A[g][t], b = B[t][g], d0 = D[g][2t], d1 = D[g][2t + 1].
__device__ __forceinline__ void mma_f64(double& d0, double& d1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+d"(d0), "+d"(d1) : "d"(a), "d"(b));
}
