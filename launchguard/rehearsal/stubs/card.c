// The books: how much of each card is taken. LAUNCHGUARD_CARD_* in the environment describe the card.
#include "card.h"

#define FIRST_ADDRESS 0x7000000000ULL
#define LAST_ADDRESS 0x7f0000000000ULL

card_t vcard;
pthread_mutex_t vcard_lock = PTHREAD_MUTEX_INITIALIZER;
__thread int vcard_current;

static u64 next_address = FIRST_ADDRESS, launches;
static u64 used[MAX_CARDS], peak[MAX_CARDS];

static u64 setting(const char *name, u64 otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, 0, 0) : otherwise;
}

__attribute__((constructor)) static void start(void) {
  vcard.total = setting("LAUNCHGUARD_CARD_TOTAL", 80ULL << 30);
  vcard.context = setting("LAUNCHGUARD_CARD_CONTEXT", 0);
  vcard.count = setting("LAUNCHGUARD_CARD_COUNT", 1);
  if (vcard.count > MAX_CARDS) vcard.count = MAX_CARDS;
  vcard.major = setting("LAUNCHGUARD_CARD_MAJOR", 8);
  vcard.minor = setting("LAUNCHGUARD_CARD_MINOR", 0);
  vcard.sms = setting("LAUNCHGUARD_CARD_SMS", 108);
  vcard.threads_per_sm = setting("LAUNCHGUARD_CARD_THREADS_PER_SM", 2048);
  vcard.smem_per_sm = setting("LAUNCHGUARD_CARD_SMEM_PER_SM", 167936);
  vcard.smem_per_block = setting("LAUNCHGUARD_CARD_SMEM_PER_BLOCK", 166912);
  vcard.l2 = setting("LAUNCHGUARD_CARD_L2", 40 << 20);
  vcard.name = getenv("LAUNCHGUARD_CARD_NAME") ? getenv("LAUNCHGUARD_CARD_NAME") : "virtual card";
  for (int i = 0; i < MAX_CARDS; i++) used[i] = peak[i] = vcard.context;
}

int vcard_charge(int device, u64 bytes) {
  if (used[device] + bytes > vcard.total) return 0;
  used[device] += bytes;
  if (used[device] > peak[device]) peak[device] = used[device];
  return 1;
}

void vcard_release(int device, u64 bytes) { used[device] -= bytes; }

u64 vcard_reserve_addresses(u64 bytes) {
  u64 p = next_address;
  next_address += ROUND_UP(bytes);
  return p;
}

int vcard_is_device(const void *p) { return (u64)p >= FIRST_ADDRESS && (u64)p < LAST_ADDRESS && (u64)p < next_address; }

u64 vcard_handle(void) {
  static u64 next = 0x1000;
  return __sync_fetch_and_add(&next, 64);
}

void vcard_count_launch(void) { launches++; }
u64 vcard_launch_count(void) { return launches; }
void vcard_binary(int capability) { vcard.binary = capability; }

// ---- asked and told through ctypes by the rehearsed process
u64 vcard_used(int device) { return used[device]; }
u64 vcard_peak(int device) { return peak[device]; }

int vcard_take(int device, u64 bytes) {  // memory that a library takes outside torch's allocator (a communicator)
  pthread_mutex_lock(&vcard_lock);
  int done = vcard_charge(device, bytes);
  pthread_mutex_unlock(&vcard_lock);
  return done;
}
const char *vcard_name(void) { return vcard.name; }
u64 vcard_total(void) { return vcard.total; }
