// Warpgroup matrix multiply-accumulate (sm_90a): D[64, N] += A[64, 32 bytes] · B[N, 32 bytes]ᵀ, both operands in shared
// memory, swizzled by 128 bytes, K-major or, where they are of two bytes, MN-major. PTX ISA:
// #asynchronous-warpgroup-level-matrix-instructions
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

struct tf32;  // operand type: float32 words of which the tensor cores read the upper 19 bits

// Shared-memory descriptor of a K-major tile whose rows are 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 k_major_descriptor(const void* tile) {
  return ((shared_address(tile) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
constexpr int kKMajorStep = 2;  // the next 32 bytes of K, in the descriptor's units of 16 bytes

// The same of an MN-major tile: 64 rows of K, 128 bytes of each; the next 64 rows or columns of the
// operand follow after these 8 KiB.
constexpr int kMnMajorBytes = 64 * 128;
__device__ __forceinline__ u64 mn_major_descriptor(const void* tile) {
  return ((shared_address(tile) & 0x3FFFF) >> 4) | (u64{kMnMajorBytes >> 4} << 16) | (64ull << 32) | (1ull << 62);
}
constexpr int kMnMajorStep = 16 * 128 / 16;  // the next 16 rows of K

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Operand type and width → the instruction. `accumulate` 0 starts from zero. A or B may be MN-major if of two bytes.
template <class T, int N>
struct Wgmma;

// clang-format off
#define GEMMNORM_WGMMA(N, TYPE, SHAPE, TYPES, REGISTERS, A, B, P, TAIL, ...)                                   \
  template <>                                                                                                \
  struct Wgmma<TYPE, N> {                                                                                    \
    template <int A_MN = 0, int B_MN = 0>                                                            \
    static __device__ __forceinline__ void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." \
                   TYPES " {" REGISTERS "}, %" A ", %" B ", p, 1, 1" TAIL ";\n}"                               \
                   : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN), "n"(B_MN));            \
    }                                                                                                        \
  };

// The same with A from registers: of rows r and r + 8, columns c and c + 1, then 8 columns on; r = lane / 4, c = lane % 4 * 2.
template <class T, int N>
struct WgmmaRegisters;
#define GEMMNORM_WGMMA_REGISTERS(N, TYPE, SHAPE, TYPES, REGISTERS, A0, A1, A2, A3, B, P, TRANSPOSED, ...)        \
  template <>                                                                                                \
  struct WgmmaRegisters<TYPE, N> {                                                                           \
    template <int B_MN = 0>                                                                                  \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32."  \
                   TYPES " {" REGISTERS "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, %" TRANSPOSED ";\n}" \
                   : __VA_ARGS__                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_MN));         \
    }                                                                                                        \
  };

#define GEMMNORM_REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GEMMNORM_OPERANDS_32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define GEMMNORM_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GEMMNORM_OPERANDS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define GEMMNORM_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GEMMNORM_OPERANDS_128 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define GEMMNORM_REGISTERS_192 GEMMNORM_REGISTERS_128 "," \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79," \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GEMMNORM_OPERANDS_192 GEMMNORM_OPERANDS_128, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define GEMMNORM_REGISTERS_256 GEMMNORM_REGISTERS_192 "," \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111," \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GEMMNORM_OPERANDS_256 GEMMNORM_OPERANDS_192, \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define GEMMNORM_REGISTERS_136 GEMMNORM_REGISTERS_128 ", %64, %65, %66, %67"
#define GEMMNORM_OPERANDS_136 GEMMNORM_OPERANDS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])

GEMMNORM_WGMMA(32, half, "m64n32k16", "f16.f16", GEMMNORM_REGISTERS_32, "16", "17", "18", ", %19, %20", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(32, bfloat16, "m64n32k16", "bf16.bf16", GEMMNORM_REGISTERS_32, "16", "17", "18", ", %19, %20", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(32, tf32, "m64n32k8", "tf32.tf32", GEMMNORM_REGISTERS_32, "16", "17", "18", "", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(64, half, "m64n64k16", "f16.f16", GEMMNORM_REGISTERS_64, "32", "33", "34", ", %35, %36", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(64, bfloat16, "m64n64k16", "bf16.bf16", GEMMNORM_REGISTERS_64, "32", "33", "34", ", %35, %36", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(64, tf32, "m64n64k8", "tf32.tf32", GEMMNORM_REGISTERS_64, "32", "33", "34", "", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(128, half, "m64n128k16", "f16.f16", GEMMNORM_REGISTERS_128, "64", "65", "66", ", %67, %68", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(128, bfloat16, "m64n128k16", "bf16.bf16", GEMMNORM_REGISTERS_128, "64", "65", "66", ", %67, %68", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(128, tf32, "m64n128k8", "tf32.tf32", GEMMNORM_REGISTERS_128, "64", "65", "66", "", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(192, half, "m64n192k16", "f16.f16", GEMMNORM_REGISTERS_192, "96", "97", "98", ", %99, %100", GEMMNORM_OPERANDS_192)
GEMMNORM_WGMMA(192, bfloat16, "m64n192k16", "bf16.bf16", GEMMNORM_REGISTERS_192, "96", "97", "98", ", %99, %100", GEMMNORM_OPERANDS_192)
GEMMNORM_WGMMA(192, tf32, "m64n192k8", "tf32.tf32", GEMMNORM_REGISTERS_192, "96", "97", "98", "", GEMMNORM_OPERANDS_192)
GEMMNORM_WGMMA(256, half, "m64n256k16", "f16.f16", GEMMNORM_REGISTERS_256, "128", "129", "130", ", %131, %132", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA(256, bfloat16, "m64n256k16", "bf16.bf16", GEMMNORM_REGISTERS_256, "128", "129", "130", ", %131, %132", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA(256, tf32, "m64n256k8", "tf32.tf32", GEMMNORM_REGISTERS_256, "128", "129", "130", "", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA(136, half, "m64n136k16", "f16.f16", GEMMNORM_REGISTERS_136, "68", "69", "70", ", %71, %72", GEMMNORM_OPERANDS_136)
GEMMNORM_WGMMA(136, bfloat16, "m64n136k16", "bf16.bf16", GEMMNORM_REGISTERS_136, "68", "69", "70", ", %71, %72", GEMMNORM_OPERANDS_136)
GEMMNORM_WGMMA_REGISTERS(32, bfloat16, "m64n32k16", "bf16.bf16", GEMMNORM_REGISTERS_32, "16", "17", "18", "19", "20", "21", "22", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA_REGISTERS(64, bfloat16, "m64n64k16", "bf16.bf16", GEMMNORM_REGISTERS_64, "32", "33", "34", "35", "36", "37", "38", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA_REGISTERS(64, half, "m64n64k16", "f16.f16", GEMMNORM_REGISTERS_64, "32", "33", "34", "35", "36", "37", "38", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA_REGISTERS(128, bfloat16, "m64n128k16", "bf16.bf16", GEMMNORM_REGISTERS_128, "64", "65", "66", "67", "68", "69", "70", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA_REGISTERS(128, half, "m64n128k16", "f16.f16", GEMMNORM_REGISTERS_128, "64", "65", "66", "67", "68", "69", "70", GEMMNORM_OPERANDS_128)
// clang-format on

}  // namespace gemmnorm
