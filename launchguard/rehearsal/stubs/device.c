// What the card says about itself.
#include <stdio.h>
#include "card.h"

cudaError_t cudaGetDeviceCount(int *n) { *n = vcard.count; return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = vcard_current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= vcard.count) return cudaErrorInvalidDevice;
  vcard_current = d;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorInvalidDevice ? "invalid device ordinal" : "virtual card error";
}
const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown"; }

// a real card remembers the last error until somebody asks; torch clears it after a failed cudaMalloc, so nothing is kept here
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  if (d < 0 || d >= vcard.count) return cudaErrorInvalidDevice;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", vcard.name);
  p->totalGlobalMem = vcard.total;
  p->major = vcard.major;
  p->minor = vcard.minor;
  p->multiProcessorCount = vcard.sms;
  p->warpSize = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = vcard.smem_per_block;
  p->sharedMemPerMultiprocessor = vcard.smem_per_sm;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = vcard.threads_per_sm;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->l2CacheSize = vcard.l2;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->pciBusID = d + 1;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = p->memoryPoolsSupported = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { return cudaGetDeviceProperties(p, d); }
#endif

cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = vcard.smem_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = vcard.smem_per_sm; break;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrMultiProcessorCount: *v = vcard.sms; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = vcard.threads_per_sm; break;
    case cudaDevAttrComputeCapabilityMajor: *v = vcard.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = vcard.minor; break;
    case cudaDevAttrL2CacheSize: *v = vcard.l2; break;
    default: *v = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int d) { snprintf(text, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int d) { *pool = (cudaMemPool_t)0x55; return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *v) { *(u64 *)v = 0; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { memset(h, 0, sizeof *h); return cudaSuccess; }
