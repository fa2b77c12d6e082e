// Side effects on disk. What the script, its libraries and its children write goes to the same path below LAUNCHGUARD_OVERLAY, and a later
// look finds it there; what they would delete or move stays, and its name goes into the file LAUNCHGUARD_KEPT. Paths below one of
// LAUNCHGUARD_FREE (a list like PATH) are left alone. Preloaded, so that it holds for every library that calls libc, whatever its language.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define COPIED_BYTES (64L << 20)  // an existing file that is changed in place is copied up to this size, and a hole of its size beyond
#define HOLE_BYTES (1UL << 20)    // a write of that many zeros takes no disk
#define BLOCK 4096L
typedef char path_t[PATH_MAX];
typedef struct stat stat_t;

// A function of libc's name with a body of ours: under a name of its own here, so that the headers' declarations do not get in the way.
#define OURS(type, name, arguments) type our_##name arguments __asm__(#name); type our_##name arguments
#define NEXT(name) static __typeof__(our_##name) *next; if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, #name)

// ---------------------------------------------------------------- paths, by system calls alone: nothing here comes back to this file
static char *overlay, *free_folders, *kept_list;  // copies: a script may change its environment

static char *setting(const char *name) {
  const char *text = getenv(name);
  return text && *text ? strdup(text) : 0;
}

__attribute__((constructor)) static void start(void) {
  free_folders = setting("LAUNCHGUARD_FREE");
  kept_list = setting("LAUNCHGUARD_KEPT");
  overlay = setting("LAUNCHGUARD_OVERLAY");
}

static int is_there(const char *path) { return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0; }

static int look(const char *path, stat_t *found, int flags) { return syscall(SYS_newfstatat, AT_FDCWD, path, found, flags) == 0; }

static int is_folder(const char *path) {
  stat_t found;
  return look(path, &found, 0) && S_ISDIR(found.st_mode);
}

static int link_target(const char *path, path_t out) {
  long n = syscall(SYS_readlinkat, AT_FDCWD, path, out, PATH_MAX - 1);
  if (n >= 0) out[n] = 0;
  return n >= 0;
}

