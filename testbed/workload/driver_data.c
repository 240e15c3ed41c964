/* Data whose right results are known without a second computation.
 *
 * Rank r's data in iteration k is one periodic sequence of small numbers, begun 3r+k elements in.  So every rank knows
 * every other's data without storing it, the result of a reduction is periodic too, and checking a result is a
 * comparison with memory.  The shift by k makes a result that was left over from the iteration before wrong. */
#include "driver.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PERIOD = 251, RANK_SHIFT = 3 }; /* prime, so that ranks below 251 differ */

struct data {
    ncclDataType_t type;
    char *base, *combined; /* elements + PERIOD of each */
};

uint64_t mix(uint64_t a, uint64_t b) { /* splitmix64's finaliser */
    uint64_t z = (a + 1) * 0x9e3779b97f4a7c15ull ^ (b + 1) * 0xd1b54a32d192ed03ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* A positive number in a 16-bit float with so many bits of mantissa, by arithmetic: not by the library's bit tricks,
 * which this is to check.  No value here is subnormal, infinite or negative. */
static uint16_t narrow(float value, int mantissa_bits, int bias) {
    int exponent;
    double fraction = frexp((double)value, &exponent); /* in [0.5, 1) */
    if (value == 0)
        return 0;
    double mantissa = nearbyint(ldexp(fraction, mantissa_bits + 1)); /* ties to even; may carry into the exponent */
    return (uint16_t)(((exponent - 1 + bias) << mantissa_bits) + (int)mantissa - (1 << mantissa_bits));
}

static void put(ncclDataType_t type, void *place, double value) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: *(uint8_t *)place = (uint8_t)(int64_t)value; break;
    case ncclInt32:
    case ncclUint32: *(uint32_t *)place = (uint32_t)(int64_t)value; break;
    case ncclInt64:
    case ncclUint64: *(uint64_t *)place = (uint64_t)(int64_t)value; break;
    case ncclFloat16: *(uint16_t *)place = narrow((float)value, 10, 15); break;
    case ncclFloat32: *(float *)place = (float)value; break;
    case ncclFloat64: *(double *)place = value; break;
    case ncclBfloat16: *(uint16_t *)place = narrow((float)value, 7, 127); break;
    case ncclNumTypes: break;
    }
}

/* Small enough that no sum or product of a few ranks is rounded in any type, so the order of combining is free. */
static double value_at(uint64_t seed, size_t index, ncclRedOp_t reduction) {
    uint64_t random = mix(seed, index % PERIOD);
    return (double)(reduction == ncclProd ? 1 + random % 2 : random % 7);
}

static double combined_at(uint64_t seed, size_t index, ncclRedOp_t reduction, int nranks) {
    double result = value_at(seed, index, reduction);
    for (int rank = 1; rank < nranks; rank++) {
        double value = value_at(seed, index + (size_t)(RANK_SHIFT * rank), reduction);
        switch (reduction) {
        case ncclSum:
        case ncclAvg: result += value; break;
        case ncclProd: result *= value; break;
        case ncclMax: result = value > result ? value : result; break;
        case ncclMin: result = value < result ? value : result; break;
        case ncclNumOps: break;
        }
    }
    return reduction == ncclAvg ? result / nranks : result;
}

/* One period is computed, the rest copied from it in ever larger pieces. */
static void repeat(char *array, size_t period_bytes, size_t total_bytes) {
    for (size_t done = period_bytes; done < total_bytes;) {
        size_t part = done < total_bytes - done ? done : total_bytes - done;
        memcpy(array + done, array, part);
        done += part;
    }
}

struct data *data_make(ncclDataType_t type, ncclRedOp_t reduction, size_t elements, int nranks, uint64_t seed) {
    struct data *data = malloc(sizeof *data);
    size_t size = element_bytes(type), total = (elements + PERIOD) * size;
    if (data == NULL)
        abort();
    *data = (struct data){type, malloc(total), malloc(total)};
    if (data->base == NULL || data->combined == NULL)
        abort();
    for (size_t i = 0; i < PERIOD; i++) {
        put(type, data->base + i * size, value_at(seed, i, reduction));
        put(type, data->combined + i * size, combined_at(seed, i, reduction, nranks));
    }
    repeat(data->base, PERIOD * size, total);
    repeat(data->combined, PERIOD * size, total);
    return data;
}

void data_free(struct data *data) {
    if (data == NULL)
        return;
    free(data->base);
    free(data->combined);
    free(data);
}

const void *data_of(const struct data *data, int rank, uint64_t iteration) {
    return data->base + ((uint64_t)(RANK_SHIFT * rank) + iteration) % PERIOD * element_bytes(data->type);
}

const void *data_combined(const struct data *data, uint64_t iteration) {
    return data->combined + iteration % PERIOD * element_bytes(data->type);
}
