"""Sequentially consistent atomics, from the compiler's builtins. No code."""

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdbool.h>
    static inline int32_t strata_load_i32(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void strata_store_i32(int32_t *p, int32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int32_t strata_add_i32(int32_t *p, int32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
    static inline bool strata_swap_i32(int32_t *p, int32_t from, int32_t to) {
        return __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    static inline int64_t strata_load_i64(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void strata_store_i64(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int64_t strata_add_i64(int64_t *p, int64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
    static inline uint64_t strata_load_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void strata_store_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    """
    int32_t load_i32 "strata_load_i32"(const int32_t *) nogil
    void store_i32 "strata_store_i32"(int32_t *, int32_t) nogil
    int32_t add_i32 "strata_add_i32"(int32_t *, int32_t) nogil
    bint swap_i32 "strata_swap_i32"(int32_t *, int32_t, int32_t) nogil
    int64_t load_i64 "strata_load_i64"(const int64_t *) nogil
    void store_i64 "strata_store_i64"(int64_t *, int64_t) nogil
    int64_t add_i64 "strata_add_i64"(int64_t *, int64_t) nogil
    uint64_t load_u64 "strata_load_u64"(const uint64_t *) nogil
    void store_u64 "strata_store_u64"(uint64_t *, uint64_t) nogil
