/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Lane B's requests: out of the application's own send() straight into the backend's receive queue. Included by lanes.bpf.c, behind what it shares with the
 * requests that come by TCP.
 */
#ifndef DIRECT_BPF_H
#define DIRECT_BPF_H

/*
 * Lane B: forwards a send of the application straight to the linked backend, or to one that it takes. 0: that may not be, nothing was changed; the
 * bytes go by TCP, and request_skb decides about them.
 */
static __always_inline int forward_direct(struct sk_msg_md *msg, struct client_slot *c, __u32 index, __u32 thread)
{
	__u64 old = *(volatile __u64 *)&c->link, wanted;
	struct lane_control *ctl = lanes_control();
	struct request_scan scan = {
		.source = msg, .w = c->req, .end = msg->size, .unbound_at = msg->size, .client = index,
	};
	struct tcp_sock *near = socket_at(c->sk_addr, c->cookie);
	__u32 cycle, chunks, named, server, quiet = !(old & (LINK_PENDING_MASK | LINK_OPEN));
	struct server_slot *s = NULL;

	/* Shorter than MSG_BYTES_MAX, because store_some() does not reach the last bytes of that. */
	if (!ctl || ctl->off || !near || tap_wanted(c) || msg->size > MSG_BYTES_MAX - STATEMENT_NAME_MAX)
		return 0;
	/* What went by TCP may still be with the backend's worker, and what another thread sends may not be in its queue, unless all is answered. */
	if (!quiet && (!(c->flags & CLI_DIRECT) || c->sender))
		return 0;
	cycle = quiet ? 0 : c->cycle_bytes;
	chunks = quiet ? 0 : c->cycle_chunks;
	if (cycle + msg->size > request_budget_bytes || chunks >= APP_CHUNKS_MAX)
		return 0;
	if ((__u8 *)msg->data + msg->size > (__u8 *)msg->data_end && bpf_msg_pull_data(msg, 0, msg->size, 0))
		return 0;
	begin_scan(&scan, c, old, ctl);
	scan_request_msg(&scan);
	if (scan.reason || scan.syncs > PENDING_MAX)
		return 0;
	wanted = (scan.open || !wire_boundary(&scan.w) ? LINK_OPEN : 0) | (scan.extended ? LINK_EXTENDED : 0);
	c->active_ns = bpf_ktime_get_ns();
	if (scan.linked) {
		server = link_server(old);
		s = bpf_map_lookup_elem(&servers, &server);
		if (!s || !(s->flags & SRV_LOCAL) || !backend_caught_up(s))
			return 0;
		if (scan.uses.count && !has_statements(&scan.uses, server))
			return 0;
		if (scan.pinned && !link_pending(old) && !seq_missing(&c->tx_expect, &near->write_seq))
			s->run_bytes = 0;
		/* Before the link says that something is pending: user space looks at it when it has the link. */
		*(volatile __u32 *)&c->sender = thread;
		if (extend_link(c, &scan, old, wanted))
			goto not_sent;
	} else {
		if (!wire_boundary(&c->req) || old & (LINK_HELD | LINK_KEPT))
			return 0;
		*(volatile __u32 *)&c->sender = thread;
		if (link_client(c, index, near, &scan, old, wanted, 1, &s))
			goto not_sent;
		server = link_server(*(volatile __u64 *)&c->link);
	}
	if (bpf_msg_redirect_map(msg, &backend_socks, server, BPF_F_INGRESS) != SK_PASS) {
		/* The backend is gone: its ReadyForQuery will not come. The link stays, and request_skb finds the same. */
		__sync_fetch_and_sub(&c->link, scan.syncs);
		goto not_sent;
	}
	if (scan.uses.count)
		rename_statements_msg(msg, &scan.uses, server);
	c->req = scan.w;
	named = scan.uses.count || (scan.linked && c->flags & CLI_NAMED);
	c->flags = CLI_DIRECT | (scan.unnamed & UNNAMED_LINK ? CLI_UNNAMED : 0) | (scan.open ? CLI_BATCH : 0) |
		   (named ? CLI_NAMED : 0);
	c->cycle_bytes = cycle + msg->size;
	c->cycle_chunks = chunks + 1;
	return 1;

not_sent:
	*(volatile __u32 *)&c->sender = 0;
	return 0;
}

/*
 * Lane B. Called inside the application's own send(), before the bytes enter its TCP socket. It only ever forwards or lets go: what it lets go comes to
 * request_skb. It may forward when all that was let go before has been decided there: nothing is then under way to the pooler, and
 * because send() holds the application's lock nothing can be, so the two programs never work on one client at once.
 */
SEC("sk_msg")
int request_msg(struct sk_msg_md *msg)
{
	struct bpf_sock *sk = msg->sk;
	__u32 *found, index, thread;
	struct client_slot *c;
	struct tcp_sock *tp;
	__u64 before;

	if (!apps_work || !sk || !msg->size)
		return SK_PASS;
	thread = bpf_get_current_pid_tgid();
	found = bpf_sk_storage_get(&app_slot, sk, 0, 0);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!found || !tp)
		return SK_PASS;
	index = *found;
	c = bpf_map_lookup_elem(&clients, &index);
	/* An application may keep its socket when its client's slot is another's. */
	if (!c || c->app_addr != (__u64)(unsigned long)tp)
		return SK_PASS;
	/* A thread that begins a send has ended the one before. */
	if (c->sender == thread)
		*(volatile __u32 *)&c->sender = 0;
	if (*(volatile __u64 *)&c->decided_seq != (NEXT_SEQ_KNOWN | tp->write_seq))
		return SK_PASS;
	before = __sync_fetch_and_add(&c->req_dir, msg->size);
	if (before & DIR_USER || before != *(volatile __u64 *)&c->req_fwd + *(volatile __u64 *)&c->req_passed ||
	    !forward_direct(msg, c, index, thread)) {
		__sync_fetch_and_sub(&c->req_dir, msg->size);
		return SK_PASS;
	}
	count_counter(COUNTER_REQUESTS_B);
	*(volatile __u64 *)&c->req_fwd += msg->size;
	return SK_PASS;
}

#endif /* DIRECT_BPF_H */
