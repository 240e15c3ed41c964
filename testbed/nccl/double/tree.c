/* The chunk order of NCCL's tree AllReduce: sums go up, results come down, both at once.
 *
 * The root turns the one into the other; every other rank has a passage for each direction.  (Public
 * source: src/device/all_reduce.h, runTreeSplit.)
 */
#include "double.h"

bool tree_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t start = index * work->chunk_count, left = work->part_count - start;
    if (start >= work->part_count)
        return false;
    size_t offset_bytes = (work->part_offset + start) * work->element_size;
    bool root = work->leg == LEG_TREE_ROOT, up = work->leg == LEG_TREE_UP;
    *chunk = (struct chunk){
        .count = left < work->chunk_count ? left : work->chunk_count,
        .input = root || up ? work->input + offset_bytes : NULL,
        .output = up ? NULL : work->output + offset_bytes,
        .receive = !up || work->children > 0,
        .send = root || up || work->children > 0,
        .finish = root,
    };
    return true;
}