// The absolute path, without "." and "..". 0 where there is none to be had.
static int absolute(int at, const char *path, path_t out) {
  char whole[2 * PATH_MAX];
  if (!path || !*path || strlen(path) >= PATH_MAX) return 0;
  if (*path == '/') {
    strcpy(whole, path);
  } else {
    char fd[40];
    path_t base;
    if (at == AT_FDCWD) snprintf(fd, sizeof fd, "/proc/self/cwd");
    else snprintf(fd, sizeof fd, "/proc/self/fd/%d", at);
    if (!link_target(fd, base)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
  }
  size_t end = 0;
  for (char *rest = 0, *part = strtok_r(whole, "/", &rest); part; part = strtok_r(0, "/", &rest)) {
    if (!strcmp(part, ".")) continue;
    if (!strcmp(part, "..")) {
      while (end && out[--end] != '/') {}
    } else {
      if (end + strlen(part) + 2 > PATH_MAX) return 0;
      out[end++] = '/';
      size_t n = strlen(part);
      memcpy(out + end, part, n);
      end += n;
    }
  }
  if (!end) out[end++] = '/';
  out[end] = 0;
  return 1;
}

static int below(const char *path, const char *folder, size_t n) {
  while (n > 1 && folder[n - 1] == '/') n--;
  return !strncmp(path, folder, n) && (path[n] == '/' || !path[n]);
}

// Is this a path that nothing may change? Gives its absolute form, and its place in the overlay.
static int covered(int at, const char *path, path_t real, path_t shadow) {
  if (!overlay || !absolute(at, path, real)) return 0;
  for (const char *folder = free_folders; folder && *folder;) {
    size_t n = strcspn(folder, ":");
    if (n && below(real, folder, n)) return 0;
    folder += n + (folder[n] == ':');
  }
  size_t n = strlen(overlay), m = strlen(real);
  if (n + m >= PATH_MAX) return 0;
  memcpy(shadow, overlay, n);
  memcpy(shadow + n, real, m + 1);
  return 1;
}

static void keep(const char *real) {
  int fd = kept_list ? syscall(SYS_openat, AT_FDCWD, kept_list, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
  if (fd < 0) return;
  path_t line;
  syscall(SYS_write, fd, line, snprintf(line, sizeof line, "%s\n", real));
  syscall(SYS_close, fd);
}

// ---------------------------------------------------------------- the overlay
// An entry of the overlay that only stands for the user's own file, so that a listing shows it.
static int stands_for(const char *shadow, const char *real) {
  path_t target;
  return link_target(shadow, target) && !strcmp(target, real);
}

// The overlay's folder shows what the user's own has, too.
static void merge(const char *shadow, const char *real) {
  int fd = is_folder(shadow) && is_folder(real) ? syscall(SYS_openat, AT_FDCWD, real, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0) : -1;
  DIR *folder = fd >= 0 ? fdopendir(fd) : 0;
  for (struct dirent *entry; folder && (entry = readdir(folder));) {
    path_t from, to;
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    if (snprintf(from, sizeof from, "%s/%s", real, entry->d_name) < PATH_MAX && snprintf(to, sizeof to, "%s/%s", shadow, entry->d_name) < PATH_MAX)
      syscall(SYS_symlinkat, from, AT_FDCWD, to);  // EEXIST: the script's own is there
  }
  if (folder) closedir(folder);
}

// Folders of the overlay down to `shadow` itself; a link to one of the user's becomes a folder that shows the same.
static void make_folders(path_t shadow) {
  path_t target;
  for (char *slash = shadow + strlen(overlay) + 1;; slash++) {
    slash += strcspn(slash, "/");
    char kept = *slash;
    *slash = 0;
    if (link_target(shadow, target) && is_folder(target)) {
      syscall(SYS_unlinkat, AT_FDCWD, shadow, 0);
      syscall(SYS_mkdirat, AT_FDCWD, shadow, 0777);
      merge(shadow, target);
    } else {
      syscall(SYS_mkdirat, AT_FDCWD, shadow, 0777);
    }
    *slash = kept;
    if (!kept) return;
  }
}

// Where to look for a path: in the overlay when the script has written it.
static const char *seen(int at, const char *path, path_t shadow) {
  path_t real;
  int error = errno;
  stat_t found;
  const char *there = covered(at, path, real, shadow) && look(shadow, &found, AT_SYMLINK_NOFOLLOW) && !stands_for(shadow, real) ? shadow : path;
  errno = error;
  return there;
}

static void copy_content(const char *real, const char *shadow) {
  stat_t found;
  if (!look(real, &found, 0) || !S_ISREG(found.st_mode)) return;
  int from = syscall(SYS_openat, AT_FDCWD, real, O_RDONLY | O_CLOEXEC, 0);
  int to = syscall(SYS_openat, AT_FDCWD, shadow, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, found.st_mode & 0777);
  static __thread char piece[65536];
  if (found.st_size > COPIED_BYTES) syscall(SYS_ftruncate, to, found.st_size);
  else for (long n; from >= 0 && (n = syscall(SYS_read, from, piece, sizeof piece)) > 0;) syscall(SYS_write, to, piece, n);
  if (from >= 0) syscall(SYS_close, from);
  if (to >= 0) syscall(SYS_close, to);
}

// Where to write a path: in the overlay, as the user's own file where `copied`; 0 with errno where the real write would fail.
static const char *written(int at, const char *path, path_t shadow, int copied) {
  path_t real, parent, shadow_parent;
  if (!covered(at, path, real, shadow)) return path;
  stat_t found;
  int exists = look(real, &found, 0);
  if (exists && !S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode)) return path;  // a device, a pipe, a socket
  if (exists && syscall(SYS_faccessat, AT_FDCWD, real, W_OK)) return 0;
  strcpy(parent, real);
  strcpy(shadow_parent, shadow);
  *strrchr(parent, '/') = *strrchr(shadow_parent, '/') = 0;
  if (!is_folder(shadow_parent)) {
    if (!is_there(*parent ? parent : "/")) { errno = ENOENT; return 0; }
    if (syscall(SYS_faccessat, AT_FDCWD, *parent ? parent : "/", W_OK)) return 0;
  }
  make_folders(shadow_parent);
  path_t target;
  int linked = link_target(shadow, target) && *target == '/';  // to the user's own file: never written through
  if (linked) syscall(SYS_unlinkat, AT_FDCWD, shadow, 0);
  if (copied && (linked || !is_there(shadow))) copy_content(linked ? target : real, shadow);
  return shadow;
}

// For writers that talk to the kernel by themselves: where to write a path, through ctypes.
int launchguard_written(const char *path, char *out) {
  path_t shadow;
  const char *to = written(AT_FDCWD, path, shadow, 0);
  if (to) strcpy(out, to);
  return to ? 0 : errno;
}

// ---------------------------------------------------------------- opening
static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }

