// A disk that fails, before the C library: LD_PRELOAD of this makes pread and pwrite do what the
// environment says to the FAULT_AT-th of them (from 0), or to all.
//
//     FAULT=eio      fails with EIO            FAULT=short    gives half of what was asked for
//     FAULT=enospc   fails with ENOSPC         FAULT=slow     takes 20 ms longer
//     FAULT=none     gives 0 bytes, as behind a file's end

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*Transfer)(int, void*, size_t, off_t);

static atomic_long count;

static ssize_t Faulty(const char* name, int descriptor, void* memory, size_t bytes, off_t offset) {
  const Transfer real = (Transfer)dlsym(RTLD_NEXT, name);
  const char* const fault = getenv("FAULT");
  const char* const at = getenv("FAULT_AT");
  const long n = atomic_fetch_add(&count, 1);
  if (fault == NULL || (at != NULL && atol(at) != n)) return real(descriptor, memory, bytes, offset);
  if (strcmp(fault, "slow") == 0) {
    usleep(20000);
  } else if (strcmp(fault, "short") == 0) {
    if (bytes > 4096) bytes = (bytes / 2 + 4095) / 4096 * 4096;
  } else if (strcmp(fault, "none") == 0) {
    return 0;
  } else {
    errno = strcmp(fault, "enospc") == 0 ? ENOSPC : EIO;
    return -1;
  }
  return real(descriptor, memory, bytes, offset);
}

ssize_t pread(int descriptor, void* memory, size_t bytes, off_t offset) {
  return Faulty("pread", descriptor, memory, bytes, offset);
}

ssize_t pread64(int descriptor, void* memory, size_t bytes, off_t offset) {
  return Faulty("pread64", descriptor, memory, bytes, offset);
}

ssize_t pwrite(int descriptor, const void* memory, size_t bytes, off_t offset) {
  return Faulty("pwrite", descriptor, (void*)memory, bytes, offset);
}

ssize_t pwrite64(int descriptor, const void* memory, size_t bytes, off_t offset) {
  return Faulty("pwrite64", descriptor, (void*)memory, bytes, offset);
}
