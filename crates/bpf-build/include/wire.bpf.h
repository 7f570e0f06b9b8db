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
 * The including file defines WIRE_LOAD(source, offset, to, n), which copies n bytes (1 or 5) from the chunk and
 * evaluates to 0 on success. Fixed-width types come from the including file (linux/types.h).
 */
#ifndef WIRE_BPF_H
#define WIRE_BPF_H

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

/*
 * Walks to the end of the next head. *off is the position in the chunk, end its size, length_max the largest
 * allowed length field. On WIRE_MSG the body is not consumed: the next call skips it.
 */
#define WIRE_NEXT(w, source, off, end, length_max, m)                                              \
	({                                                                                         \
		int wire_result = WIRE_END;                                                        \
		__u32 wire_left = (end) - (off);                                                   \
		if ((w)->need >= wire_left) {                                                      \
			(w)->need -= wire_left;                                                    \
			(off) = (end);                                                             \
			wire_left = 0;                                                             \
		} else {                                                                           \
			(off) += (w)->need;                                                        \
			wire_left -= (w)->need;                                                    \
			(w)->need = 0;                                                             \
		}                                                                                  \
		if (wire_left) {                                                                   \
			__u32 wire_unit = WIRE_HEAD;                                               \
			if ((w)->hdr_len == 0 && wire_left >= WIRE_HEAD) {                         \
				if (WIRE_LOAD(source, off, (w)->hdr, WIRE_HEAD))                   \
					wire_result = WIRE_BAD;                                    \
				(w)->hdr_len = WIRE_HEAD;                                          \
				(off) += WIRE_HEAD;                                                \
				wire_left -= WIRE_HEAD;                                            \
			}                                                                          \
			for (int wire_i = 0; wire_i < (int)WIRE_HEAD_RFQ; wire_i++) {              \
				__u32 wire_have = (w)->hdr_len;                                    \
				if (wire_have && (w)->hdr[0] == 'Z')                               \
					wire_unit = WIRE_HEAD_RFQ;                                 \
				if (wire_have >= wire_unit || !wire_left || wire_have > 5)         \
					break;                                                     \
				if (WIRE_LOAD(source, off, &(w)->hdr[wire_have], 1))               \
					wire_result = WIRE_BAD;                                    \
				(w)->hdr_len = wire_have + 1;                                      \
				(off) += 1;                                                        \
				wire_left -= 1;                                                    \
			}                                                                          \
			if ((w)->hdr_len >= wire_unit && wire_result == WIRE_END)                  \
				wire_result = wire_head(w, off, length_max, m);                    \
		}                                                                                  \
		wire_result;                                                                       \
	})

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
	w->hdr_len = 0;
	return WIRE_MSG;
}

#endif /* WIRE_BPF_H */