static int open_at(int at, const char *path, int flags, mode_t mode) {
  path_t real, shadow;
  if ((flags & O_TMPFILE) == O_TMPFILE) {  // a file without a name yet, in the folder `path`
    if (covered(at, path, real, shadow) && (is_folder(shadow) || is_folder(real))) {
      make_folders(shadow);
      path = shadow;
    }
  } else if (writes(flags)) {
    if ((flags & O_CREAT) && (flags & O_EXCL) && covered(at, path, real, shadow) && (is_there(real) || is_there(shadow))) {
      errno = EEXIST;
      return -1;
    }
    path = written(at, path, shadow, !(flags & O_TRUNC));
    if (!path) return -1;
  } else {
    if (flags & O_DIRECTORY && covered(at, path, real, shadow)) merge(shadow, real);
    path = seen(at, path, shadow);
  }
  return syscall(SYS_openat, at, path, flags | O_LARGEFILE, mode);
}

#define OPEN(name, at, ...)                        \
  OURS(int, name, (__VA_ARGS__, int flags, ...)) { \
    va_list rest;                                  \
    va_start(rest, flags);                         \
    mode_t mode = va_arg(rest, mode_t);            \
    va_end(rest);                                  \
    return open_at(at, path, flags, mode);         \
  }
OPEN(open, AT_FDCWD, const char *path)
OPEN(open64, AT_FDCWD, const char *path)
OPEN(openat, at, int at, const char *path)
OPEN(openat64, at, int at, const char *path)
OURS(int, __open_2, (const char *path, int flags)) { return open_at(AT_FDCWD, path, flags, 0); }
OURS(int, __open64_2, (const char *path, int flags)) { return open_at(AT_FDCWD, path, flags, 0); }
OURS(int, __openat_2, (int at, const char *path, int flags)) { return open_at(at, path, flags, 0); }
OURS(int, __openat64_2, (int at, const char *path, int flags)) { return open_at(at, path, flags, 0); }
OURS(int, creat, (const char *path, mode_t mode)) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
OURS(int, creat64, (const char *path, mode_t mode)) { return our_creat(path, mode); }

static const char *for_stream(const char *path, const char *mode, path_t shadow) {
  return strpbrk(mode, "wa+") ? written(AT_FDCWD, path, shadow, *mode != 'w') : seen(AT_FDCWD, path, shadow);
}
OURS(FILE *, fopen, (const char *path, const char *mode)) {
  NEXT(fopen);
  path_t shadow;
  path = for_stream(path, mode, shadow);
  return path ? next(path, mode) : 0;
}
OURS(FILE *, fopen64, (const char *path, const char *mode)) { return our_fopen(path, mode); }
OURS(FILE *, freopen, (const char *path, const char *mode, FILE *stream)) {
  NEXT(freopen);
  path_t shadow;
  if (path && !(path = for_stream(path, mode, shadow))) return 0;
  return next(path, mode, stream);
}
OURS(FILE *, freopen64, (const char *path, const char *mode, FILE *stream)) { return our_freopen(path, mode, stream); }

// ---------------------------------------------------------------- writing: zeros stay the hole that a file of ours has there
static int is_zero(const char *from, size_t n) {
  for (size_t i = 0; i < 64; i++) if (from[i]) return 0;
  return !memcmp(from, from + 64, n - 64);
}

static int is_ours(int fd) {
  char name[40];
  path_t path;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  return overlay && link_target(name, path) && below(path, overlay, strlen(overlay));
}

// Has the file nothing there but a hole, or its end? Whole blocks.
static int is_empty(int fd, off_t first, off_t last, off_t size) {
  if (first >= size) return 1;
  off_t now = syscall(SYS_lseek, fd, 0, SEEK_CUR), data = syscall(SYS_lseek, fd, first, SEEK_DATA);
  int empty = data < 0 ? errno == ENXIO : data >= last;
  syscall(SYS_lseek, fd, now, SEEK_SET);
  return empty;
}

