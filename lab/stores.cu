// What it takes to store a [rows, cols] matrix of bfloat16, tile by tile, where its rows are no whole sectors or lines. No product.
//
//   nvcc -arch=sm_90a -std=c++17 -o stores lab/stores.cu -lcuda && ./stores
//
// Microseconds behind an emptied L2, pattern/columns of a tile: 0 boxes of 64 columns as TMA stores them (128-byte swizzle),
// 3 boxes as wide as the tile (no swizzle), 5 16 bytes a lane, 7 a bulk copy for each row of a tile, 9 and 10 the same two from
// a whole line to a whole line, 2 bulk copies of whole rows that follow each other, 11 likewise by 16 bytes a lane, 12 boxes of
// 64 columns of every other row, of odd ones eight columns further left, 13 the same with what two tiles both store.
// Patterns 5, 7, 9 and 10 are limited by 256 threads to a multiprocessor, not by memory.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdint>
#include <vector>
#include <algorithm>

__device__ void put(char* to, uint4 v) { *reinterpret_cast<uint4*>(to) = v; }
template <int WIDE>
__global__ void __launch_bounds__(256) store(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap wide, const __grid_constant__ CUtensorMap even, const __grid_constant__ CUtensorMap odd, const __grid_constant__ CUtensorMap first, char* y, int rows, int cols, int pattern) {
  extern __shared__ __align__(1024) char smem[];
  uint32_t s = (uint32_t)__cvta_generic_to_shared(smem);
  constexpr int TM = 16384 / WIDE;
  int tm = (rows + TM - 1) / TM, tn = (cols + WIDE - 1) / WIDE;
  auto commit = [&] {
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
  };
  auto box = [&](const CUtensorMap& m, int c, int r) {
    if (c >= cols) return;
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&m), "r"(s), "r"(c), "r"(r) : "memory");
  };
  auto bulk = [&](char* to, uint32_t n) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(s), "r"(n) : "memory");
  };
  if (pattern == 2) {
    if (threadIdx.x == 0)
    for (int r = blockIdx.x; r < (rows + 127) / 128; r += gridDim.x) {
      size_t from = (size_t)r * 128 * cols * 2, end = min((size_t)(r + 1) * 128, (size_t)rows) * cols * 2;
      for (; from < end; from += 32768) { bulk(y + from, (uint32_t)min((size_t)32768, end - from)); commit(); }
    }
  } else if (pattern == 11) {
    for (int r = blockIdx.x; r < (rows + 127) / 128; r += gridDim.x) {
      size_t from = (size_t)r * 128 * cols * 2, end = min((size_t)(r + 1) * 128, (size_t)rows) * cols * 2;
      for (from += threadIdx.x * 16; from < end; from += 256 * 16) put(y + from, *reinterpret_cast<uint4*>(smem + threadIdx.x * 16));
    }
  } else {
    for (int t = blockIdx.x; t < tm * tn; t += gridDim.x) {
      int r0 = t / tn * TM, c0 = t % tn * WIDE;
      if (pattern == 0) {
        if (threadIdx.x == 0) { for (int j = 0; j < WIDE; j += 64) for (int i = 0; i < TM; i += 64) box(map, c0 + j, r0 + i); commit(); }
      } else if (pattern == 3) {
        if (threadIdx.x == 0) { for (int i = 0; i < TM; i += 64) box(wide, c0, r0 + i); commit(); }
      } else if (pattern == 12 || pattern == 13) {
        if (threadIdx.x == 0) {
          for (int i = 0; i < TM; i += 64)
            for (int j = 0; j < WIDE; j += 64) {
              if (r0 + i < rows) box(even, c0 + j, (r0 + i) / 2);
              if (r0 + i + 1 >= rows) continue;
              if (c0 > 0) box(odd, c0 + j - 8, (r0 + i) / 2);
              else if (j < WIDE - 8) box(pattern == 12 ? first : odd, j, (r0 + i) / 2);
            }
          commit();
        }
      } else if (pattern == 7 || pattern == 9) {
        if (threadIdx.x < 32) {
          for (int r = r0 + threadIdx.x; r < min(r0 + TM, rows); r += 32) {
            size_t at = (size_t)r * cols * 2, end = at + cols * 2, from = at + c0 * 2, to = from + WIDE * 2;
            if (pattern == 9) { from = c0 ? (from + 127) / 128 * 128 : from; to = (to + 127) / 128 * 128; }
            to = min(to, end);
            if (from < to) bulk(y + from, (uint32_t)(to - from));
          }
          commit();
        }
      } else {
        constexpr int LANES = WIDE / 8;
        for (int r = r0 + threadIdx.x / LANES; r < min(r0 + TM, rows); r += 256 / LANES) {
          size_t at = (size_t)r * cols * 2, end = at + cols * 2, from = at + c0 * 2, to = from + WIDE * 2;
          if (pattern == 10) { from = c0 ? (from + 127) / 128 * 128 : from; to = (to + 127) / 128 * 128; }
          to = min(to, end);
          for (from += threadIdx.x % LANES * 16; from < to; from += LANES * 16) put(y + from, *reinterpret_cast<uint4*>(smem + threadIdx.x * 16));
        }
      }
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
template <int WIDE> void run(char* y, int rows, int cols, int pattern) {
  CUtensorMap map, wide, even, odd, first;
  cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)cols * 2};
  cuuint32_t boxes[2] = {64, 64}, es[2] = {1, 1}, widebox[2] = {WIDE, 64};
  cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y, dims, strides, boxes, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  cuTensorMapEncodeTiled(&wide, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y, dims, strides, widebox, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  for (int i = 0; i < 3; ++i) {
    cuuint64_t d[2] = {(cuuint64_t)(i == 2 ? std::min(cols, WIDE - 8) : cols), (cuuint64_t)(rows + 1 - (i > 0)) / 2}, twice[1] = {(cuuint64_t)cols * 4};
    cuuint32_t half[2] = {64, 32};
    cuTensorMapEncodeTiled(i == 0 ? &even : i == 1 ? &odd : &first, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y + (i > 0) * cols * 2, d, twice, half, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  cudaFuncSetAttribute(store<WIDE>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  store<WIDE><<<132, 256, 65536>>>(map, wide, even, odd, first, y, rows, cols, pattern);
}
int main() {
  int sizes[][2] = {{78528, 280}, {78528, 256}, {119648, 144}, {119648, 128}, {44488, 568}, {44488, 512}, {36176, 1464}, {36176, 1408}, {16600, 5912}, {30720, 5768}, {16600, 5888}, {131072, 64}, {262144, 56}, {262144, 16}, {39816, 416}, {14952, 3832}, {8472, 8336}, {88480, 56}};
  cudaSetDevice(0);
  cudaDeviceProp pr; cudaGetDeviceProperties(&pr, 0); printf("%s\n", pr.name);
  char *y[4], *flush; size_t most = 400ull << 20;
  for (auto& p : y) cudaMalloc(&p, most);
  cudaMalloc(&flush, 256 << 20);
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  for (auto& s : sizes) {
    int rows = s[0], cols = s[1];
    printf("%d x %d, %.1f MB:", rows, cols, rows * 2e-6 * cols);
    int patterns[][2] = {{0, 128}, {3, 128}, {3, 256}, {7, 128}, {7, 256}, {9, 128}, {9, 256}, {5, 64}, {5, 128}, {5, 256}, {10, 128}, {10, 256}, {2, 128}, {11, 128}, {12, 64}, {12, 128}, {12, 256}, {13, 128}};
    for (auto& p : patterns) {
      std::vector<float> t;
      for (int i = 0; i < 12; ++i) {
        cudaMemsetAsync(flush, 0, 256 << 20);
        cudaEventRecord(a);
        p[1] == 64 ? run<64>(y[i % 4], rows, cols, p[0]) : p[1] == 128 ? run<128>(y[i % 4], rows, cols, p[0]) : run<256>(y[i % 4], rows, cols, p[0]);
        cudaEventRecord(b); cudaEventSynchronize(b);
        float ms; cudaEventElapsedTime(&ms, a, b); t.push_back(ms * 1e3f);
      }
      std::sort(t.begin(), t.end());
      printf("  %d/%d: %.1f", p[0], p[1], t[6]);
    }
    printf("  %s\n", cudaGetErrorString(cudaGetLastError()));
  }
}
