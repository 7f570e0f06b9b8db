/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Records of the tap: copies of what the lanes forward for a client, for user space.
 *
 * A chunk is told by one struct tap_last with its end, which says where it belongs, behind as many struct tap_piece
 * as its front needs. Pieces without their last record mean nothing: the chunk was not forwarded, or is lost.
 */
#ifndef TAP_H
#define TAP_H

#define TAP_LAST_BYTES 256   /* a power of two: most chunks of short transactions need nothing else */
#define TAP_PIECE_BYTES 2048 /* likewise, and a multiple of it */

/* What a record tells: a piece of a chunk, or its end. */
enum tap_kind { TAP_REQUEST = 1, TAP_RESPONSE = 2 };

#define TAP_PIECE 1u /* the front of a chunk, in part */
#define TAP_BEGIN 2u /* the chunk made the link: a transaction begins */
#define TAP_END 4u   /* the chunk ended the link */
#define TAP_BUSY 8u  /* requests: earlier ones were not answered yet */

struct tap_head {
	__u32 client;	/* slot */
	__u16 kind;	/* enum tap_kind */
	__u16 flags;
	__u32 length;	/* bytes in this record */
	__u32 chunk;	/* bytes in the chunk, but for a piece */
	__u32 link;	/* generation of the link word; counts links of this client */
	__u32 pad;
	/* Of the chunk's first byte. Requests: forwarded since registration (req_fwd); responses: since the link.
	 * Of a piece: its place in the chunk. */
	__u64 position;
	__u64 requests; /* with TAP_END: where the requests of the link end */
	__u64 at_ns;	/* bpf_ktime_get_ns() */
};

struct tap_last {
	struct tap_head head;
	__u8 bytes[TAP_LAST_BYTES];
};

struct tap_piece {
	struct tap_head head;
	__u8 bytes[TAP_PIECE_BYTES];
};

_Static_assert(sizeof(struct tap_head) == 48, "tap_head");

#endif /* TAP_H */