static int becomes_hole(int fd, const char *from, size_t n, off_t at) {
  stat_t found;
  int error = errno;
  off_t end = at + n, first = (at + BLOCK - 1) / BLOCK * BLOCK, last = end / BLOCK * BLOCK;
  int done = n >= HOLE_BYTES && is_ours(fd) && !fstat(fd, &found) && S_ISREG(found.st_mode) && is_empty(fd, first, last, found.st_size) &&
             is_zero(from, n) && (end <= found.st_size || !syscall(SYS_ftruncate, fd, end));
  if (done) {  // the ends share their blocks with others
    syscall(SYS_pwrite64, fd, from, first - at, at);
    syscall(SYS_pwrite64, fd, from, end - last, last);
  }
  errno = error;
  return done;
}

OURS(ssize_t, write, (int fd, const void *from, size_t n)) {
  if (n >= HOLE_BYTES) {
    off_t at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    if (at >= 0 && becomes_hole(fd, from, n, at)) {
      syscall(SYS_lseek, fd, at + n, SEEK_SET);
      return n;
    }
  }
  return syscall(SYS_write, fd, from, n);
}

OURS(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at)) {
  return becomes_hole(fd, from, n, at) ? (ssize_t)n : syscall(SYS_pwrite64, fd, from, n, at);
}
OURS(ssize_t, pwrite64, (int fd, const void *from, size_t n, off_t at)) { return our_pwrite(fd, from, n, at); }

OURS(ssize_t, writev, (int fd, const struct iovec *pieces, int count)) {
  size_t largest = 0;
  for (int i = 0; i < count; i++) if (pieces[i].iov_len > largest) largest = pieces[i].iov_len;
  if (largest < HOLE_BYTES || !is_ours(fd)) return syscall(SYS_writev, fd, pieces, count);
  ssize_t total = 0;
  for (int i = 0; i < count; i++) {
    ssize_t n = our_write(fd, pieces[i].iov_base, pieces[i].iov_len);
    if (n < 0) return total ? total : n;
    total += n;
    if ((size_t)n < pieces[i].iov_len) break;
  }
  return total;
}

// ---------------------------------------------------------------- looking
#define LOOK(type, name, arguments, at, call) \
  OURS(type, name, arguments) {               \
    path_t shadow;                            \
    path = seen(at, path, shadow);            \
    return call;                              \
  }
#define STAT(name, flags, ...) LOOK(int, name, (__VA_ARGS__, const char *path, void *out), AT_FDCWD, syscall(SYS_newfstatat, AT_FDCWD, path, out, flags))
#define STATAT(name, ...) \
  LOOK(int, name, (__VA_ARGS__, const char *path, void *out, int flags), at, syscall(SYS_newfstatat, at, path, out, flags))
LOOK(int, stat, (const char *path, void *out), AT_FDCWD, syscall(SYS_newfstatat, AT_FDCWD, path, out, 0))
LOOK(int, stat64, (const char *path, void *out), AT_FDCWD, syscall(SYS_newfstatat, AT_FDCWD, path, out, 0))
LOOK(int, lstat, (const char *path, void *out), AT_FDCWD, syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW))
LOOK(int, lstat64, (const char *path, void *out), AT_FDCWD, syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW))
STAT(__xstat, 0, int version)
STAT(__xstat64, 0, int version)
STAT(__lxstat, AT_SYMLINK_NOFOLLOW, int version)
STAT(__lxstat64, AT_SYMLINK_NOFOLLOW, int version)
STATAT(fstatat, int at)
STATAT(fstatat64, int at)
STATAT(__fxstatat, int version, int at)
STATAT(__fxstatat64, int version, int at)
LOOK(int, statx, (int at, const char *path, int flags, unsigned mask, void *out), at, syscall(SYS_statx, at, path, flags, mask, out))
LOOK(int, access, (const char *path, int mode), AT_FDCWD, syscall(SYS_faccessat, AT_FDCWD, path, mode))
LOOK(int, euidaccess, (const char *path, int mode), AT_FDCWD, syscall(SYS_faccessat, AT_FDCWD, path, mode))
LOOK(int, faccessat, (int at, const char *path, int mode, int flags), at, syscall(SYS_faccessat, at, path, mode))
LOOK(int, chdir, (const char *path), AT_FDCWD, syscall(SYS_chdir, path))
LOOK(int, execve, (const char *path, char *const arguments[], char *const env[]), AT_FDCWD, syscall(SYS_execve, path, arguments, env))
LOOK(int, execv, (const char *path, char *const arguments[]), AT_FDCWD, syscall(SYS_execve, path, arguments, environ))
LOOK(int, statfs, (const char *path, void *out), AT_FDCWD, syscall(SYS_statfs, path, out))
LOOK(int, statfs64, (const char *path, void *out), AT_FDCWD, syscall(SYS_statfs, path, out))
LOOK(ssize_t, readlink, (const char *path, char *out, size_t n), AT_FDCWD, syscall(SYS_readlinkat, AT_FDCWD, path, out, n))
LOOK(ssize_t, readlinkat, (int at, const char *path, char *out, size_t n), at, syscall(SYS_readlinkat, at, path, out, n))

