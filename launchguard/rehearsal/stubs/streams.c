// Streams and events complete at once; graphs are captured in name only.
#include "card.h"

#define NEW(type) ((type)vcard_handle())
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = NEW(cudaStream_t); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = NEW(cudaStream_t); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = NEW(cudaStream_t); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = NEW(cudaEvent_t); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = NEW(cudaEvent_t); return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }

static int capture_id, capturing;
static cudaStream_t capture_stream;
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { capturing = ++capture_id; capture_stream = s; return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { capturing = 0; *g = NEW(cudaGraph_t); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = capturing && s == capture_stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus *status, u64 *id, cudaGraph_t *g, const cudaGraphNode_t **nodes, size_t *n) {
  cudaStreamIsCapturing(s, status);
  if (id) *id = capturing;
  if (g) *g = (cudaGraph_t)0x77;
  if (nodes) *nodes = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, u64 *id, cudaGraph_t *g, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *n) {
  if (edges) *edges = 0;
  return capture_info(s, status, id, g, nodes, n);
}
#else
#undef cudaStreamGetCaptureInfo_v2
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status, u64 *id, cudaGraph_t *g, const cudaGraphNode_t **nodes, size_t *n) {
  return capture_info(s, status, id, g, nodes, n);
}
#endif
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, u64 flags) { *e = NEW(cudaGraphExec_t); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return cudaSuccess; }
