/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the collectives of each communicator were, so that its ranks can be compared: all of them must make the same
 * collectives in the same order (NCCL's documentation, "Collective Operations").  Included once, by communicators.h.
 *
 * Every collective leaves its shape, one word, at its number's place.  When a block of them is full its signature is
 * made, out of line, and those of the blocks of twice, four times, … as many.  A block begins at a multiple of its
 * length, and its signature depends on nothing else: two ranks whose signatures of one block differ made different
 * collectives in it.  Point to point has no number here, as ranks differ in it by right.
 *
 * Signatures are compared between hosts, whose agents may be of another version: whoever changes what they are made of
 * shows them under another name than comm_signature.
 */
#ifndef RAILSCOPE_SHAPES_H
#define RAILSCOPE_SHAPES_H

#include "nccl.h"
#include "shares.h"

/*
 * By instance, modulo its size; read through probes/nccl/programs/tables.py.  A place belongs to its communicator until
 * that one ends.  Places are shared out, so that some are always free, and a new communicator takes one of them at
 * random: the place is part of its number.  One whose user's share is used up is not compared.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << SHAPES_BITS);
	__type(key, __u32);
	__type(value, struct call_shapes);
} call_shapes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << SHAPES_BITS);
	__type(key, __u32);
	__type(value, struct shapes_place);
} shapes_places SEC(".maps");

/* Numbers communicators that have no place. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} instance_counter SEC(".maps");

/* Bit n: every rank makes operation n (stragglers.py has the same, NOT_BY_ALL). */
#define CALLED_BY_ALL 0x0f1f
/* Bit n: operation n computes with its elements; what only moves them takes bytes for bytes. */
#define COMPUTES 0x001a
/* Of a place: its communicator has ended.  No instance has so high a number. */
#define PLACE_LEFT (1U << 31)
/* Ranks may each give another count. */
#define OP_ALL_GATHER_V 11

static __always_inline struct call_shapes *shapes_of(__u32 instance)
{
	__u32 at = instance & ((1 << SHAPES_BITS) - 1);

	return bpf_map_lookup_elem(&call_shapes, &at);
}

/* One search in four thousand fails while half of the places are taken. */
#if ALL_INLINED
#define PLACE_ATTEMPTS 1
#else
#define PLACE_ATTEMPTS 12
#endif

/* A place to try.  With bcc places are not shared out: each user tries half of them, and halves of users overlap. */
static __always_inline __u32 some_place(void)
{
	__u32 random = bpf_get_prandom_u32(), mask = (1 << SHAPES_BITS) - 1;

	if (!ALL_INLINED)
		return random & mask;
	return ((__u32)(answerable() * HASH_FACTOR >> 32) + (random & mask >> 1)) & mask;
}

/* The number of a new communicator of a process, with a place that it has from now on; 0: none is free. */
VERIFIED_ONCE __u32 claim_shapes(__u32 uid, __u32 tgid)
{
	struct shapes_place *place;
	struct call_shapes *shapes;
	__u32 at, instance, before;

#pragma unroll /* in older kernels no loop may go back from a call */
	for (int i = 0; i < PLACE_ATTEMPTS; i++) {
		at = some_place();
		shapes = bpf_map_lookup_elem(&call_shapes, &at);
		place = bpf_map_lookup_elem(&shapes_places, &at);
		if (!shapes || !place)
			continue;
		before = shapes->instance;
		if (before && !(before & PLACE_LEFT))
			continue;
		instance = (__sync_fetch_and_add(&place->given, 1) + 1) << SHAPES_BITS & (WITHOUT_SHAPES - 1);
		if (!instance)
			continue;
		instance |= at;
		if (__sync_val_compare_and_swap(&shapes->instance, before, instance) != before)
			continue;
		place->owner.uid = uid;
		place->owner.tgid = tgid;
		/* Nobody calls it yet. */
		shapes->unnumbered = 0;
		__builtin_memset(shapes->closed, 0, sizeof(shapes->closed));
		return instance;
	}
	return 0;
}

/* The number of a communicator that the calling process makes. */
VERIFIED_ONCE __u32 new_instance(__u32 tgid)
{
	__u64 taken = PLACE_TAKEN | NOBODY;
	__u32 instance, zero = 0;
	__u32 *counter;

	if (!ALL_INLINED)
		taken = take_place(answerable(), tgid, SHARED_SHAPES, 1 << SHAPES_BITS);
	if (taken) {
		instance = claim_shapes((__u32)taken, tgid);
		if (instance)
			return instance;
		if (!ALL_INLINED)
			return_place((__u32)taken, tgid, SHARED_SHAPES);
	}
	counter = bpf_map_lookup_elem(&instance_counter, &zero);
	return counter ? WITHOUT_SHAPES | ((__sync_fetch_and_add(counter, 1) + 1) & (WITHOUT_SHAPES - 1)) : 0;
}

/* Who comes next may take the place; until then the reader may look what its communicator called last. */
VERIFIED_ONCE int leave_shapes(__u32 instance)
{
	__u32 at = instance & ((1 << SHAPES_BITS) - 1);
	struct call_shapes *shapes = bpf_map_lookup_elem(&call_shapes, &at);
	struct shapes_place *place = bpf_map_lookup_elem(&shapes_places, &at);
	__u32 uid, tgid;

	if (!shapes || !place || shapes->instance != instance)
		return 0;
	uid = place->owner.uid;
	tgid = place->owner.tgid;
	if (__sync_val_compare_and_swap(&shapes->instance, instance, instance | PLACE_LEFT) == instance && !ALL_INLINED)
		leave_place(uid, tgid, SHARED_SHAPES);
	return 0;
}

static __always_inline __u64 mix(__u64 signature, __u64 word)
{
	signature = (signature ^ word) * HASH_FACTOR;
	return signature ^ signature >> 32; /* a product alone carries nothing downwards */
}

/* The block that ends with collective `number` is full. */
VERIFIED_ONCE int close_block(struct call_shapes *shapes, __u32 number)
{
	__u64 signature = 0;
	__u32 block = number >> BLOCK_BITS;

	if (!shapes)
		return 0;
	for (int i = 0; i < 1 << BLOCK_BITS; i++)
		signature = mix(signature, shapes->shapes[i]);
	for (int level = 0; level < BLOCK_LEVELS; level++) {
		__u64 first = shapes->closed[level] >> 32;

		signature = signature * HASH_FACTOR >> 32;
		shapes->closed[level] = signature << 32 | block; /* in one piece: the reader may look at any moment */
		if (block >> level & 1)
			break; /* the next block of this length completes one of twice as many */
		signature = mix(first, signature);
	}
	return 0;
}

/* Note what a call is; `sequence` numbers the calls of its communicator. */
static __always_inline void note_shape(__u32 op, __u32 data_type, __u32 peer, __u64 payload_bytes, __u32 instance,
				       __u32 sequence)
{
	struct call_shapes *shapes = shapes_of(instance);
	__u32 number;

	if (!shapes || shapes->instance != instance)
		return;
	if (!(CALLED_BY_ALL >> op & 1)) {
		__sync_fetch_and_add(&shapes->unnumbered, 1);
		return;
	}
	if (!(COMPUTES >> op & 1))
		data_type = 0;
	if (op == OP_ALL_GATHER_V)
		payload_bytes = 0;
	number = sequence - shapes->unnumbered;
	shapes->shapes[(number - 1) & ((1 << BLOCK_BITS) - 1)] =
		payload_bytes << 24 | (peer & 0xffff) << 8 | data_type << 4 | op;
	if (!(number & ((1 << BLOCK_BITS) - 1)))
		close_block(shapes, number);
}

#endif
