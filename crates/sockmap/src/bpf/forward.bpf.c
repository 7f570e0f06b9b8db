// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Naive forwarding: what arrives at one socket of a pair leaves by the other. No protocol, no loop: what a redirect
 * alone costs, for the benchmark that compares it with a copy in user space.
 *
 * Called for each chunk that arrives at a socket in `peers`; whatever has no peer goes to user space.
 */
#include "kernel.bpf.h"

#define SOCKETS_MAX 8192

struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, SOCKETS_MAX);
	__type(key, __u64); /* cookie of the *other* socket of the pair */
	__type(value, __u64);
} peers SEC(".maps");

SEC("sk_skb/verdict")
int forward_skb(struct __sk_buff *skb)
{
	__u64 own = bpf_get_socket_cookie(skb);

	if (!skb->len)
		return SK_PASS; /* a bare FIN; lanes.bpf.c says what a redirect of it would do */
	/* Without a peer there is no redirect, and SK_PASS alone means the socket's own queue. */
	(void)bpf_sk_redirect_hash(skb, &peers, &own, 0);
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
