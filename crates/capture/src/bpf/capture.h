/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the capture programs and user space share: events, settings, counters.
 *
 * Invariants:
 * - No pointers, no implicit padding; user space takes its types from this file's BTF, never a copy.
 * - Payload bytes of the captured port are in exactly one of the counters recorded, lost and filtered, and all of
 *   them are in seen.
 */
#ifndef CAPTURE_H
#define CAPTURE_H

/* Payload bytes of one event. A larger packet (GSO, GRO, BIG TCP) becomes several events. */
#define EVENT_BYTES_MAX 61440u
/* Events of one packet: BIG TCP allows 512 KiB. */
#define PACKET_EVENTS_MAX 9u
/* Events of one call of secure_write (from PostgreSQL 17 on) or vio_write, which may be of any size. */
#define CALL_EVENTS_MAX 32u
/* A statement's text is told in as many events as a call's bytes; one that is not shorter than all of them is not told. It is measured in steps. */
#define ACTIVITY_BYTES_MAX (CALL_EVENTS_MAX * EVENT_BYTES_MAX)
#define ACTIVITY_STEP_BYTES 255u
#define ACTIVITY_STEPS (ACTIVITY_BYTES_MAX / ACTIVITY_STEP_BYTES + 1)
/* Rings; a connection's events are all in one of them, so that they keep their order. */
#define RINGS_MAX 64u

enum event_kind {
	EVENT_PACKET = 1,   /* a TCP segment, or a part of one */
	EVENT_CALL = 2,	    /* bytes that a function of the server read or wrote */
	EVENT_CLOSE = 3,    /* a socket reached TCP_CLOSE: the kernel's own byte counts */
	EVENT_EXIT = 4,	    /* a probed session ended, and with PostgreSQL its process */
	EVENT_ACTIVITY = 5, /* the text of what a session runs: reported by its backend (PostgreSQL), or prepared before (MariaDB, MySQL) */
	EVENT_TLS = 6,	    /* a connection turned to TLS or GSSAPI encryption */
};

enum event_direction {
	DIRECTION_FRONTEND = 0, /* client to server */
	DIRECTION_BACKEND = 1,	/* server to client */
};

/* Flags of event_head. */
#define EVENT_DECRYPTED 1u	/* calls: the bytes travel by TLS, whatever went before */
#define EVENT_WHOLE_PROCESS 2u	/* exits: of all sessions of the process, whose totals are not told */
#define EVENT_FIN_RECEIVED 4u	/* close: rcv_nxt and bytes_received count a FIN as one byte */
#define EVENT_FIN_SENT 8u	/* close: so does snd_nxt */
#define EVENT_LISTENS 32u	/* packets: for the socket that listens, with its cookie: TCP refuses it unless a handshake is under way */

/*
 * Head of every event; len payload bytes follow, and then padding that has no meaning.
 *
 * The position of the first payload byte is seq for packets and offset for calls. The `skipped` bytes before it were
 * left out on purpose.
 */
struct event_head {
	__u64 ts_ns;  /* CLOCK_MONOTONIC */
	__u64 cookie; /* packets: of the socket; calls, exits, activity: start of the process, or number of the Vio */
	__u64 offset; /* calls: stream offset. exits: bytes read. close: bytes_received. activity: position in the text */
	__u64 more;   /* exits: bytes written. activity: bytes of the whole text. Else 0 */
	__u32 seq;    /* packets. close: rcv_nxt */
	__u32 ack;    /* packets. close: snd_nxt */
	__u32 len;
	__u32 skipped;
	__u32 pid; /* calls, exits, activity */
	__u16 remote_port;
	__u16 local_port;
	__u8 kind;
	__u8 direction;
	__u8 tcp_flags; /* as in the header: FIN 1, SYN 2, RST 4, PSH 8, ACK 16 */
	__u8 family;	/* AF_UNIX, AF_INET, AF_INET6 */
	__u8 flags;
	__u8 pad[3];
	__u8 remote[16]; /* IPv4 addresses are in the first four bytes */
	__u8 local[16];
};

/* A TCP connection by its ends, for the probes: the peer's address as in struct event_head. */
struct peer_key {
	__u8 remote[16];
	__u16 remote_port;
	__u16 local_port;
};

/* One line of accounts. */
struct capture_count {
	__u64 events;
	__u64 bytes;
};

/* Per CPU, by source (0 packets, 1 calls) and direction. */
struct capture_counters {
	struct capture_count seen;
	struct capture_count recorded;
	struct capture_count lost;     /* the ring was full */
	struct capture_count fault;    /* could not be read, or more than the events of one call hold */
	struct capture_count filtered; /* by level, or because the other source has them */
	struct capture_count unheard;  /* events without payload that found the ring full; no bytes */
	struct capture_count again;    /* of all these, packets: below what was passed, so sent again or out of order */
};

#define COUNTERS_SOURCES 2
#define COUNTERS_NR 4 /* source * 2 + direction */

#endif /* CAPTURE_H */
