/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Gauges for user space, by BPF_PROG_RUN: what no system call tells of a socket. */
#ifndef GAUGES_BPF_H
#define GAUGES_BPF_H

#include "lanes.bpf.h"

struct backend_queue_args {
	__u64 sk_addr;
	__u64 cookie;
	__u32 queued; /* chunks redirected into the socket that its worker has not delivered; ~0: unknown */
	__u32 able;   /* 1: this kernel lets programs read a socket by its address (bpf_rdonly_cast, Linux 6.2), as lane A must */
	__u32 refs;   /* users of its psock: 1 when no send() or recv() is under way and no worker delivers; 0: no such socket */
	__u32 client; /* a client's slot, or what is none */
	__u32 unread; /* of that client: bytes that went straight to the application and that it has not read */
	__u32 gone;   /* of that client: 1 when the application has closed its socket */
	__u32 read;   /* 1: a program reads what comes to the socket */
	__u32 pad;
};

/* Called by BPF_PROG_RUN: what waits in a socket, and who is at work on it. Is everything that was redirected into a backend's socket
 * readable there; is its last send() over? */
SEC("syscall")
int backend_queue(struct backend_queue_args *args)
{
	__u32 client = args->client, queued = ~0u, refs = 0, read = 0;
	struct client_slot *c = apps_work ? bpf_map_lookup_elem(&clients, &client) : NULL;
	struct tcp_sock *tp = socket_at(args->sk_addr, args->cookie);

	/* Without a psock it is closed: the kernel may leave its cookie where it was for a while. */
	if (tp && psock_address(tp)) {
		struct sk_psock *psock = psock_of(tp);

		queued = psock->ingress_skb.qlen;
		refs = psock->refcnt.refs.counter;
		read = has_verdict(tp);
	}
	args->queued = queued;
	args->refs = refs;
	args->read = read;
	args->able = !!bpf_rdonly_cast;
	args->unread = c ? direct_unread(c) : 0;
	args->gone = c ? app_gone(c) : 0;
	return 0;
}

#define LOOK_INTO(socks, look_key, packet)                                                        \
	do {                                                                                      \
		struct bpf_sock *look_sk = bpf_map_lookup_elem(&(socks), look_key);               \
		struct tcp_sock *look_tp;                                                         \
		if (!look_sk)                                                                     \
			break;                                                                    \
		look_tp = bpf_skc_to_tcp_sock(look_sk);                                           \
		if (look_tp) {                                                                    \
			(packet).sk_addr = (__u64)(unsigned long)look_tp;                         \
			(packet).write_seq = look_tp->write_seq;                                  \
			(packet).copied_seq = look_tp->copied_seq;                                \
			(packet).rcv_nxt = look_tp->rcv_nxt;                                      \
		}                                                                                 \
		bpf_sk_release(look_sk);                                                          \
	} while (0)

/*
 * Called by BPF_PROG_RUN when a socket is registered: its address and its sequence numbers, which system calls do not
 * tell. A classifier, because that kind may look into a socket map and release what it found; never attached.
 */
SEC("tc")
int socket_look(struct __sk_buff *skb)
{
	struct look_packet packet = {};
	__u64 cookie;

	if (bpf_skb_load_bytes(skb, 0, &packet, sizeof(packet)))
		return 0;
	cookie = packet.sk_addr;
	packet.sk_addr = 0;
	if (packet.map == LOOK_CLIENT)
		LOOK_INTO(client_socks, &packet.slot, packet);
	else if (packet.map == LOOK_SERVER)
		LOOK_INTO(server_socks, &packet.slot, packet);
	else if (packet.map == LOOK_BACKEND)
		LOOK_INTO(backend_socks, &packet.slot, packet);
	else if (packet.map == LOOK_APP)
		LOOK_INTO(app_socks, &cookie, packet);
	bpf_skb_store_bytes(skb, 0, &packet, sizeof(packet), 0);
	return 0;
}

#endif /* GAUGES_BPF_H */
