"""Memory, threads and waiting, as Linux has them. No code."""

from posix.time cimport timespec

cdef enum:                  # of x86-64
    PAGE = 4096
    HUGE_PAGE = 2 << 20


cdef extern from "sys/mman.h" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
        MADV_HUGEPAGE
    void *MAP_FAILED
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)


cdef extern from "sched.h" nogil:
    int sched_yield()


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_create(pthread_t *, const void *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept)
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_condattr_init(pthread_condattr_t *)
    int pthread_condattr_setclock(pthread_condattr_t *, int)
    int pthread_cond_init(pthread_cond_t *, const pthread_condattr_t *)
    int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *)
    int pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const timespec *)
    int pthread_cond_broadcast(pthread_cond_t *)
    int pthread_cond_destroy(pthread_cond_t *)


cdef extern from *:
    """
    #include <errno.h>
    #include <stdio.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23          /* Linux 5.14 */
    #endif
    enum { STRATA_MPOL_PREFERRED = 1 };     /* linux/mempolicy.h, which few machines have installed */

    /* Prefers a NUMA node for pages that are not there yet: 0, or -1 where the kernel will not. */
    static inline int strata_prefer_node(void *start, size_t bytes, int node) {
        unsigned long mask[16] = {0};
        if (node < 0 || node >= (int)(8 * sizeof mask)) return -1;
        mask[node / (8 * sizeof *mask)] = 1UL << (node % (8 * sizeof *mask));
        return (int)syscall(SYS_mbind, start, bytes, STRATA_MPOL_PREFERRED, mask, 8 * sizeof mask, 0UL);
    }

    /* Makes the pages be there: 0, or the errno. A kernel that cannot do it by one call has each page written. */
    static inline int strata_populate(char *start, size_t bytes, size_t page) {
        if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) return 0;
        if (errno != EINVAL) return errno;
        for (size_t at = 0; at < bytes; at += page) ((volatile char *)start)[at] = 0;
        return 0;
    }

    /* Bytes that the machine, or the control group that the process is in, can still give; -1: not told. */
    static inline long long strata_available_memory(void) {
        long long kib, available = -1, limit, used;
        char line[128];
        FILE *file = fopen("/proc/meminfo", "re");
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, "MemAvailable: %lld", &kib) == 1) available = kib << 10;
        if (file) fclose(file);
        file = fopen("/sys/fs/cgroup/memory.max", "re");
        if (!file) return available;
        int told = fscanf(file, "%lld", &limit);    /* "max" where there is none */
        fclose(file);
        if (told != 1 || !(file = fopen("/sys/fs/cgroup/memory.current", "re"))) return available;
        told = fscanf(file, "%lld", &used);
        fclose(file);
        return told == 1 && (available < 0 || limit - used < available) ? limit - used : available;
    }
    """
    enum:
        MADV_POPULATE_WRITE
    int prefer_node "strata_prefer_node"(void *start, size_t bytes, int node) nogil
    int populate "strata_populate"(char *start, size_t bytes, size_t page) nogil
    long long available_memory "strata_available_memory"() nogil
