/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which idle server a client gets: the one that it had a moment ago, or the lowest, so that those of high ordinals rest and can be closed; or the
 * next in turn, if the pool rotates.
 */
#ifndef IDLE_BPF_H
#define IDLE_BPF_H

#include "lanes.bpf.h"

/* Idle servers, and empty words of the set, looked at before the search is left to user space. */
#define SEARCH_TRIES 32
/* How long ago a client's last transaction may have begun if it is to get the server of that. */
#define HOME_NS 2000000ULL

struct idle_search {
	struct client_slot *client;
	struct pool_slot *pool;
	__u64 word;
	__u32 word_index;
	__u32 client_index;
	__u32 server_index;
	__u32 pool_index;
	__u32 ordinal;
	__u32 local; /* only servers of lane A */
	__u32 wraps; /* the search goes on at the lowest when it has passed the highest, once */
	__u32 first; /* one server is looked at first: then the search begins at the lowest */
	__u32 unfit; /* there were others */
	__u64 found;
};

/* What take_idle() says instead of a server. */
#define TAKEN_NONE -1
#define TAKEN_BEHIND -2
#define TAKEN_UNFIT -3

/* Looks at one idle server; returns 1 when the search is over. */
static long idle_step(__u32 i, void *context)
{
	struct idle_search *f = context;
	__u64 bit, mine = PEER_LINKED | f->client_index;
	struct server_slot *s;
	__u32 ordinal, index;

	if (!f->word) {
		if (f->first) {
			f->first = 0;
			f->word_index = ~0u;
		}
		if (++f->word_index >= POOL_WORDS || f->word_index * 64 >= f->pool->ordinals) {
			if (!f->wraps)
				return 1;
			f->wraps = 0;
			f->word_index = 0;
		}
		f->word = *(volatile __u64 *)&f->pool->idle[f->word_index & (POOL_WORDS - 1)];
		return 0;
	}
	ordinal = lowest_bit(f->word);
	bit = 1ULL << ordinal;
	ordinal += (f->word_index & (POOL_WORDS - 1)) * 64;
	if (old_verifier) {
		barrier_var(ordinal);
		ordinal &= POOL_ORDINALS_MAX - 1;
		barrier_var(ordinal);
	}
	f->word &= ~bit;
	if (ordinal >= POOL_ORDINALS_MAX)
		return 0;
	if (f->pool->member[ordinal].fingerprint != f->client->fingerprint) {
		f->unfit = 1;
		return 0;
	}
	if (!(__sync_fetch_and_and(&f->pool->idle[f->word_index & (POOL_WORDS - 1)], ~bit) & bit))
		return 0; /* another one was faster */

	/* Ours from here on, unless user space has claimed it. */
	index = f->pool->member[ordinal].server;
	s = bpf_map_lookup_elem(&servers, &index);
	if (!s || !s->in_use || s->pool != f->pool_index)
		return 0;
	/* Back with it: user space is just about to take it, and looks for it in the set. A backend that is not caught up
	 * has CopyData of a failed COPY to read and to ignore; one whose last answer was lost ends. */
	if (s->fingerprint != f->client->fingerprint || s->flags & SRV_RETIRE ||
	    (s->flags & SRV_LOCAL ? !backend_caught_up(s) || answer_lost(s) : f->local)) {
		f->unfit = 1;
		push_idle(s);
		/* User space may have claimed it while it was not in the set, by setting DIR_USER, then clearing the bit; and given it back since. */
		if (*(volatile __u64 *)&s->dir & DIR_USER && drop_from_idle(s) &&
		    !(*(volatile __u64 *)&s->dir & DIR_USER))
			push_idle(s);
		return 0;
	}
	/* User space claims by setting DIR_USER, then reading peer: one of the two sees the other. What is not 0 is user space's link. */
	if (__sync_val_compare_and_swap(&s->peer, 0, mine))
		return 0;
	if (*(volatile __u64 *)&s->dir & DIR_USER) {
		__sync_val_compare_and_swap(&s->peer, mine, 0);
		return 0;
	}
	f->server_index = index;
	f->ordinal = ordinal;
	f->found = 1;
	return 1;
}

/* The ordinal in a pool of a server that a client had, POOL_ORDINALS_MAX if it is no member. */
static __always_inline __u32 own_ordinal(struct client_slot *c, struct pool_slot *p, __u32 server)
{
	struct server_slot *s = bpf_map_lookup_elem(&servers, &server);
	__u32 ordinal = s && s->pool == c->pool ? s->ordinal : POOL_ORDINALS_MAX;

	return ordinal < POOL_ORDINALS_MAX && p->member[ordinal].server == server ? ordinal : POOL_ORDINALS_MAX;
}

/* The server with this ordinal is looked at first, if it is idle. */
static __always_inline void look_at(struct idle_search *f, __u32 ordinal)
{
	f->word_index = ordinal / 64;
	f->word = *(volatile __u64 *)&f->pool->idle[ordinal / 64] & 1ULL << ordinal % 64;
}

/*
 * Takes an idle server with the client's parameters, as above: its slot, or TAKEN_*. While the client's last response is perhaps
 * still on its way into the application's socket, only the server that sent it: that cannot answer before. A function of its own, because what it keeps on
 * the stack and what a scan keeps there are too much together; and global, so that the verifier walks it once.
 */
__noinline int take_idle(struct client_slot *c, __u32 index, struct pool_slot *p, __u32 local)
{
	struct idle_search find = { .client = c, .client_index = index, .pool = p };
	__u32 tries = SEARCH_TRIES, last, ordinal;
	struct server_slot *s;

	if (!c || !p)
		return TAKEN_NONE;
	find.pool_index = c->pool;
	/* The answer of another would be written beside what the application has not read. */
	find.local = local || (apps_work && direct_unread(c));
	last = c->last_server;
	if (apps_work && !direct_settled(c)) {
		s = bpf_map_lookup_elem(&servers, &last);
		ordinal = s && s->cookie == c->last_cookie ? own_ordinal(c, p, last) : POOL_ORDINALS_MAX;
		if (ordinal >= POOL_ORDINALS_MAX)
			return TAKEN_BEHIND;
		look_at(&find, ordinal);
		tries = !!find.word;
	} else if (p->rotates) {
		__u32 next = *(volatile __u32 *)&p->next & (POOL_ORDINALS_MAX - 1);

		find.word_index = next / 64;
		find.word = *(volatile __u64 *)&p->idle[next / 64] & ~0ULL << next % 64;
		find.wraps = 1;
	} else {
		ordinal = c->active_ns - c->xact_start_ns < HOME_NS ? own_ordinal(c, p, last) : POOL_ORDINALS_MAX;
		if (ordinal < POOL_ORDINALS_MAX) {
			look_at(&find, ordinal);
			find.first = 1;
		} else {
			find.word = *(volatile __u64 *)&p->idle[0];
			find.word_index = unknown_zero();
		}
	}
	bpf_loop(tries, idle_step, &find, 0);
	if (!find.found) {
		if (tries != SEARCH_TRIES)
			return TAKEN_BEHIND;
		return find.unfit ? TAKEN_UNFIT : TAKEN_NONE;
	}
	if (p->rotates)
		*(volatile __u32 *)&p->next = find.ordinal + 1;
	return find.server_index;
}

#endif /* IDLE_BPF_H */
