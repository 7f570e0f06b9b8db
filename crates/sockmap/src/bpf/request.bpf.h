/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a chunk of requests means, found without side effects: the caller commits or forgets the result.
 */
#ifndef REQUEST_BPF_H
#define REQUEST_BPF_H

#include "lanes.bpf.h"

/* The largest length word of messages without user's data: PQ_SMALL_MESSAGE_LIMIT, MAX_SMALL_MESSAGE_LEN of crate wire. */
#define SMALL_MESSAGE_MAX 10000u

/*
 * Where the client's own unnamed statement may be bound. A Parse behind other messages of its cycle may be discarded, because one of them
 * failed, and then leaves what another client had: it counts up to the Sync. One that comes first is carried out, or drops that.
 */
#define UNNAMED_CYCLE 1u
#define UNNAMED_LINK 2u

struct request_scan {
	void *source;
	struct wire_state w;
	__u32 off;
	__u32 end;
	__u32 syncs;	/* ReadyForQuery to expect: Query, Sync, FunctionCall */
	__u32 reason;	/* not REASON_NONE: user space must take the chunk */
	__u8 open;	/* messages without their Sync */
	__u8 unnamed;	/* UNNAMED_*: an unnamed statement was parsed on this link */
	__u8 copy;	/* inside COPY FROM STDIN */
	__u8 linked;
	__u8 done;
	__u8 pinned; /* session pooling: names are the client's and the server's own, and a batch may stay open */
	__u8 extended; /* the last message is of the extended protocol */
	__u8 pad;
	/* Where the unnamed statement was parsed in this chunk, end if it was bound since. A position, because a flag
	 * that can fall doubles the paths of the verifier. */
	__u32 unbound_at;
	__u32 client; /* index of its slot */
	struct statement_uses uses;
};

/* The bits of word below its first zero byte; all of it when there is none. */
static __always_inline __u64 below_nul(__u64 word)
{
	__u64 nul = (word - 0x0101010101010101ULL) & ~word & 0x8080808080808080ULL;

	return nul ? ((nul & -nul) >> 7) - 1 : ~0ULL;
}

/* Whether the server has all that the chunk uses. Global, as named_statement(). */
__noinline int has_statements(struct statement_uses *uses, __u32 server)
{
	struct server_statement key = { .server = server };

	if (!uses)
		return 0;
	for (__u32 i = 0; i < STATEMENT_USES_MAX && i < uses->count; i++) {
		key.statement = uses->of[i];
		if (!bpf_map_lookup_elem(&server_statements, &key))
			return 0;
	}
	return 1;
}

/* Without branches, and anew for each message: the verifier would walk every order of the two protocols. */
static __always_inline __u8 is_extended(__u32 type)
{
	return 1 ^ (is_zero(type ^ 'Q') | is_zero(type ^ 'F') | is_zero(type ^ 'd') | is_zero(type ^ 'c') |
		    is_zero(type ^ 'f'));
}

/* Of the types that carry user's data the length is limited by message_length_max only. */
static __always_inline __u8 is_large(__u32 type)
{
	return is_zero(type ^ 'Q') | is_zero(type ^ 'F') | is_zero(type ^ 'd') | is_zero(type ^ 'P') |
	       is_zero(type ^ 'B');
}

#endif /* REQUEST_BPF_H */
