// A new handle for a library, for libraries.c and for the stubs that build.py writes.
unsigned long long vcard_handle(void);
static int new_handle(void **h) { *h = (void *)(0x100000 + vcard_handle()); return 0; }
