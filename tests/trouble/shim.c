/* Faults of file systems and clocks, for one process that preloads this.
 *
 * ROUTEPROF_SHIM names a file of 64-bit numbers, in the order of enum fault, which the process
 * itself writes; ROUTEPROF_SHIM_UNDER is what a path must hold to be meant.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum fault {
    CLOCK_SECONDS, /* added to the time of day */
    RENAME_MILLISECONDS, /* how long a rename takes */
    RENAME_ERROR, /* what a rename fails with */
    RENAME_LOST, /* so many renames are done and then said to have found nothing, as over NFS */
    LINK_ERROR, /* what a hard link fails with */
    CREATE_ERROR, /* what making a file fails with */
    LIST_ERROR, /* what opening a directory fails with */
    HIDE_SECONDS, /* parts younger than this are not listed, as from the cache of a directory */
    FAULTS
};

static volatile long long none[FAULTS], *faults = none;
static const char *under;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ROUTEPROF_SHIM");
    int file = path ? open(path, O_RDWR) : -1;
    under = getenv("ROUTEPROF_SHIM_UNDER");
    if (file < 0 || !under) return;
    void *map = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) faults = map;
}

static int meant(const char *path) { return under && path && strstr(path, under) != NULL; }

static int fails(enum fault fault, const char *path) {
    if (!faults[fault] || !meant(path)) return 0;
    errno = (int)faults[fault];
    return 1;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int done = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += faults[CLOCK_SECONDS];
    return done;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (fails(RENAME_ERROR, to)) return -1;
    if (meant(to) && faults[RENAME_MILLISECONDS]) usleep(1000 * faults[RENAME_MILLISECONDS]);
    int done = real(from, to);
    if (!done && meant(to) && faults[RENAME_LOST] > 0) {
        faults[RENAME_LOST]--;
        errno = ENOENT;
        return -1;
    }
    return done;
}

int link(const char *from, const char *to) {
    REAL(link);
    return fails(LINK_ERROR, to) ? -1 : real(from, to);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return flags & O_CREAT && fails(CREATE_ERROR, path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails(LIST_ERROR, path) ? NULL : real(path);
}

static int hidden(DIR *directory, const char *name) {
    struct stat found;
    struct timespec now;
    if (!faults[HIDE_SECONDS] || !strstr(name, ".parquet")) return 0;
    if (fstatat(dirfd(directory), name, &found, 0)) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec - found.st_mtime < faults[HIDE_SECONDS];
}

#define READDIR(name, entry) \
    struct entry *name(DIR *directory) { \
        REAL(name); \
        struct entry *found; \
        do found = real(directory); \
        while (found && hidden(directory, found->d_name)); \
        return found; \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
