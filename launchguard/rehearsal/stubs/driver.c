// libcuda: what Triton's launcher asks of the driver. Its kernels are compiled by ptxas and then not run.
int cudaDeviceGetAttribute(int *v, int attribute, int device);
int cudaRuntimeGetVersion(int *v);
int cudaGetDeviceCount(int *n);

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { return cudaRuntimeGetVersion(v); }
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int attribute, int device) { return cudaDeviceGetAttribute(v, attribute, device); }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)0x99; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)0x99; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetLimit(unsigned long *v, int limit) { *v = 0; return 0; }
int cuCtxSetLimit(int limit, unsigned long v) { return 0; }
int cuGetErrorString(int e, const char **s) { *s = "virtual driver error"; return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = (void *)0x87; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)0x88; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuFuncGetAttribute(int *v, int attribute, void *f) { *v = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; return 0; }  // threads, registers
int cuFuncSetAttribute(void *f, int attribute, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuPointerGetAttribute(void *v, int attribute, unsigned long long p) {  // 2: memory type (2 = device), 9: managed
  *(unsigned long long *)v = attribute == 2 ? 2 : attribute == 9 ? 0 : p;
  return 0;
}
int cuStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
int cuLaunchKernel(void) { return 0; }
int cuLaunchKernelEx(void) { return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
