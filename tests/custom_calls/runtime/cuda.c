// A CUDA driver without a GPU: what is allocated there has addresses that nobody can touch, and its
// bytes are reached by copies only, through another mapping of them.

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 16

static struct {
  char *seen, *bytes;
  size_t size;
} memories[MOST];

static char *reached(uint64_t address) {
  for (int k = 0; k < MOST; ++k) {
    const uint64_t begin = (uint64_t)memories[k].seen;
    if (begin != 0 && begin <= address && address < begin + memories[k].size) {
      return memories[k].bytes + (address - begin);
    }
  }
  return (char *)address;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &memories[device];
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context == NULL; }
int cuStreamCreate(void **stream, unsigned flags) {
  *stream = malloc(1);
  return flags != 1;
}
int cuStreamDestroy_v2(void *stream) {
  free(stream);
  return 0;
}
int cuCtxSynchronize(void) { return 0; }
int cuStreamSynchronize(void *stream) { return stream == NULL; }
int cuMemAlloc_v2(uint64_t *address, size_t size) {
  if (size > (1ul << 30)) return 2;
  const int file = memfd_create("device", 0);
  if (ftruncate(file, (off_t)size) != 0) return 2;
  for (int k = 0; k < MOST; ++k) {
    if (memories[k].seen != NULL) continue;
    memories[k].seen = mmap(NULL, size, PROT_NONE, MAP_SHARED, file, 0);
    memories[k].bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    memories[k].size = size;
    close(file);
    *address = (uint64_t)memories[k].seen;
    return 0;
  }
  return 2;
}
int cuMemFree_v2(uint64_t address) {
  for (int k = 0; k < MOST; ++k) {
    if ((uint64_t)memories[k].seen != address) continue;
    munmap(memories[k].seen, memories[k].size);
    munmap(memories[k].bytes, memories[k].size);
    memories[k].seen = NULL;
    return 0;
  }
  return 1;
}
int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
  return memory == NULL || size == 0 || flags != 0;
}
int cuMemHostUnregister(void *memory) { return memory == NULL; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream) {
  static int copies = 0;
  const char *const fails = getenv("CUDA_FAILS_AT");
  if (fails != NULL && __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED) == atoi(fails)) return 719;
  memcpy(reached(to), reached(from), size);
  return stream == NULL;
}
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  (void)stream;
  function(data);
  return 0;
}
int cuGetErrorString(int error, const char **text) {
  *text = error == 101 ? "invalid device ordinal" : error == 2 ? "out of memory" : "it failed";
  return 0;
}
