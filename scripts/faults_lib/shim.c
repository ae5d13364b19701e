/* LD_PRELOAD: reads and writes that the kernel is allowed to give, and hardly ever does.
   cc -shared -fPIC -O1 -o shim.so shim.c -ldl

   FAULT_PATH   only files whose path holds this text
   FAULT_MAX    no call moves more than so many bytes
   FAULT_EINTR  every other call fails once with EINTR
   FAULT_STOP   the process stops (SIGSTOP) before its so-manieth matching read, and goes on by SIGCONT */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls, reads;

static long number(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

static int matches(int fd) {
  char link[64], path[4096];
  const char *wanted = getenv("FAULT_PATH");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return !wanted || strstr(path, wanted) != NULL;
}

/* The bytes that this call may move, or -1 with errno set. */
static ssize_t allowed(int fd, size_t size, int reading) {
  int before = errno;
  if (!matches(fd)) { errno = before; return (ssize_t)size; }
  if (reading && ++reads == number("FAULT_STOP")) kill(getpid(), SIGSTOP);
  if (number("FAULT_EINTR") && calls++ % 2 == 0) { errno = EINTR; return -1; }
  long most = number("FAULT_MAX");
  errno = before;
  return most && size > (size_t)most ? most : (ssize_t)size;
}

#define REAL(name, ...) \
  static ssize_t (*real)(__VA_ARGS__); \
  if (!real) real = (ssize_t (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define PLAIN(name, type, reading) \
  ssize_t name(int fd, type data, size_t size) { \
    REAL(name, int, type, size_t); \
    ssize_t most = allowed(fd, size, reading); \
    return most < 0 ? -1 : real(fd, data, (size_t)most); \
  }
#define PLACED(name, type, reading) \
  ssize_t name(int fd, type data, size_t size, off_t at) { \
    REAL(name, int, type, size_t, off_t); \
    ssize_t most = allowed(fd, size, reading); \
    return most < 0 ? -1 : real(fd, data, (size_t)most, at); \
  }
#define SHORTENED \
  struct iovec one = {0}; \
  if (count) one = parts[0]; \
  ssize_t most = allowed(fd, one.iov_len, 1); \
  if (most < 0) return -1; \
  if (count && (size_t)most < one.iov_len) { one.iov_len = (size_t)most; parts = &one; count = 1; }
#define VECTOR(name) \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t at) { \
    REAL(name, int, const struct iovec *, int, off_t); \
    SHORTENED return real(fd, parts, count, at); \
  }
#define VECTOR2(name) \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t at, int flags) { \
    REAL(name, int, const struct iovec *, int, off_t, int); \
    SHORTENED return real(fd, parts, count, at, flags); \
  }

PLAIN(read, void *, 1)
PLAIN(write, const void *, 0)
PLACED(pread, void *, 1)
PLACED(pread64, void *, 1)
PLACED(pwrite, const void *, 0)
PLACED(pwrite64, const void *, 0)
VECTOR(preadv)
VECTOR(preadv64)
VECTOR2(preadv2)
VECTOR2(preadv64v2)
