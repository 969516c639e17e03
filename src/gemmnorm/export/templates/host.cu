// Host side: one function for each direction and mode allocates, runs the products and launches the kernels.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {

// The elements of a tensor as the kernels call their type; null for a tensor that is not there.
template <class T>
T* pointer(const torch::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}
template <class T>
T* pointer(const MaybeTensor& tensor) {
  return tensor ? pointer<T>(*tensor) : nullptr;
}

torch::Tensor empty(const torch::Tensor& like, torch::ScalarType type, at::IntArrayRef shape) {
  return torch::empty(shape, like.options().dtype(type));
}

// Contiguous, and aligned to the 16 bytes that a thread reads at once.
torch::Tensor dense(const torch::Tensor& tensor) {
  const torch::Tensor result = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(result.data_ptr()) % 16 ? result.clone() : result;
}

// Memory that dies with the call: one allocation, cut into pieces of the given numbers of bytes.
class Scratch {
 public:
  Scratch(const torch::Tensor& like, std::initializer_list<int64_t> bytes) {
    int64_t total = 0;
    for (const int64_t piece : bytes) {
      offsets_.push_back(total);
      total += (piece + 255) / 256 * 256;
    }
    memory_ = empty(like, torch::kUInt8, {total});
  }
  template <class T>
  T* piece(size_t index) const {
    return reinterpret_cast<T*>(pointer<uint8_t>(memory_) + offsets_[index]);
  }

 private:
  torch::Tensor memory_;
  std::vector<int64_t> offsets_;
};

// From Hopper on, a kernel may start while the one before it still runs; it waits for that one itself, before it reads
// (`griddepcontrol_wait`).
template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, cudaStream_t stream, const Params& params) {
#if CUDART_VERSION >= 11080
  int device = 0, major = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
#else
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(params);
#endif
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
