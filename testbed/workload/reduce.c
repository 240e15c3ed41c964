/* Arithmetic on elements: what a GPU's kernel does to two buffers, on the CPU.
 *
 * The 16-bit floats are widened to 32 bits, combined and rounded to nearest even, at each step of a ring as on a GPU.
 * The loops have no calls and no branches that a compiler could not turn into vector selects: bfloat16 is the most
 * common data type of training and must not be the bottleneck.  Integers wrap (compiled with -fwrapv). */
#include <string.h>

#include "internal.h"

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet_nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

/* A half's exponent and mantissa, moved to a float's place, are the value times 2^-112; that holds for subnormals. */
static inline float from_float16(uint16_t half) {
    uint32_t bits = bits_of_float(float_of_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f);
    bits |= (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return float_of_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t to_float16(float value) {
    uint32_t sign = bits_of_float(value) >> 16 & 0x8000, bits = bits_of_float(value) & 0x7fffffff;
    /* Adding 0.5 puts a subnormal half's last bit at the float's last bit, and the hardware rounds. */
    uint32_t subnormal = bits_of_float(float_of_bits(bits) + 0.5f) - bits_of_float(0.5f);
    uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    uint32_t half = bits < 113u << 23 ? subnormal : normal;
    half = bits >= 143u << 23 ? 0x7c00 : half; /* 65536 and more, infinity */
    half = bits > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

#define SAME(x) (x)

#define LOOP(T, LOAD, STORE, EXPRESSION)                                                                               \
    for (size_t i = 0; i < count; i++) {                                                                               \
        __auto_type a = LOAD(((const T *)left)[i]);                                                                    \
        __auto_type b = LOAD(((const T *)right)[i]);                                                                   \
        ((T *)target)[i] = (T)STORE(EXPRESSION);                                                                       \
    }                                                                                                                  \
    break

/* Average sums on the way; its division comes once, at the end. */
#define DEFINE_REDUCE(NAME, T, LOAD, STORE)                                                                            \
    static void reduce_##NAME(void *target, const void *left, const void *right, size_t count,                         \
                              ncclRedOp_t reduction) {                                                                 \
        switch (reduction) {                                                                                           \
        case ncclSum:                                                                                                  \
        case ncclAvg: LOOP(T, LOAD, STORE, a + b);                                                                     \
        case ncclProd: LOOP(T, LOAD, STORE, a *b);                                                                     \
        case ncclMax: LOOP(T, LOAD, STORE, a > b ? a : b);                                                             \
        case ncclMin: LOOP(T, LOAD, STORE, a < b ? a : b);                                                             \
        case ncclNumOps: break;                                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    static void divide_##NAME(void *target, size_t count, int divisor) {                                               \
        for (size_t i = 0; i < count; i++)                                                                             \
            ((T *)target)[i] = (T)STORE(LOAD(((T *)target)[i]) / (__typeof__(LOAD(*(T *)target)))divisor);             \
    }

DEFINE_REDUCE(int8, int8_t, SAME, SAME)
DEFINE_REDUCE(uint8, uint8_t, SAME, SAME)
DEFINE_REDUCE(int32, int32_t, SAME, SAME)
DEFINE_REDUCE(uint32, uint32_t, SAME, SAME)
DEFINE_REDUCE(int64, int64_t, SAME, SAME)
DEFINE_REDUCE(uint64, uint64_t, SAME, SAME)
DEFINE_REDUCE(float16, uint16_t, from_float16, to_float16)
DEFINE_REDUCE(float32, float, SAME, SAME)
DEFINE_REDUCE(float64, double, SAME, SAME)
DEFINE_REDUCE(bfloat16, uint16_t, from_bfloat16, to_bfloat16)

static const struct {
    void (*reduce)(void *, const void *, const void *, size_t, ncclRedOp_t);
    void (*divide)(void *, size_t, int);
} arithmetic[ncclNumTypes] = {
    [ncclInt8] = {reduce_int8, divide_int8},          [ncclUint8] = {reduce_uint8, divide_uint8},
    [ncclInt32] = {reduce_int32, divide_int32},       [ncclUint32] = {reduce_uint32, divide_uint32},
    [ncclInt64] = {reduce_int64, divide_int64},       [ncclUint64] = {reduce_uint64, divide_uint64},
    [ncclFloat16] = {reduce_float16, divide_float16}, [ncclFloat32] = {reduce_float32, divide_float32},
    [ncclFloat64] = {reduce_float64, divide_float64}, [ncclBfloat16] = {reduce_bfloat16, divide_bfloat16},
};

/* The 8-bit floats can be moved, not combined. */
bool can_reduce(ncclDataType_t type) { return arithmetic[type].reduce != NULL; }

/* target = left combined with right; target may be either of the two. */
void reduce_elements(void *target, const void *left, const void *right, size_t count, ncclDataType_t type,
                     ncclRedOp_t reduction) {
    arithmetic[type].reduce(target, left, right, count, reduction);
}

void divide_elements(void *target, size_t count, ncclDataType_t type, int divisor) {
    arithmetic[type].divide(target, count, divisor);
}