LOOK(ssize_t, getxattr, (const char *path, const char *name, void *out, size_t n), AT_FDCWD, syscall(SYS_getxattr, path, name, out, n))
LOOK(ssize_t, lgetxattr, (const char *path, const char *name, void *out, size_t n), AT_FDCWD, syscall(SYS_lgetxattr, path, name, out, n))
LOOK(ssize_t, listxattr, (const char *path, char *out, size_t n), AT_FDCWD, syscall(SYS_listxattr, path, out, n))
LOOK(ssize_t, llistxattr, (const char *path, char *out, size_t n), AT_FDCWD, syscall(SYS_llistxattr, path, out, n))

OURS(int, statvfs, (const char *path, void *out)) {
  NEXT(statvfs);
  path_t shadow;
  return next(seen(AT_FDCWD, path, shadow), out);
}
OURS(int, statvfs64, (const char *path, void *out)) { return our_statvfs(path, out); }

OURS(DIR *, opendir, (const char *path)) {
  NEXT(opendir);
  path_t real, shadow;
  if (covered(AT_FDCWD, path, real, shadow)) merge(shadow, real);
  return next(seen(AT_FDCWD, path, shadow));
}
// an entry that stands for the user's own says what it is only when it is looked at
OURS(struct dirent *, readdir, (DIR *folder)) {
  NEXT(readdir);
  struct dirent *entry = next(folder);
  if (entry && entry->d_type == DT_LNK) entry->d_type = DT_UNKNOWN;
  return entry;
}
OURS(struct dirent *, readdir64, (DIR *folder)) { return our_readdir(folder); }

// ---------------------------------------------------------------- making, deleting, moving
OURS(int, mkdirat, (int at, const char *path, mode_t mode)) {
  path_t real, shadow;
  if (!covered(at, path, real, shadow)) return syscall(SYS_mkdirat, at, path, mode);
  if (is_there(real) || is_there(shadow)) { errno = EEXIST; return -1; }
  path = written(at, path, shadow, 0);
  return path ? syscall(SYS_mkdirat, AT_FDCWD, path, mode) : -1;
}
OURS(int, mkdir, (const char *path, mode_t mode)) { return our_mkdirat(AT_FDCWD, path, mode); }

static int delete(int at, const char *path, int flags) {
  path_t real, shadow;
  stat_t found;
  if (!covered(at, path, real, shadow)) return syscall(SYS_unlinkat, at, path, flags);
  if (look(shadow, &found, AT_SYMLINK_NOFOLLOW) && !stands_for(shadow, real)) return syscall(SYS_unlinkat, AT_FDCWD, shadow, flags);
  if (!look(real, &found, AT_SYMLINK_NOFOLLOW)) return -1;
  keep(real);
  return 0;
}
OURS(int, unlinkat, (int at, const char *path, int flags)) { return delete(at, path, flags); }
OURS(int, unlink, (const char *path)) { return delete(AT_FDCWD, path, 0); }
OURS(int, rmdir, (const char *path)) { return delete(AT_FDCWD, path, AT_REMOVEDIR); }
OURS(int, remove, (const char *path)) {
  int done = delete(AT_FDCWD, path, 0);
  return done && errno == EISDIR ? delete(AT_FDCWD, path, AT_REMOVEDIR) : done;
}

