/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Calls of PostgreSQL: secure_read and secure_write, which move plain text whatever TLS, GSSAPI or sockets do below.
 *
 * Called by uprobes in every process that runs the executable; only children of the wanted postmaster count, and of their
 * connections only those that the packets do not show: Unix sockets, and TCP that is encrypted.
 */
#ifndef POSTGRES_BPF_H
#define POSTGRES_BPF_H

#include "call.bpf.h"

/*
 * struct Port, libpq-be.h, PostgreSQL 14 to 18: pgsocket sock; bool noblock; ProtocolVersion proto; SockAddr laddr, raddr;
 * SockAddr is a sockaddr_storage of 128 bytes and its length, 136 with padding.
 */
#define PORT_LADDR 16
#define PORT_RADDR (PORT_LADDR + 136)

/* What is remembered of a process. */
struct backend {
	struct session session;
	__u64 read_buffer;
	__u64 write_buffer; /* of the call under way; 0: not wanted */
	__u64 write_entered;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct backend);
} backends SEC(".maps");

static __always_inline int read_address(__u64 at, __u16 *family, __u8 *address, __u16 *port)
{
	struct {
		__u16 family;
		__be16 port;
		__u8 rest[20]; /* IPv4: address; IPv6: flow, address */
	} name = {};

	if (bpf_probe_read_user(&name, sizeof(name), (void *)at))
		return -1;
	*family = name.family;
	*port = bpf_ntohs(name.port);
	if (name.family == AF_INET)
		__builtin_memcpy(address, name.rest, 4);
	else if (name.family == AF_INET6)
		__builtin_memcpy(address, name.rest + 4, 16);
	return 0;
}

static __always_inline void decide(struct session *session, struct task_struct___capture *task, __u64 port)
{
	struct control *settings = controls();
	__u16 family = 0, local_port = 0;

	/* A session may begin before the recorder knows that its server was started again: it is asked anew with each call. */
	if (!settings || settings->postmaster == 0 || BPF_CORE_READ(task, real_parent, tgid) != (int)settings->postmaster)
		return;
	session->kind = SESSION_FOREIGN;
	session->start = BPF_CORE_READ(task, start_boottime);
	if (read_address(port + PORT_LADDR, &session->family, session->local, &local_port)) {
		hit(HIT_LAYOUT);
		return;
	}
	if (session->family == AF_UNIX) {
		session->kind = SESSION_UNIX;
		return;
	}
	session->peer.local_port = local_port;
	if ((session->family != AF_INET && session->family != AF_INET6) ||
	    read_address(port + PORT_RADDR, &family, session->peer.remote, &session->peer.remote_port) ||
	    family != session->family) {
		hit(HIT_LAYOUT);
		return;
	}
	if (family == AF_INET6)
		unmap_session(session);
	session->kind = SESSION_TCP;
}

static __always_inline struct backend *known(void)
{
	return bpf_task_storage_get(&backends, bpf_get_current_task_btf(), 0, 0);
}

static __always_inline int is_recorded(struct backend *backend)
{
	return backend->session.kind == SESSION_UNIX || backend->session.kind == SESSION_ENCRYPTED;
}

/*
 * What the call that begins is worth: the process, or NULL when it is not wanted. `key`: the hit that it counts as, if it is one of the
 * wanted server's: other clusters on the same executable prove nothing.
 */
static __always_inline struct backend *wanted(__u64 port, __u32 key)
{
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct backend *backend =
		bpf_task_storage_get(&backends, (void *)task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!backend)
		return NULL;
	if (backend->session.kind == SESSION_NEW)
		decide(&backend->session, task, port);
	if (backend->session.kind != SESSION_NEW && backend->session.kind != SESSION_FOREIGN)
		hit(key);
	/* Without the packets, all of TCP is left to the probes. */
	if (backend->session.kind == SESSION_TCP &&
	    (server_port == 0 || bpf_map_lookup_elem(&encrypted, &backend->session.peer)))
		backend->session.kind = SESSION_ENCRYPTED;
	return is_recorded(backend) ? backend : NULL;
}

