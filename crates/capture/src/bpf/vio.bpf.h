/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Calls of MariaDB and MySQL: vio_read, vio_write and their counterparts with TLS, vio_ssl_read and vio_ssl_write, whose first
 * argument, a Vio, is the connection. Which thread calls does not matter: with a thread pool a session wanders.
 *
 * Called by uprobes in every process that runs the executable; only the wanted one counts, and of its connections only what the
 * packets do not show: all of a Unix socket, and of TCP what goes through TLS. A Vio that has used TLS uses nothing else from then
 * on: what its TLS library moves by vio_read and vio_write is not plain text.
 */
#ifndef VIO_BPF_H
#define VIO_BPF_H

#include "call.bpf.h"

/* Sessions of all processes that run the executable are in one table: an address means something in one of them only. */
struct vio_key {
	__u64 vio;
	__u32 tgid;
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct vio_key);
	__type(value, struct session);
} vios SEC(".maps");

/* The call under way in a thread. */
struct vio_call {
	__u64 vio; /* 0: none that is wanted */
	__u64 buffer;
	__u64 entered;
	__u32 tls; /* inside vio_ssl_*: what it calls moves no plain text */
	__u32 told; /* a statement has begun since the last read */
	__u64 reader; /* the Vio that was read last, while texts are wanted */
	__u32 texts; /* as control.texts was then */
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct vio_call);
} vio_calls SEC(".maps");

/* Tells sessions whose Vio has the same address, one after the other. */
__u64 vio_sessions = 0;

/*
 * The kernel's socket behind a Vio. Its first field is a MYSQL_SOCKET, whose first is the file descriptor (include/violite.h and
 * mysql/psi/mysql_socket.h of MySQL 5.6 and later, and of MariaDB); everything behind it differs between versions.
 */
static __always_inline struct sock___capture *vio_socket(struct task_struct___capture *task, __u64 vio)
{
	struct file___capture **files, *file = NULL;
	struct socket___capture *socket;
	int fd = -1;

	if (bpf_probe_read_user(&fd, sizeof(fd), (void *)vio) || fd < 0 ||
	    (__u32)fd >= BPF_CORE_READ(task, files, fdt, max_fds))
		return NULL;
	files = BPF_CORE_READ(task, files, fdt, fd);
	if (bpf_probe_read_kernel(&file, sizeof(file), files + fd) || !file)
		return NULL;
	socket = BPF_CORE_READ(file, private_data);
	/* Only of a socket's file this is a struct socket, which points back. */
	if (!socket || BPF_CORE_READ(socket, file) != file)
		return NULL;
	return BPF_CORE_READ(socket, sk);
}

static __always_inline void decide_vio(struct session *session, struct task_struct___capture *task, __u64 vio)
{
	struct sock___capture *sk = vio_socket(task, vio);

	session->kind = SESSION_FOREIGN;
	session->family = sk ? BPF_CORE_READ(sk, __sk_common.skc_family) : 0;
	if (session->family == AF_UNIX) {
		session->kind = SESSION_UNIX;
		return;
	}
	if (session->family == AF_INET) {
		BPF_CORE_READ_INTO((__u32 *)session->peer.remote, sk, __sk_common.skc_daddr);
		BPF_CORE_READ_INTO((__u32 *)session->local, sk, __sk_common.skc_rcv_saddr);
	} else if (session->family == AF_INET6) {
		BPF_CORE_READ_INTO(&session->peer.remote, sk, __sk_common.skc_v6_daddr.in6_u.u6_addr8);
		BPF_CORE_READ_INTO(&session->local, sk, __sk_common.skc_v6_rcv_saddr.in6_u.u6_addr8);
		unmap_session(session);
	} else {
		hit(HIT_LAYOUT);
		return;
	}
	session->peer.remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	session->peer.local_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	/* The server's own connections, as a replica's to its source, are Vios, too: the words of another server, not of a client. */
	if (server_port != 0 && session->peer.local_port != server_port)
		return;
	/* Without the packets, all of TCP is left to the probes. */
	session->kind = server_port == 0 ? SESSION_ENCRYPTED : SESSION_TCP;
}

static __always_inline int is_wanted_process(__u32 tgid)
{
	struct control *settings = controls();

	return settings && settings->postmaster == tgid;
}

