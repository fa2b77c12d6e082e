// Kernels are counted and not run; what the host asks about them decides grid sizes, and with them scratch memory.
#include "card.h"

#define REGISTERS_PER_THREAD 32    // of the compiled kernels; the real figure differs by kernel, so reduction scratch is near, not exact
#define MAX_BLOCKS_PER_SM 32
#define SYSTEM_SMEM_PER_BLOCK 1024  // CUDA programming guide: reserved by the system, compute capability 8.0 and later

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t s) { vcard_count_launch(); return cudaSuccess; }
cudaError_t __cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t s) { vcard_count_launch(); return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) { vcard_count_launch(); return cudaSuccess; }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t s) { vcard_count_launch(); return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = REGISTERS_PER_THREAD;
  a->ptxVersion = a->binaryVersion = vcard.binary ? vcard.binary : vcard.major * 10 + vcard.minor;  // cub refuses one that it was not compiled for
  a->maxDynamicSharedSizeBytes = vcard.smem_per_block;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t smem, unsigned flags) {
  int blocks = vcard.threads_per_sm / (block < 32 ? 32 : block);
  if (blocks > MAX_BLOCKS_PER_SM) blocks = MAX_BLOCKS_PER_SM;
  if (smem) {
    int by_smem = vcard.smem_per_sm / (int)(smem + SYSTEM_SMEM_PER_BLOCK);
    if (by_smem < blocks) blocks = by_smem;
  }
  *n = blocks < 1 ? 1 : blocks;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t smem) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, smem, 0);
}

// ---- registration by the start-up code of every library that holds kernels
void **__cudaRegisterFatBinary(void *p) { static void *handle[4]; return handle; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, struct CUstream_st *s) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream) {
  grid->x = grid->y = grid->z = 1;
  block->x = block->y = block->z = 1;
  *smem = 0;
  *(void **)stream = 0;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { static char symbols[65536]; *p = symbols; return cudaSuccess; }
#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) { *kernel = (cudaKernel_t)0x66; return cudaSuccess; }
#endif
