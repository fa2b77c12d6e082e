// Device memory (cudaMalloc, and cuMemCreate for expandable segments) and host memory that the driver knows (pinned, managed).
#include <sys/mman.h>
#include "card.h"

// ---- device memory: an open-addressing table, pointer -> bytes and card. A freed entry keeps its key: addresses are never reused.
typedef struct { u64 address, bytes; int device; } block_t;
static block_t *table;
static size_t capacity, filled;

static size_t slot_of(u64 address) {
  size_t i = (address / GRANULE * 0x9E3779B97F4A7C15ULL) & (capacity - 1);
  while (table[i].address && table[i].address != address) i = (i + 1) & (capacity - 1);
  return i;
}

static void grow(void) {
  block_t *old = table;
  size_t old_capacity = capacity;
  capacity = capacity ? 2 * capacity : 4096;
  table = calloc(capacity, sizeof(block_t));
  filled = 0;
  for (size_t i = 0; i < old_capacity; i++)
    if (old[i].bytes) { table[slot_of(old[i].address)] = old[i]; filled++; }
  free(old);
}

cudaError_t cudaMalloc(void **p, size_t n) {
  *p = 0;
  if (!n) return cudaSuccess;
  pthread_mutex_lock(&vcard_lock);
  if (vcard_charge(vcard_current, ROUND_UP(n))) {
    if (2 * (filled + 1) > capacity) grow();
    u64 address = vcard_reserve_addresses(n);
    table[slot_of(address)] = (block_t){address, ROUND_UP(n), vcard_current};
    filled++;
    *p = (void *)address;
  }
  pthread_mutex_unlock(&vcard_lock);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&vcard_lock);
  if (capacity) {
    block_t *block = &table[slot_of((u64)p)];
    if (block->address) { vcard_release(block->device, block->bytes); block->bytes = 0; }
  }
  pthread_mutex_unlock(&vcard_lock);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t stream) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return cudaFree(p); }

u64 vcard_used(int device);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *free_bytes = vcard.total - vcard_used(vcard_current);
  *total = vcard.total;
  return cudaSuccess;
}

// ---- pinned host memory: pages are reserved, and cost something only when somebody writes to them
#define MAX_PINNED 65536
static struct { u64 address, bytes; int mapped; } pinned[MAX_PINNED];
static int pinned_count;

static void remember(u64 address, u64 bytes, int mapped) {
  pthread_mutex_lock(&vcard_lock);
  if (pinned_count < MAX_PINNED) {
    pinned[pinned_count].address = address;
    pinned[pinned_count].bytes = bytes;
    pinned[pinned_count++].mapped = mapped;
  }
  pthread_mutex_unlock(&vcard_lock);
}

static void forget(u64 address) {
  pthread_mutex_lock(&vcard_lock);
  for (int i = 0; i < pinned_count; i++)
    if (pinned[i].address == address) {
      if (pinned[i].mapped) munmap((void *)address, pinned[i].bytes);
      pinned[i] = pinned[--pinned_count];
      break;
    }
  pthread_mutex_unlock(&vcard_lock);
}

int vcard_is_pinned(const void *p) {
  for (int i = 0; i < pinned_count; i++)
    if ((u64)p >= pinned[i].address && (u64)p < pinned[i].address + pinned[i].bytes) return 1;
  return 0;
}

cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
  *p = mmap(0, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) { *p = 0; return cudaErrorMemoryAllocation; }
  remember((u64)*p, n ? n : 1, 1);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
// Managed memory (paged optimizers) lives on the host until a kernel pulls it in; no kernel runs, so nothing is charged to the card.
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned flags) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void *p) { forget((u64)p); return cudaSuccess; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { remember((u64)p, n, 0); return cudaSuccess; }
cudaError_t cudaHostUnregister(void *p) { forget((u64)p); return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->devicePointer = (void *)p;
  if (vcard_is_device(p)) {
    a->type = cudaMemoryTypeDevice;
    a->device = vcard_current;
  } else if (vcard_is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = (void *)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

// ---- virtual memory management: what expandable segments ask of the driver. A handle carries its size and card.
#define HANDLE(n, device, id) ((n) << 16 | (u64)(device) << 12 | ((id) & 0xfff))
static CUresult address_reserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr at, u64 flags) {
  pthread_mutex_lock(&vcard_lock);
  *p = vcard_reserve_addresses(n);
  pthread_mutex_unlock(&vcard_lock);
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *properties, u64 flags) {
  static u64 id;
  int device = properties->location.id >= 0 && properties->location.id < MAX_CARDS ? properties->location.id : 0;
  pthread_mutex_lock(&vcard_lock);
  int done = vcard_charge(device, n);
  if (done) *h = HANDLE(n, device, ++id);
  pthread_mutex_unlock(&vcard_lock);
  return done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(CUmemGenericAllocationHandle h) {
  pthread_mutex_lock(&vcard_lock);
  vcard_release(h >> 12 & 0xf, h >> 16);
  pthread_mutex_unlock(&vcard_lock);
  return CUDA_SUCCESS;
}

static CUresult granularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = GRANULE; return CUDA_SUCCESS; }
static CUresult attribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 0; return CUDA_SUCCESS; }
static CUresult device_get(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
static CUresult context_get(CUcontext *c) { *c = (CUcontext)0x99; return CUDA_SUCCESS; }
static CUresult error_string(CUresult e, const char **s) { *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "virtual driver error"; return CUDA_SUCCESS; }
static CUresult nothing(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, u64 flags, enum cudaDriverEntryPointQueryResult *result) {
  static const struct { const char *name; void *function; } known[] = {
      {"cuMemAddressReserve", address_reserve}, {"cuMemCreate", create}, {"cuMemRelease", release}, {"cuMemGetAllocationGranularity", granularity},
      {"cuDeviceGetAttribute", attribute}, {"cuDeviceGet", device_get}, {"cuCtxGetCurrent", context_get}, {"cuGetErrorString", error_string}};
  *f = nothing;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(name, known[i].name)) *f = known[i].function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, u64 flags, enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, f, 0, flags, result);
}