SEC("uprobe")
int read_enter(struct pt_regs *ctx)
{
	struct backend *backend = wanted(PT_REGS_PARM1(ctx), HIT_READ);

	if (backend)
		backend->read_buffer = PT_REGS_PARM2(ctx);
	return 0;
}

SEC("uretprobe")
int read_exit(struct pt_regs *ctx)
{
	struct backend *backend = known();
	long n = PT_REGS_RC(ctx);
	__u64 from;

	if (!backend || backend->read_buffer == 0)
		return 0;
	from = backend->read_buffer;
	backend->read_buffer = 0;
	if (n > 0)
		call(&backend->session, DIRECTION_FRONTEND, 0, from, n, 0);
	return 0;
}

SEC("uprobe")
int write_enter(struct pt_regs *ctx)
{
	struct backend *backend = wanted(PT_REGS_PARM1(ctx), HIT_WRITE);

	if (backend) {
		backend->write_buffer = PT_REGS_PARM2(ctx);
		backend->write_entered = bpf_ktime_get_ns();
	}
	return 0;
}

SEC("uretprobe")
int write_exit(struct pt_regs *ctx)
{
	struct backend *backend = known();
	long n = PT_REGS_RC(ctx);
	__u64 from;

	if (!backend || backend->write_buffer == 0)
		return 0;
	from = backend->write_buffer;
	backend->write_buffer = 0;
	if (n > 0)
		call(&backend->session, DIRECTION_BACKEND, backend->write_entered, from, n, 0);
	return 0;
}

/* A probed process ends. */
SEC("raw_tp/sched_process_exit")
int process_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct backend *backend = known();

	if (backend && is_recorded(backend))
		send_exit(&backend->session);
	return 0;
}

struct measured {
	__u64 text;
	__u32 len;
	__u32 ended;
};

/* Reads on to the NUL. */
static long activity_step(__u32 i, struct measured *m)
{
	char step[ACTIVITY_STEP_BYTES + 1];
	long n = bpf_probe_read_user_str(step, sizeof(step), (void *)(m->text + m->len));

	if (n < 0)
		return 1;
	/* The count includes a NUL, which replaces the last byte of a string that goes on. */
	m->len += n > 0 ? n - 1 : 0;
	m->ended = n < (long)sizeof(step);
	return m->ended;
}

/*
 * pgstat_report_activity(state, text): the text of what the backend begins, also of a statement that was prepared before the
 * capture. Attached only while such statements are known. The text is measured first, in steps that
 * end with a NUL. One that is longer than all steps is not told: a part of it would be taken for the statement.
 */
SEC("uprobe")
int activity(struct pt_regs *ctx)
{
	struct event_head head = { .kind = EVENT_ACTIVITY, .direction = DIRECTION_FRONTEND };
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct control *settings = controls();
	__u64 text = PT_REGS_PARM2(ctx);
	struct measured m = { .text = text };

	if (text == 0 || !settings || BPF_CORE_READ(task, real_parent, tgid) != (int)settings->postmaster)
		return 0;
	hit(HIT_ACTIVITY);
	/* Verifiers before ab5cfac139ab (6.7; 6.6.15) walk a step once, and would take a length below a step's for certain. */
	m.len = *(volatile __u32 *)&settings->zero;
	bpf_loop(ACTIVITY_STEPS, activity_step, &m, 0);
	if (!m.ended || m.len >= ACTIVITY_BYTES_MAX)
		return 0;
	head.ts_ns = bpf_ktime_get_ns();
	head.cookie = BPF_CORE_READ(task, start_boottime);
	head.pid = bpf_get_current_pid_tgid() >> 32;
	record_text(&head, text, m.len);
	return 0;
}

#endif /* POSTGRES_BPF_H */
