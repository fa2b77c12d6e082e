// libnvidia-ml: scripts that ask NVML see the virtual cards and this process's books.
#include <stdio.h>
#include <string.h>
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;

int cudaGetDeviceCount(int *n);
int cudaRuntimeGetVersion(int *v);
int cudaDeviceGetAttribute(int *v, int attribute, int device);
const char *vcard_name(void);
u64 vcard_total(void);
u64 vcard_used(int device);

#define INDEX(h) ((int)((u64)(h) - 0x31))
#define NOT_SUPPORTED 3
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == NOT_SUPPORTED ? "Not Supported" : e ? "virtual card" : "Success"; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, "virtual"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *v) { return cudaRuntimeGetVersion(v); }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { return cudaRuntimeGetVersion(v); }
int nvmlDeviceGetCount_v2(unsigned *n) { return cudaGetDeviceCount((int *)n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(0x31ULL + i); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **h) {
  unsigned bus = 1;
  sscanf(s, "%*x:%x", &bus);
  *h = (void *)(0x30ULL + bus);
  return 0;
}
int nvmlDeviceGetIndex(void *h, unsigned *i) { *i = INDEX(h); return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "%s", vcard_name()); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { snprintf(s, n, "GPU-00000000-0000-0000-0000-%012d", INDEX(h)); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  m->total = vcard_total();
  m->used = vcard_used(INDEX(h));
  m->free = m->total - m->used;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2_t *m) {
  m->total = vcard_total();
  m->reserved = 0;
  m->used = vcard_used(INDEX(h));
  m->free = m->total - m->used;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  return cudaDeviceGetAttribute(major, 75, INDEX(h)) || cudaDeviceGetAttribute(minor, 76, INDEX(h));
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *rates) { rates[0] = rates[1] = 0; return 0; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *t) { *t = 30; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *p) { *n = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *p) { *n = 0; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *h, void *i) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *active) { *active = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, void *type) { return NOT_SUPPORTED; }