static int move(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  path_t real, shadow, target;
  int ours = !covered(from_at, from, real, shadow);
  const char *there = seen(from_at, from, shadow);
  ours |= there == shadow;
  stat_t found;
  if (!ours && !look(real, &found, AT_SYMLINK_NOFOLLOW)) return -1;
  to = written(to_at, to, target, 0);
  if (!to) return -1;
  if (ours) return syscall(SYS_renameat2, from_at, there, to_at, to, flags);
  keep(real);  // it stays, and can be read under the new name, too
  syscall(SYS_unlinkat, to_at, to, 0);
  return syscall(SYS_symlinkat, real, to_at, to);
}
OURS(int, rename, (const char *from, const char *to)) { return move(AT_FDCWD, from, AT_FDCWD, to, 0); }
OURS(int, renameat, (int from_at, const char *from, int to_at, const char *to)) { return move(from_at, from, to_at, to, 0); }
OURS(int, renameat2, (int from_at, const char *from, int to_at, const char *to, unsigned flags)) { return move(from_at, from, to_at, to, flags); }

OURS(int, symlinkat, (const char *target, int at, const char *path)) {
  path_t shadow;
  path = written(at, path, shadow, 0);
  return path ? syscall(SYS_symlinkat, target, at, path) : -1;
}
OURS(int, symlink, (const char *target, const char *path)) { return our_symlinkat(target, AT_FDCWD, path); }
OURS(int, linkat, (int from_at, const char *from, int to_at, const char *to, int flags)) {
  path_t there, target;
  to = written(to_at, to, target, 0);
  return to ? syscall(SYS_linkat, from_at, seen(from_at, from, there), to_at, to, flags) : -1;
}
OURS(int, link, (const char *from, const char *to)) { return our_linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
OURS(int, mkfifo, (const char *path, mode_t mode)) {
  path_t shadow;
  path = written(AT_FDCWD, path, shadow, 0);
  return path ? syscall(SYS_mknodat, AT_FDCWD, path, S_IFIFO | mode, 0) : -1;
}
OURS(int, truncate, (const char *path, off_t n)) {
  path_t shadow;
  path = written(AT_FDCWD, path, shadow, 1);
  return path ? syscall(SYS_truncate, path, n) : -1;
}
OURS(int, truncate64, (const char *path, off_t n)) { return our_truncate(path, n); }

// Modes, owners and times of the user's own files stay.
#define CHANGE(name, arguments, at, call)                                  \
  OURS(int, name, arguments) {                                             \
    path_t real, shadow;                                                   \
    int held = covered(at, path, real, shadow);                            \
    path = seen(at, path, shadow);                                         \
    return held && path != shadow ? (is_there(real) ? 0 : -1) : (int)call; \
  }
CHANGE(chmod, (const char *path, mode_t mode), AT_FDCWD, syscall(SYS_fchmodat, AT_FDCWD, path, mode))
CHANGE(fchmodat, (int at, const char *path, mode_t mode, int flags), at, syscall(SYS_fchmodat, at, path, mode))
CHANGE(chown, (const char *path, uid_t user, gid_t group), AT_FDCWD, syscall(SYS_fchownat, AT_FDCWD, path, user, group, 0))
CHANGE(lchown, (const char *path, uid_t user, gid_t group), AT_FDCWD, syscall(SYS_fchownat, AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW))
CHANGE(fchownat, (int at, const char *path, uid_t user, gid_t group, int flags), at, syscall(SYS_fchownat, at, path, user, group, flags))
CHANGE(utimensat, (int at, const char *path, const void *times, int flags), at, syscall(SYS_utimensat, at, path, times, flags))
CHANGE(setxattr, (const char *path, const char *name, const void *value, size_t n, int flags), AT_FDCWD, syscall(SYS_setxattr, path, name, value, n, flags))
CHANGE(utime, (const char *path, const void *times), AT_FDCWD, ({ NEXT(utime); next(path, times); }))
CHANGE(utimes, (const char *path, const void *times), AT_FDCWD, ({ NEXT(utimes); next(path, times); }))
