// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Naive forwarding: what arrives at one socket of a pair leaves by the other. No protocol, no loop: what a redirect
 * alone costs, for the benchmark that compares it with a copy in user space.
 *
 * Called for each chunk that arrives at a socket in `peers`; whatever has no peer goes to user space.
 */
#include "kernel.bpf.h"

struct unix_sock {
	struct sock sk;
	struct sock *peer; /* the other end, while there is one */
} KERNEL_STRUCT;

#define SOCKETS_MAX 8192
#define AF_UNIX 1

/* 0: by the peer's send path. BPF_F_INGRESS: into its receive queue. */
const volatile __u64 redirect_flags = 0;
/* Chunks of a client go into the receive queue of its backend, and what that sends to the client: lane A's two ways. */
const volatile __u32 same_host = 0;
/* What processes on this host send goes where `senders` says, as redirect_flags say: lane B's two ways, or answers alone. */
const volatile __u32 among_senders = 0;

struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, SOCKETS_MAX);
	__type(key, __u64); /* cookie of the *other* socket of the pair */
	__type(value, __u64);
} peers SEC(".maps");

/* same_host and among_senders: forward_msg runs in their processes' sends. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, SOCKETS_MAX);
	__type(key, __u64); /* cookie of the socket whose bytes go there: of same_host, the client's here */
	__type(value, __u64);
} senders SEC(".maps");

/* The cookie of the socket at which the chunk has arrived; 0 if it has none. */
static __always_inline __u64 receiver(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct unix_sock *sender;
	struct sock *peer;

	if (!sk || sk->family != AF_UNIX)
		return bpf_get_socket_cookie(skb);
	/* Between unix sockets a chunk stays its sender's until it is read, and skb->sk is that sender. */
	sender = bpf_skc_to_unix_sock(sk);
	peer = sender ? sender->peer : NULL;
	return peer ? peer->__sk_common.skc_cookie.counter : 0;
}

SEC("sk_skb/verdict")
int forward_skb(struct __sk_buff *skb)
{
	__u64 own = receiver(skb);

	if (!skb->len)
		return SK_PASS; /* a bare FIN; lanes.bpf.c says what a redirect of it would do */
	/* Without a peer there is no redirect, and SK_PASS alone means the socket's own queue. */
	if (same_host)
		(void)bpf_sk_redirect_hash(skb, &senders, &own, BPF_F_INGRESS);
	else
		(void)bpf_sk_redirect_hash(skb, &peers, &own, redirect_flags);
	return SK_PASS;
}

SEC("sk_msg")
int forward_msg(struct sk_msg_md *msg)
{
	struct bpf_sock *sk = msg->sk;
	struct tcp_sock *sender = sk ? bpf_skc_to_tcp_sock(sk) : NULL;
	__u64 own;

	if (!sender)
		return SK_PASS;
	own = sender->inet_conn.icsk_inet.sk.__sk_common.skc_cookie.counter;
	/* Without a peer by TCP, as ever. */
	if (among_senders)
		(void)bpf_msg_redirect_hash(msg, &senders, &own, redirect_flags);
	else
		(void)bpf_msg_redirect_hash(msg, &peers, &own, 0);
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