/* `key_of_hit`: the hit that it counts as, if the connection is one of the wanted process' that is understood. */
static __always_inline void vio_enter(__u64 vio, __u64 buffer, __u32 key_of_hit, __u32 tls)
{
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct vio_key key = { .vio = vio, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct session *session;
	struct vio_call *call;

	if (!is_wanted_process(key.tgid))
		return;
	call = bpf_task_storage_get(&vio_calls, (void *)task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!call || call->tls)
		return;
	session = bpf_map_lookup_elem(&vios, &key);
	if (!session) {
		struct session new = {};

		decide_vio(&new, task, vio);
		new.start = __sync_fetch_and_add(&vio_sessions, 1);
		bpf_map_update_elem(&vios, &key, &new, BPF_ANY);
		session = bpf_map_lookup_elem(&vios, &key);
		if (!session)
			return;
	}
	if (session->kind != SESSION_FOREIGN)
		hit(key_of_hit);
	if (tls && session->kind == SESSION_TCP)
		session->kind = SESSION_ENCRYPTED;
	if (tls)
		session->tls = 1;
	call->tls = tls;
	if ((session->kind == SESSION_UNIX || session->kind == SESSION_ENCRYPTED) && session->tls == tls) {
		call->vio = vio;
		call->buffer = buffer;
		call->entered = bpf_ktime_get_ns();
	}
}

static __always_inline void vio_exit(struct pt_regs *ctx, __u32 direction, __u32 tls)
{
	struct vio_call *under_way =
		bpf_task_storage_get(&vio_calls, (void *)bpf_get_current_task_btf(), 0, 0);
	struct vio_key key = { .tgid = bpf_get_current_pid_tgid() >> 32 };
	long n = PT_REGS_RC(ctx);
	struct session *session;

	if (!under_way || under_way->tls != tls)
		return;
	key.vio = under_way->vio;
	under_way->tls = 0;
	under_way->vio = 0;
	if (key.vio == 0 || n <= 0)
		return;
	session = bpf_map_lookup_elem(&vios, &key);
	if (session)
		call(session, direction, under_way->entered, under_way->buffer, n, tls ? EVENT_DECRYPTED : 0);
}

#define VIO_PROBES(name, direction, tls)                                    \
	SEC("uprobe")                                                       \
	int name##_enter(struct pt_regs *ctx)                               \
	{                                                                   \
		vio_enter(PT_REGS_PARM1(ctx), PT_REGS_PARM2(ctx),           \
			  direction == DIRECTION_FRONTEND ? HIT_READ : HIT_WRITE, tls); \
		return 0;                                                   \
	}                                                                   \
                                                                            \
	SEC("uretprobe")                                                    \
	int name##_exit(struct pt_regs *ctx)                                \
	{                                                                   \
		vio_exit(ctx, direction, tls);                              \
		return 0;                                                   \
	}

VIO_PROBES(vio_read, DIRECTION_FRONTEND, 0)
VIO_PROBES(vio_write, DIRECTION_BACKEND, 0)
VIO_PROBES(vio_ssl_read, DIRECTION_FRONTEND, 1)
VIO_PROBES(vio_ssl_write, DIRECTION_BACKEND, 1)

/*
 * Texts of statements that were prepared before the capture. The two programs are attached only while such statements are known: this one to
 * vio_read and vio_ssl_read, because the thread that reads a command is the one that executes it.
 */
SEC("uprobe")
int text_read(struct pt_regs *ctx)
{
	struct control *settings = controls();
	struct vio_call *call;

	if (!settings || settings->postmaster != (__u32)(bpf_get_current_pid_tgid() >> 32))
		return 0;
	call = bpf_task_storage_get(&vio_calls, (void *)bpf_get_current_task_btf(), 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (call) {
		call->reader = PT_REGS_PARM1(ctx);
		call->texts = settings->texts;
		call->told = 0;
	}
	return 0;
}

struct searched {
	__u64 statement;
	__u64 text;
	__u64 len;
};

/* A CSET_STRING: the text and its character set (sql/sql_class.h and sql/sql_string.h of MySQL 5.6; MariaDB). */
struct charset_string {
	__u64 text;
	__u64 len;
	__u64 charset;
};

/* Where the name is in a CHARSET_INFO, behind three numbers and its state (include/m_ctype.h). */
#define CHARSET_NAME 16
/* How far a Statement is searched, in words. In MariaDB 10.11 the text begins behind 13 of them (Statement::set_statement copies it from 0x68). */
#define STATEMENT_WORDS 40

/* Takes the first member that has a text and a character set with a name, as utf8mb4 or latin1: nothing else in a Statement looks so. */
static long statement_step(__u32 i, struct searched *s)
{
	struct charset_string string;
	__u8 letters[4];
	__u64 name;

	if (bpf_probe_read_user(&string, sizeof(string), (void *)(s->statement + i * sizeof(__u64))))
		return 1;
	if (string.text == 0 || string.len == 0 || string.charset == 0)
		return 0;
	if (bpf_probe_read_user(&name, sizeof(name), (void *)(string.charset + CHARSET_NAME)) ||
	    bpf_probe_read_user(letters, sizeof(letters), (void *)name))
		return 0;
	for (int at = 0; at < 3; at++) {
		if (letters[at] < 'a' || letters[at] > 'z')
			return 0;
	}
	if (string.len < ACTIVITY_BYTES_MAX) {
		s->text = string.text;
		s->len = string.len;
	}
	return 1;
}

/*
 * Statement::set_n_backup_statement(this, statement, backup): a prepared statement begins to run, or to be prepared, and the thread takes
 * its text and all else for its own. What it executes may have another text, with values in it, for the server's logs; the statement has what the client
 * prepared. Where, differs between versions. Only the first after a command was read: what runs inside of that one is no command.
 */
SEC("uprobe")
int statement(struct pt_regs *ctx)
{
	struct event_head head = { .kind = EVENT_ACTIVITY, .direction = DIRECTION_FRONTEND };
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct vio_key key = { .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct searched found = { .statement = PT_REGS_PARM2(ctx) };
	struct session *known, session = {};
	struct control *settings = controls();
	struct vio_call *call;

	if (!settings || settings->postmaster != key.tgid)
		return 0;
	call = bpf_task_storage_get(&vio_calls, (void *)task, 0, 0);
	/* One that read before the programs were attached may have read another's command since. */
	if (!call || call->reader == 0 || call->texts != settings->texts || call->told)
		return 0;
	call->told = 1;
	hit(HIT_ACTIVITY);
	key.vio = call->reader;
	known = bpf_map_lookup_elem(&vios, &key);
	if (known) {
		session = *known;
	} else {
		/* Not remembered: without the probe of vio_delete nobody would forget it when another connection has its address. */
		decide_vio(&session, task, key.vio);
		session.start = ~0ull; /* no session's */
	}
	if (session.kind == SESSION_FOREIGN)
		return 0;
	bpf_loop(STATEMENT_WORDS, statement_step, &found, 0);
	if (found.text == 0)
		return 0;
	fill(&head, &session, bpf_ktime_get_ns());
	record_text(&head, found.text, found.len);
	return 0;
}

/* vio_delete(vio): the connection is over, and its address is free. */
SEC("uprobe")
int vio_delete(struct pt_regs *ctx)
{
	struct vio_key key = { .vio = PT_REGS_PARM1(ctx), .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct session *session;

	if (!is_wanted_process(key.tgid))
		return 0;
	session = bpf_map_lookup_elem(&vios, &key);
	if (!session)
		return 0;
	if (session->kind == SESSION_UNIX || session->kind == SESSION_ENCRYPTED)
		send_exit(session);
	bpf_map_delete_elem(&vios, &key);
	return 0;
}

/* The server ended without saying goodbye to its clients: in every ring, behind what each of them still said. */
SEC("raw_tp/sched_process_exit")
int vio_process_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct event_head head = { .kind = EVENT_EXIT, .flags = EVENT_WHOLE_PROCESS };
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	/* A killed process' threads end in any order, and one that is in a probe leaves it first: none has anything left to say when
	 * the last one exits. The last two may both find themselves the last. */
	if (!is_wanted_process(tgid) || BPF_CORE_READ(task, signal, live.counter) > 0)
		return 0;
	head.ts_ns = bpf_ktime_get_ns();
	head.pid = tgid;
	for (__u32 ring = 0; ring <= rings_mask && ring < RINGS_MAX; ring++)
		send_head(&head, ring);
	return 0;
}

#endif /* VIO_BPF_H */
