// The virtual cards of one process: what the files of this folder share.
// Device pointers are numbers in a reserved range that nothing maps; the books say how many bytes of each card are taken.
#ifndef LAUNCHGUARD_CARD_H
#define LAUNCHGUARD_CARD_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>
#include <cuda.h>
#undef cudaGetDeviceProperties  // CUDA 12 headers map it to a versioned name

#define MAX_CARDS 16
#define GRANULE (2ULL << 20)  // cudaMalloc and cuMemCreate hand out whole 2 MiB pages
#define ROUND_UP(n) (((n) + GRANULE - 1) / GRANULE * GRANULE)

typedef unsigned long long u64;

typedef struct {
  u64 total, context;
  int count, major, minor, sms, threads_per_sm, smem_per_sm, smem_per_block, l2;
  int binary;  // compute capability of the kernels that the card takes from the library; 0: its own
  const char *name;
} card_t;

extern card_t vcard;                   // every card of a node is of one kind
extern pthread_mutex_t vcard_lock;     // guards all books
extern __thread int vcard_current;     // the card of cudaSetDevice

int vcard_charge(int device, u64 bytes);   // 0 when the card has not that much left; call with the lock held
void vcard_release(int device, u64 bytes);
u64 vcard_reserve_addresses(u64 bytes);
int vcard_is_device(const void *p);
int vcard_is_pinned(const void *p);
u64 vcard_handle(void);                    // a new handle for streams, events, libraries
void vcard_count_launch(void);             // a kernel ran (in name): what was copied to the card before may have changed
u64 vcard_launch_count(void);
#endif
