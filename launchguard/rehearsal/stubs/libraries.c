// Library entry points that must do more than return 0. Every handle is new: torch keeps one cuBLAS workspace per (handle, stream), and
// the autograd thread has a handle of its own. build.py puts each function into the library that exports its name.
#include "handles.h"

int cublasCreate_v2(void **h) { return new_handle(h); }
int cublasLtCreate(void **h) { return new_handle(h); }
int cudnnCreate(void **h) { return new_handle(h); }
int cusparseCreate(void **h) { return new_handle(h); }
int cusolverDnCreate(void **h) { return new_handle(h); }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, void *results, int *found) { *found = 1; return 0; }
unsigned long cublasLtGetVersion(void) { return 130002; }
unsigned long cudnnGetVersion(void) { return 92400; }
unsigned long cudnnGetCudartVersion(void) { return 13000; }
int ncclGetVersion(int *v) { *v = 23007; return 0; }
const char *cublasGetStatusString(int e) { return "virtual card"; }
const char *cudnnGetErrorString(int e) { return "virtual card"; }
const char *ncclGetErrorString(int e) { return "virtual card"; }
const char *ncclGetLastError(void *c) { return "virtual card"; }
