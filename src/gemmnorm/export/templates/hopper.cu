// What the kernels with Hopper's own product ask of the host besides: tensor maps, counters, and larger launches.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <cuda.h>  // types only: the one function of the driver is looked up at run time

namespace {

int64_t multiprocessors() {
  int device = 0, count = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's own function, through the runtime, so that nothing is linked against the driver.
EncodeTiled find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  C10_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status));
#else
  C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status));
#endif
  TORCH_CHECK(status == cudaDriverEntryPointSuccess && found, "the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(found);
}

// TMA's view of a [rows, columns] matrix, cut into boxes, swizzled over 128 bytes as the tensor cores read it; zero
// beyond the matrix. `pitch`: elements from one row to the next, where rows are padded. It holds an address and sizes,
// nothing of the contents.
template <class T>
gemmnorm::TensorMap tensor_map(const T* matrix, CUtensorMapDataType type, int64_t rows, int64_t columns, int box_rows,
                               int box_columns, int64_t pitch = 0) {
  static const EncodeTiled encode = find_encode_tiled();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>((pitch ? pitch : columns) * sizeof(T))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUtensorMapL2promotion promotion =
      row_bytes[0] % 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 2, const_cast<T*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a [", rows, ", ", columns, "] matrix: error ",
              static_cast<int>(result));
  gemmnorm::TensorMap opaque;
  static_assert(sizeof(opaque) == sizeof(map), "the kernels and cuda.h disagree about a tensor map");
  std::memcpy(&opaque, &map, sizeof(map));
  return opaque;
}

// Numbers that are zero whenever no kernel runs on them: the kernels leave them as they found them. Calls on one stream
// follow each other and share theirs. A captured call may be replayed at any time, beside anything: it gets numbers of
// its own, out of its graph's memory, which the graph sets to zero at each replay.
torch::Tensor take_counters(const torch::Tensor& like, cudaStream_t stream, int64_t count) {
  const auto zeros = [&] { return torch::zeros({count}, like.options().dtype(torch::kInt32).requires_grad(false)); };
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return zeros();
  static std::mutex mutex;
  // Never destroyed: when the process ends, CUDA may have gone before.
  static auto& known = *new std::map<std::tuple<int, cudaStream_t, int64_t>, torch::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  torch::Tensor& found = known[{static_cast<int>(like.device().index()), stream, count}];
  if (!found.defined()) found = zeros();
  return found;
}

// Held while a call's launches are made: where its numbers go from one to the next, no other thread's come between them. A
// captured call has numbers of its own.
std::unique_lock<std::mutex> take_turn(const torch::Tensor& like, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return {};
  static std::mutex mutex;
  static auto& turns = *new std::map<std::pair<int, cudaStream_t>, std::mutex>();  // never destroyed, as above
  std::unique_lock<std::mutex> lock(mutex);
  std::mutex& turn = turns[{static_cast<int>(like.device().index()), stream}];
  lock.unlock();
  return std::unique_lock<std::mutex>(turn);
}

// Lifts the limits of 48 KB on a kernel's dynamic shared memory and of 8 blocks on its clusters, once for each device.
void lift_limits(const void* kernel, int shared, int cluster) {
  if (shared <= 48 * 1024 && cluster <= 8) return;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.count({kernel, device})) return;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, cluster > 8));
  done.insert({kernel, device});
}

// With dynamic shared memory, in clusters of blocks; and `cooperative` where blocks wait for each other, so that all of them
// must run at once. Else the kernel may start early, as `launch` has it.
template <class Params>
void launch_hopper(void (*kernel)(Params), int64_t blocks, int threads, int shared, int cluster, bool cooperative,
                   cudaStream_t stream, const Params& params) {
  lift_limits(reinterpret_cast<const void*>(kernel), shared, cluster);
  cudaLaunchAttribute attributes[2] = {};
  if (cooperative) {
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
  } else {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
  }
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
