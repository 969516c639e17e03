// What launches of the Hopper kernels take besides: tensor maps for the copy engine, and counters.
#include <algorithm>
#include <map>
#include <cuda.h>

namespace {

int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// The copy engine's view of a contiguous matrix, cut into boxes of rows x columns, 128-byte swizzled. float32 is rounded
// to TF32 on the way in. The function that makes it belongs to the driver and is asked for by name.
gemmnorm::TensorMap tensor_map(const torch::Tensor& matrix, uint32_t rows, uint32_t columns) {
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
    C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
    TORCH_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return found;
  }();
  const CUtensorMapDataType type = matrix.scalar_type() == torch::kFloat16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : matrix.scalar_type() == torch::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                              : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.size(1)), static_cast<cuuint64_t>(matrix.size(0))};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(matrix.size(1) * matrix.element_size())};
  const cuuint32_t box[] = {columns, rows}, steps[] = {1, 1};
  gemmnorm::TensorMap map;
  static_assert(sizeof(map) == sizeof(CUtensorMap), "a tensor map has 128 bytes");
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      reinterpret_cast<CUtensorMap*>(&map), type, 2, matrix.data_ptr(), sizes, row_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled answers ", static_cast<int>(status));
  return map;
}

// Numbers that a launch finds zero and leaves zero. Calls on one stream follow each other and share theirs; a captured
// call may be replayed beside anything, so that it gets its own. (Python's lock guards the map; it is never destroyed,
// because at the end of the process there may be no CUDA left to give memory back to.)
torch::Tensor zero_numbers(const torch::Tensor& like, cudaStream_t stream, int64_t count) {
  const auto zeros = [&] { return torch::zeros({count}, like.options().dtype(torch::kInt32)); };
  cudaStreamCaptureStatus capturing;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing));
  static auto& kept = *new std::map<std::tuple<int, cudaStream_t, int64_t>, torch::Tensor>;
  if (capturing != cudaStreamCaptureStatusNone) return zeros();
  torch::Tensor& mine = kept[{like.get_device(), stream, count}];
  if (!mine.defined()) mine = zeros();
  return mine;
}

}  // namespace
