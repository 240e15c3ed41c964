/* Arithmetic on NCCL's data types.
 *
 * A value is widened, combined and rounded back after every pair, as a GPU does for half precision: the
 * result then does not depend on how a chunk was sliced.  MINMAX carries min and max alike: for integers
 * NCCL passes a mask that turns the order asked for into an unsigned "less", for floats its lowest bit
 * means max (public source: reduce_kernel.h).
 */
#include <string.h>

#include "double.h"

size_t element_bytes(enum element element) {
    static const size_t sizes[ELEMENTS] = {1, 4, 8, 2, 4, 8, 2};
    return sizes[element];
}

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value)
        return (uint16_t)(wide >> 16) | 0x40; /* keep NaN a NaN */
    return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static float from_f16(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}

static uint16_t to_f16(float value) {
    _Float16 narrow = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return bits;
}

#define SAME(x) (x)

/* STORED is how a value lies in memory, WIDE how it is computed with. */
#define FLOATS(NAME, STORED, WIDE, WIDEN, NARROW)                                                                      \
    static WIDE scalar_##NAME(uint64_t argument) {                                                                     \
        STORED stored;                                                                                                 \
        memcpy(&stored, &argument, sizeof stored);                                                                     \
        return WIDEN(stored);                                                                                          \
    }                                                                                                                  \
    static void scale_##NAME(const struct arithmetic *how, STORED *to, const STORED *from, size_t count) {    \
        WIDE scalar = scalar_##NAME(how->argument);                                                                    \
        for (size_t i = 0; i < count; i++)                                                                             \
            to[i] = NARROW(WIDEN(from[i]) * scalar);                                                                   \
    }                                                                                                                  \
    static void pair_##NAME(const struct arithmetic *how, STORED *to, const STORED *a, const STORED *b,                \
                            size_t count) {                                                                            \
        bool maximum = how->argument & 1;                                                                              \
        switch (how->reduction) {                                                                                      \
        case REDUCE_PROD:                                                                                              \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = NARROW(WIDEN(a[i]) * WIDEN(b[i]));                                                             \
            break;                                                                                                     \
        case REDUCE_MINMAX:                                                                                            \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = (WIDEN(a[i]) > WIDEN(b[i])) == maximum ? a[i] : b[i];                                          \
            break;                                                                                                     \
        default:                                                                                                       \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = NARROW(WIDEN(a[i]) + WIDEN(b[i]));                                                             \
        }                                                                                                              \
    }

FLOATS(f16, uint16_t, float, from_f16, to_f16)
FLOATS(bf16, uint16_t, float, from_bf16, to_bf16)
FLOATS(f32, float, float, SAME, SAME)
FLOATS(f64, double, double, SAME, SAME)

#define INTEGERS(NAME, STORED)                                                                                         \
    static void scale_##NAME(const struct arithmetic *how, STORED *to, const STORED *from, size_t count) {    \
        STORED scalar = (STORED)how->argument;                                                                         \
        for (size_t i = 0; i < count; i++)                                                                             \
            to[i] = (STORED)(from[i] * scalar);                                                                        \
    }                                                                                                                  \
    static void pair_##NAME(const struct arithmetic *how, STORED *to, const STORED *a, const STORED *b,                \
                            size_t count) {                                                                            \
        STORED argument = (STORED)how->argument;                                                                       \
        switch (how->reduction) {                                                                                      \
        case REDUCE_PROD:                                                                                              \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = (STORED)(a[i] * b[i]);                                                                         \
            break;                                                                                                     \
        case REDUCE_MINMAX:                                                                                            \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = (STORED)(a[i] ^ argument) < (STORED)(b[i] ^ argument) ? a[i] : b[i];                           \
            break;                                                                                                     \
        default:                                                                                                       \
            for (size_t i = 0; i < count; i++)                                                                         \
                to[i] = (STORED)(a[i] + b[i]);                                                                         \
        }                                                                                                              \
    }                                                                                                                  \
    /* The argument is the divisor, twice, with "the values are signed" in the lowest bit. */                          \
    static void divide_##NAME(const struct arithmetic *how, STORED *values, size_t count) {                            \
        STORED divisor = (STORED)(how->argument >> 1), sign = (STORED)((STORED)1 << (8 * sizeof(STORED) - 1));         \
        for (size_t i = 0; i < count; i++) {                                                                           \
            bool negative = (how->argument & 1) && (values[i] & sign);                                                 \
            STORED magnitude = negative ? (STORED)-values[i] : values[i];                                              \
            values[i] = negative ? (STORED) - (STORED)(magnitude / divisor) : (STORED)(magnitude / divisor);           \
        }                                                                                                              \
    }

INTEGERS(u8, uint8_t)
INTEGERS(u32, uint32_t)
INTEGERS(u64, uint64_t)

void reduce_input(const struct arithmetic *how, void *to, const void *from, size_t count) {
    if (how->reduction != REDUCE_PREMULSUM) {
        memmove(to, from, count * element_bytes(how->element));
        return;
    }
    switch (how->element) {
    case ELEMENT_U8:
        return scale_u8(how, to, from, count);
    case ELEMENT_U32:
        return scale_u32(how, to, from, count);
    case ELEMENT_U64:
        return scale_u64(how, to, from, count);
    case ELEMENT_F16:
        return scale_f16(how, to, from, count);
    case ELEMENT_BF16:
        return scale_bf16(how, to, from, count);
    case ELEMENT_F32:
        return scale_f32(how, to, from, count);
    case ELEMENT_F64:
        return scale_f64(how, to, from, count);
    case ELEMENTS:
        break;
    }
}

void reduce_pair(const struct arithmetic *how, void *to, const void *received, const void *input, size_t count) {
    switch (how->element) {
    case ELEMENT_U8:
        return pair_u8(how, to, received, input, count);
    case ELEMENT_U32:
        return pair_u32(how, to, received, input, count);
    case ELEMENT_U64:
        return pair_u64(how, to, received, input, count);
    case ELEMENT_F16:
        return pair_f16(how, to, received, input, count);
    case ELEMENT_BF16:
        return pair_bf16(how, to, received, input, count);
    case ELEMENT_F32:
        return pair_f32(how, to, received, input, count);
    case ELEMENT_F64:
        return pair_f64(how, to, received, input, count);
    case ELEMENTS:
        break;
    }
}

void reduce_finish(const struct arithmetic *how, void *values, size_t count) {
    if (how->reduction != REDUCE_SUMPOSTDIV)
        return;
    if (how->element == ELEMENT_U8)
        divide_u8(how, values, count);
    else if (how->element == ELEMENT_U32)
        divide_u32(how, values, count);
    else if (how->element == ELEMENT_U64)
        divide_u64(how, values, count);
    else
        double_fail("unsupported division after the sum on floats");
}
