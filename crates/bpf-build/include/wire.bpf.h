/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Framing of PostgreSQL protocol 3 after login: bytes in, message heads out.
 *
 * PostgreSQL manual, "Message Formats": Byte1 type, Int32 length that counts itself, body. ReadyForQuery has
 * a body of one byte, which is taken as part of its head, so that type, length and status stay together.
 *
 * Invariants:
 * - Pure C without helpers: one use of WIRE_NEXT walks one message in bounded time. It compiles natively (tests,
 *   fuzzers) and for BPF.
 * - The state between two chunks of a stream is struct wire_state; any split of a stream gives the same
 *   messages.
 * - Never guesses: a length out of range is WIRE_BAD, and the state then says where the head began.
 *
 * The including file defines WIRE_LOAD(source, offset, to, n) for a constant n and WIRE_LOAD_N for an n of 1 to 5;
 * both copy n bytes from the chunk and evaluate to 0 on success. Fixed-width types come from the including file
 * (linux/types.h). A partial head is kept in little-endian order of its bytes.
 */
#ifndef WIRE_BPF_H
#define WIRE_BPF_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "wire_append() assumes a little-endian machine"
#endif

#define WIRE_HEAD 5u	  /* type and length */
#define WIRE_HEAD_RFQ 6u  /* ReadyForQuery: and the status byte */
#define WIRE_RFQ_LENGTH 5u

/* Parser state between two chunks of a stream. */
struct wire_state {
	__u32 need;   /* body bytes of the current message that have not come yet */
	__u8 hdr_len; /* bytes in hdr: 0 at a message boundary and inside a body */
	__u8 hdr[7];  /* head of a message that is split between two chunks */
};

_Static_assert(sizeof(struct wire_state) == 12, "wire_state has no padding");

/* One message head. */
struct wire_msg {
	__u32 body;   /* offset of the first body byte behind the head, in this chunk */
	__u32 length; /* of the body behind the head: 0 for ReadyForQuery */
	__u8 type;
	__u8 status; /* of ReadyForQuery */
	__u8 pad[2];
};

enum wire_result {
	WIRE_END = 0, /* the chunk is used up */
	WIRE_MSG = 1, /* a head was completed; msg is filled */
	WIRE_BAD = 2, /* length out of range, or the chunk could not be read */
};

static __inline __attribute__((always_inline)) int wire_boundary(const struct wire_state *w)
{
	return w->need == 0 && w->hdr_len == 0;
}

static __inline __attribute__((always_inline)) __u32 wire_be32(const __u8 *p)
{
	return (__u32)p[0] << 24 | (__u32)p[1] << 16 | (__u32)p[2] << 8 | p[3];
}

/* Judges a complete head in w->hdr; body is the offset behind it. */
static __inline __attribute__((always_inline)) int wire_head(struct wire_state *w, __u32 body,
							     __u32 length_max, struct wire_msg *m)
{
	__u32 length = wire_be32(&w->hdr[1]);

	m->type = w->hdr[0];
	m->body = body;
	m->status = 0;
	m->length = 0;
	if (length < 4 || length > length_max)
		return WIRE_BAD;
	if (m->type == 'Z') {
		if (length != WIRE_RFQ_LENGTH)
			return WIRE_BAD;
		m->status = w->hdr[5];
	} else {
		m->length = length - 4;
		w->need = length - 4;
	}
	__builtin_memset(&w->hdr_len, 0, 8);
	return WIRE_MSG;
}

/* Adds n bytes (in the low bytes of part, the rest zero) to the head in w. Scalars only: a copy to a variable place on
 * the stack would make the BPF verifier forget everything near it and explore each place. */
static __inline __attribute__((always_inline)) void wire_append(struct wire_state *w, __u64 part, __u32 n)
{
	__u64 raw;

	__builtin_memcpy(&raw, &w->hdr_len, 8);
	raw |= part << (8 * ((raw & 7) + 1));
	raw += n; /* hdr_len is the lowest byte and stays below 8 */
	__builtin_memcpy(&w->hdr_len, &raw, 8);
}

/*
 * Walks to the end of the next head. off is the position in the chunk, end its size, length_max the largest
 * allowed length field. On WIRE_MSG the body is not consumed: the next call skips it.
 */
#define WIRE_NEXT(w, source, off, end, length_max, m)                                              \
	({                                                                                         \
		int wire_result = WIRE_END;                                                        \
		__u32 wire_left = (end) - (off);                                                   \
		__u64 wire_part = 0;                                                               \
		if ((w)->need >= wire_left) {                                                      \
			(w)->need -= wire_left;                                                    \
			(off) = (end);                                                             \
			wire_left = 0;                                                             \
		} else {                                                                           \
			(off) += (w)->need;                                                        \
			wire_left -= (w)->need;                                                    \
			(w)->need = 0;                                                             \
		}                                                                                  \
		if (wire_left && (w)->hdr_len < WIRE_HEAD) {                                       \
			__u32 wire_n = WIRE_HEAD - (w)->hdr_len;                                   \
			if (wire_n > wire_left)                                                    \
				wire_n = wire_left;                                                \
			if (WIRE_LOAD_N(source, off, &wire_part, wire_n))                          \
				wire_result = WIRE_BAD;                                            \
			wire_append(w, wire_part, wire_n);                                         \
			(off) += wire_n;                                                           \
			wire_left -= wire_n;                                                       \
			wire_part = 0;                                                             \
		}                                                                                  \
		if (wire_left && (w)->hdr_len == WIRE_HEAD && (w)->hdr[0] == 'Z') {                \
			if (WIRE_LOAD(source, off, &wire_part, 1))                                 \
				wire_result = WIRE_BAD;                                            \
			wire_append(w, wire_part, 1);                                              \
			(off) += 1;                                                                \
		}                                                                                  \
		if (wire_result == WIRE_END &&                                                     \
		    (w)->hdr_len >= ((w)->hdr[0] == 'Z' ? WIRE_HEAD_RFQ : WIRE_HEAD))              \
			wire_result = wire_head(w, off, length_max, m);                            \
		wire_result;                                                                       \
	})

#endif /* WIRE_BPF_H */
