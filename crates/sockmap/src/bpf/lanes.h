/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * State that the lane programs and user space share, in BPF_F_MMAPABLE arrays.
 *
 * Invariants:
 * - A word of 64 bits that both sides change is changed by one atomic instruction; the comment of each
 *   field names who may write it.
 * - No pointers, no implicit padding; user space takes its types from this file's BTF, never a copy.
 * - LANES_ABI changes with every layout; user space refuses an object of another one.
 */
#ifndef LANES_H
#define LANES_H

#include "wire.bpf.h"

#define LANES_ABI 13

/* Direction word: who owns one direction of a socket, and how many bytes it has brought so far. */
#define DIR_USER (1ULL << 63)  /* user space reads it; else a program forwards it */
#define DIR_BYTES (~DIR_USER) /* bytes that arrived, or for a backend the end position on its TCP stream */

/*
 * Link word of a client. One compare-and-swap both proves that the link still stands and changes it,
 * which closes the race between a release and a request that is just being added.
 */
#define LINK_PENDING_MASK 0xffffULL	  /* ReadyForQuery messages outstanding */
#define LINK_OPEN (1ULL << 16)		  /* inside a message, or messages without their Sync */
#define LINK_STATUS_SHIFT 17		  /* last ReadyForQuery: 0 'I', 1 'T', 2 'E' */
#define LINK_STATUS_MASK (3ULL << 17)
#define LINK_LINKED (1ULL << 19)	  /* the server field is valid */
#define LINK_HELD (1ULL << 20)		  /* no link, add and release: user space's word, or a program's that could not release */
#define LINK_PINNED (1ULL << 21)	  /* session pooling: no release at ReadyForQuery. Without LINK_LINKED: the link to come will be so */
#define LINK_COPY (1ULL << 22)		  /* CopyInResponse seen: only CopyData, CopyDone, CopyFail */
#define LINK_EXTENDED (1ULL << 23)	  /* what was asked for last is the extended protocol's */
#define LINK_SERVER_SHIFT 24
#define LINK_SERVER_BITS 20
#define LINK_SERVER_MASK (((1ULL << LINK_SERVER_BITS) - 1) << LINK_SERVER_SHIFT)
/* In the server's place, without LINK_LINKED: a request of the client is kept in the queue of its pool. */
#define LINK_KEPT (1ULL << LINK_SERVER_SHIFT)
#define LINK_GEN_SHIFT 44 /* counts links, so that an old expectation cannot match a new link */

#define CLEAR_KNOWN (1ULL << 63) /* in client_slot.clear, beside a generation */

/* In next_seq, beside a sequence number. */
#define NEXT_SEQ_KNOWN (1ULL << 63)
#define NEXT_SEQ_LOST (1ULL << 62) /* bytes were lost for want of memory: nothing that follows may be heard */

/* Peer word of a server: PEER_LINKED | client slot. */
#define PEER_LINKED (1ULL << 63)

/* In server_slot.answered: SENT_KNOWN | generation of the client's link word << SENT_GEN_SHIFT | client slot. */
#define SENT_KNOWN (1ULL << 63)
#define SENT_GEN_SHIFT 32
#define SENT_GEN_MASK 0xfffffULL
/* Nanoseconds for which a server is doubted whose answer may be lost: a backend whose send() failed has ended by then. */
#define DOUBT_NS 1000000000ULL

/* Flags of a server slot, user space only. */
#define SRV_LOCAL 1u   /* lane A: the backend's own socket is in backend_socks */
#define SRV_RETIRE 2u  /* do not return it to the idle set: release goes to user space */
#define SRV_LOST 4u    /* with SRV_RETIRE: its last answer was lost, so the backend's send() failed, and it reads nothing any more */

/* Flags of a client slot, programs only. */
#define CLI_UNNAMED 1u /* the linked server's unnamed statement is the client's own, or none */
#define CLI_BATCH 2u   /* extended protocol messages without their Sync */
#define CLI_NAMED 4u   /* a named statement was used since the link: errors are user space's to read */
#define CLI_HANDED 16u /* a backend's send() brought the first request of the link along */
#define CLI_DIRECT 8u  /* lane B: all requests since nothing was pending went straight to the backend */

/* Tap word of a client: 0, or TAP_TELL and, where requests wait for mirrors, the position up to which those have answered. */
#define TAP_TELL 1u	/* what is forwarded is told, see tap.bpf.h */
#define TAP_WAITS 2u	/* what begins a transaction is for user space, unless mirrors have answered all before it */
#define TAP_STEPS 4u	/* with TAP_WAITS: and so is each statement in it, and requests are told as they come */
#define TAP_AT_SHIFT 3	/* low bits of the position: a transaction of exactly 512 MiB of requests, or of twice that, holds nobody */

/* Flags of an application's socket in a client slot, programs only. */
#define APP_AWAKE 1u /* nobody sleeps in a recv() that began before the socket was in its map */

/* Flags of a pool slot, user space only. */
#define POOL_CLOSED 1u /* PAUSE, DISABLE, or lane switched off: programs take no server */

#define POOL_ORDINALS_MAX 512 /* servers of one pool that the idle set can hold */
#define POOL_WORDS (POOL_ORDINALS_MAX / 64)
#define QUEUE_PLACES 512 /* requests of one pool that can be kept, a power of two */

/* A place in a pool's queue: QUEUE_TAKEN | its number << QUEUE_NUMBER_SHIFT | client slot; 0: empty, or about to be written. */
#define QUEUE_TAKEN (1ULL << 63)
#define QUEUE_NUMBER_SHIFT 32
#define QUEUE_NUMBER_MASK 0x7fffffffULL
#define QUEUE_NOBODY 0xffffffffu /* as the client: its keeper could not keep it after all */

struct client_slot {
	__u64 link;	  /* both, CAS */
	__u64 tx_expect;  /* both, low 32 bits: what the socket's write_seq reaches when all redirects are written */
	__u64 req_dir;	  /* both: direction word of the requests */
	__u64 req_fwd;	  /* program: request bytes forwarded */
	__u64 req_passed; /* program: request bytes passed to user space */
	__u64 sk_addr;	  /* user: kernel address of the client's socket, for the room check */
	__u64 cookie;	  /* user */
	__u32 pool;	  /* user */
	__u32 fingerprint; /* user: of the client's parameters */

	struct wire_state req; /* owner of the request direction */
	__u32 flags;	       /* program */
	__u32 cycle_bytes;     /* program: request bytes forwarded since nothing was pending */
	__u32 reason;	       /* program sets when it hands over, user clears when it takes */
	__u64 active_ns;       /* program: coarse clock of the last forwarded byte */
	__u64 xact_start_ns;   /* program: start of the transaction */
	__u64 query_start_ns;  /* program: pending left 0 */
	__u64 xacts;	       /* program: transactions that ended in a lane */
	__u64 queries;	       /* program: ReadyForQuery forwarded */

	__u64 resp_bytes; /* program: response bytes forwarded */
	__u64 xact_ns;	  /* program: sum over xacts */
	__u64 query_ns;	  /* program: sum of times with something pending */
	__u32 in_use;	  /* user */
	__u32 links;	  /* program: links that it made, modulo 2^32 */
	__u32 tap;	  /* user: tap word; TAP_TELL and TAP_WAITS while it holds the client */
	__u32 tap_lost;	  /* program: the tap had no room in this transaction */
	/* Program: CLEAR_KNOWN and the generation of the link word if, when requests last came for user space, no link stood and
	 * all that was ever forwarded to the client was in its socket. */
	__u64 clear;
	__u64 next_seq; /* program: NEXT_SEQ_KNOWN and the sequence number behind the last byte that came */

	/* Lane B. */
	__u64 app_addr;	    /* user: kernel address of the application's own socket; 0: not known */
	__u64 app_cookie;   /* user, before app_addr: its cookie and its key in app_socks */
	__u64 last_addr;    /* program: the backend's socket from which a response last went to app_addr; 0: none did */
	__u64 last_cookie;  /* program */
	__u32 last_server;  /* program: its slot; while last_addr is 0 the server that the client had last, a hint */
	__u32 last_run;	    /* program: its runs_begin behind that send */
	__u32 app_after;    /* user, before app_addr: the socket's rcv_nxt when it entered its map */
	__u32 app_flags;    /* program */
	__u32 app_chunks;   /* program: redirected into it since its queue was seen empty */
	__u32 app_run;	    /* program: bytes of responses since the last ReadyForQuery */
	__u64 decided_seq;  /* program: next_seq when the last bytes that came were forwarded or passed */
	__u32 cycle_chunks; /* program: straight to the backend since nothing was pending */
	__u32 sender;	    /* both: the thread that last sent straight to a backend; 0: that send is over */
};

struct server_slot {
	__u64 peer;	 /* who linked it, then who released it */
	__u64 dir;	 /* both: direction word of the responses */
	__u64 fwd;	 /* program: response bytes forwarded */
	__u64 passed;	 /* program: response bytes passed to user space */
	/* Both, low 32 bits. Lane D: as in client_slot, for the pooler's socket to the server. Lane A: what the backend's
	 * copied_seq reaches when it has read all that user space wrote to it. */
	__u64 tx_expect;
	__u64 cookie;	 /* user: of the socket whose program finds this slot */
	__u32 pool;	 /* user */
	__u32 ordinal;	 /* user: bit in the pool's idle set */
	__u32 fingerprint; /* user */
	__u32 flags;	 /* both, atomic or/and */

	struct wire_state resp; /* owner of the response direction */
	__u32 run_bytes;	/* program: response bytes since the link */
	__u32 reason;		/* as in client_slot */
	__u32 runs_begin;	/* program (lane A): started; equal to runs_end when none is running */
	__u32 runs_end;
	__u32 in_use;		/* user */
	__u64 sk_addr;		/* user (lane A): kernel address of the backend's socket */
	__u64 active_ns;	/* program: last ReadyForQuery forwarded */
	__u64 next_seq;		/* program (lane D): as in client_slot */
	__u64 answered;		/* program (lane A): which link it ended last; 0: none */
	__u32 direct;		/* program (lane B): the send at hand goes straight to the application */
	/* Program, 0: none. The send at hand brings a kept request along, which goes first: whose answer the rest is, and BRINGS_*. */
	__u32 brings;
	/* Program: the last answer behind which a request was brought along. Its client, by slot and cookie; and of one that went into that client's
	 * socket what its write_seq reaches when all of it is there. */
	__u64 owed_cookie; /* 0: none, or it is known to be there */
	__u64 told_cookie; /* as owed_cookie, also of lane B */
	__u32 owed_client;
	__u32 owed_seq;
	__u64 pad1[4];
};

#define BRINGS_ANSWER (1u << 31) /* with the client's slot, and BRINGS_DIRECT */
#define BRINGS_DIRECT (1u << 30) /* lane B: it goes straight to the application */

/* A server of the pool: which slot, and whose parameters it carries. */
struct pool_member {
	__u32 server;
	__u32 fingerprint;
};

struct pool_slot {
	__u64 idle[POOL_WORDS]; /* both, atomic: bit = ordinal, set = idle and free to take */
	__u32 waiters;		/* user: clients queued; programs take no server while > 0 */
	__u32 flags;		/* user */
	__u32 ordinals;		/* user: number of members ever used, bounds the search */
	__u32 rotates;		/* user: not 0: a search begins at next, not at the lowest */
	__u32 next;		/* both: behind the ordinal that was taken last, if the pool rotates; a hint, not atomic */
	__u32 announced;	/* both, atomic: an event about its idle set is on its way; user space clears it, then looks */
	/* The queue of kept requests, from begin to end: numbers of places, which are in place[] modulo QUEUE_PLACES. */
	__u64 queue_begin; /* both: whoever has emptied the place moves it on */
	__u64 queue_end;   /* program, CAS */
	__u32 keeps;	   /* user: programs keep requests for which there is no server */
	__u32 pad;
	__u64 pad1[2];
	struct pool_member member[POOL_ORDINALS_MAX]; /* user */
	__u64 place[QUEUE_PLACES]; /* both, CAS */
};

/* Names of prepared statements that a program can rename, and uses of them in one chunk. */
#define STATEMENT_NAME_MAX 63
#define STATEMENT_USES_MAX 8

/* What a client's name stands for: struct client_statement -> __u32, a number that stands for the content. 0 is none. */
struct client_statement {
	__u8 name[STATEMENT_NAME_MAX + 1]; /* zeroes behind it */
	__u32 client;
	__u32 pad;
};

/* What a server has, and under which name, of the same length: struct server_statement -> struct statement_name. */
struct server_statement {
	__u32 server;
	__u32 statement;
};

struct statement_name {
	__u32 length;
	__u8 name[STATEMENT_NAME_MAX];
	__u8 pad;
};

/* Uses of named statements in a chunk: where the name is, which statement. */
struct statement_uses {
	__u32 count;
	__u32 at[STATEMENT_USES_MAX];
	__u32 of[STATEMENT_USES_MAX];
};

#define KEPT_BYTES 1024 /* of a request that can be kept, a power of two */

/*
 * A client's request for which no server was idle. Written by the program that keeps it, before its link word says so; whoever changes that word
 * from LINK_KEPT to something else has it then. Index: the client's slot.
 */
struct kept_request {
	__u64 place;   /* its number in the pool's queue */
	__u64 at_ns;   /* when it came */
	__u64 handed;  /* generation of the link word with which it went to a server */
	__u64 waits;   /* all that were kept of this client and went to a server */
	__u64 wait_ns; /* how long they had waited */
	__u32 length;
	__u32 syncs;	/* ReadyForQuery to expect */
	__u32 extended; /* the last message is of the extended protocol */
	__u32 pad;
	struct statement_uses uses;
	__u32 pad1;
	__u64 words[KEPT_BYTES / 8];
};

struct lane_control {
	__u64 off;	   /* user: non-zero stops every program from forwarding */
	__u64 events_lost; /* program: the ring buffer was full; user space scans the slots */
	__u64 zero;	   /* nobody: a 0 that the verifier does not know, or it would walk a loop anew for each count */
};

/* Which map socket_look looks into. */
enum look_map { LOOK_CLIENT = 1, LOOK_SERVER = 2, LOOK_BACKEND = 3, LOOK_APP = 4 };

/* The packet that socket_look is run on, by BPF_PROG_RUN: question and answer. */
struct look_packet {
	__u8 ethernet[16]; /* zero: where a packet has its Ethernet header */
	__u32 map;	   /* enum look_map */
	__u32 slot;
	__u64 sk_addr;	   /* kernel address of the socket in that slot; 0: there is none. Asked of LOOK_APP: its cookie, for it has no slot */
	__u32 write_seq;
	__u32 copied_seq;
	__u32 rcv_nxt;
	__u32 pad;
};

enum lane_event_kind {
	EVENT_CLIENT_UP = 1, /* slot: client. Read it: user space owns its requests */
	EVENT_SERVER_UP = 2, /* slot: server. User space owns its responses */
	EVENT_POOL_IDLE = 3, /* slot: pool. A server became idle while clients wait or the pool is closed */
};

struct lane_event {
	__u32 kind;
	__u32 slot;
	__u32 reason;
	__u32 pad;
};

/* Why a direction went to user space, or a release did not happen. One table for C, Rust and the docs. */
#define LANE_REASONS(X)                                                                                        \
	X(NONE, "none", "No hand-over.")                                                                      \
	X(USER, "user", "User space asked for it.")                                                           \
	X(OFF, "off", "All lanes are switched off.")                                                          \
	X(POOL_CLOSED, "pool_closed", "The pool is paused, disabled or has its lane switched off.")           \
	X(WAITERS, "waiters", "Clients are queued: user space grants servers in their order.")               \
	X(NO_SERVER, "no_server", "No idle server.")                                                          \
	X(UNFIT, "unfit", "Idle servers, but none for this client: other parameters, to be closed or checked first, of another lane.") \
	X(MIRROR, "mirror", "A mirror in `mode = sync` has not answered yet what the client said before, and user space holds the request until it has; or its ring had no room for a response.") \
	X(LINK_RACE, "link_race", "The link word kept changing under the program.")                           \
	X(BEHIND, "behind", "Earlier bytes are not where the next ones may not overtake them: responses outside of the client's socket, requests that the backend has not read (lane A).") \
	X(TYPE, "type", "A message type that a lane does not forward.")                                       \
	X(LENGTH, "length", "A message length below 4 or above the limit of its type.")                       \
	X(SPLIT, "split", "A request's head is split between two chunks.")                                    \
	X(BATCH, "batch", "Extended-protocol messages without their Sync in the same chunk.")                \
	X(MESSAGES, "messages", "More than 16,384 messages in one chunk.")                                    \
	X(DEPTH, "depth", "More than 4,096 ReadyForQuery outstanding.")                                       \
	X(NAMED_STATEMENT, "named_statement", "Parse or Close of a named statement, or a name that the lane does not know.") \
	X(UNPREPARED, "unprepared", "The server does not have the named statement yet: user space prepares it there.") \
	X(STATEMENTS, "statements", "More than 8 uses of named statements in one chunk.")                     \
	X(ERROR, "error", "An error on a link that used named statements: user space looks whether one is outdated, and which name the error tells.") \
	X(NAMED_PORTAL, "named_portal", "A Bind to a named portal.")                                          \
	X(UNNAMED_BIND, "unnamed_bind", "Use of an unnamed statement that was not parsed on this link.")      \
	X(UNNAMED_PARSE, "unnamed_parse", "An unnamed statement that is not bound in the same chunk: user space remembers its text.") \
	X(TERMINATE, "terminate", "The client sent Terminate.")                                               \
	X(COPY_STRAY, "copy_stray", "CopyData, CopyDone or CopyFail outside of COPY, or others inside.")      \
	X(COPY_PIPELINE, "copy_pipeline", "CopyInResponse inside a pipeline or the extended protocol.")       \
	X(COPY_END, "copy_end", "The end of a COPY FROM STDIN: user space knows what follows it, and sees to it that none of its data is still on its way to the server.") \
	X(IDLE_LINK, "idle_link", "A request left its link idle without a ReadyForQuery to end it.")          \
	X(REQUEST_BUDGET, "request_budget", "Requests of one cycle passed the byte budget.")                  \
	X(RESPONSE_QUEUE, "response_queue", "The client reads too slowly: its queue is at the limit.")        \
	X(RESPONSE_RUN, "response_run", "The response passed the byte limit of a lane.")                      \
	X(ROOM, "room", "The client's send buffer (lane A) or the application's queue (lane B) has no room for the whole message.")               \
	X(GATHER, "gather", "A chunk could not be made contiguous: a send of the backend above 65,520 bytes (lane A), or no memory.") \
	X(NO_CLIENT, "no_client", "The server sent something while no client was linked.")                    \
	X(AFTER_RFQ, "after_rfq", "Messages followed the last ReadyForQuery.")                                \
	X(RFQ_UNEXPECTED, "rfq_unexpected", "A ReadyForQuery that nobody asked for, or with a bad status.")   \
	X(DIRTY, "dirty", "The server reports a parameter or dropped statements: user space keeps the books.") \
	X(RETIRE, "retire", "The server is to be closed or checked before its next use.")                     \
	X(HELD, "held", "The link is held: by user space, or because its server may not be released.")                              \
	X(TARGET, "target", "The target socket is gone or refused the redirect.")                             \
	X(PARTIAL_SEND, "partial_send", "An earlier redirect was not written whole; the session is ended.")   \
	X(UNKNOWN, "unknown", "A socket without a slot.")

enum lane_reason {
#define X(ident, name, meaning) REASON_##ident,
	LANE_REASONS(X)
#undef X
	REASON_NR
};

/* What the programs count, per CPU; indexes of the map `counters` after the reasons. */
#define LANE_COUNTERS(X)                                                                               \
	X(REQUESTS_D, "requests_d", "Chunks of requests forwarded by lane D.")                        \
	X(REQUESTS_A, "requests_a", "Chunks of requests forwarded by lane A.")                        \
	X(REQUESTS_B, "requests_b", "Chunks of requests put into the backend's socket in the application's own send().") \
	X(RESPONSES_D, "responses_d", "Chunks of responses forwarded by lane D.")                     \
	X(RESPONSES_A, "responses_a", "Chunks of responses forwarded by lane A.")                     \
	X(RESPONSES_B, "responses_b", "Chunks of responses forwarded into the application's own socket.") \
	X(XACTS_D, "xacts_d", "Transactions that ended in lane D.")                                   \
	X(XACTS_A, "xacts_a", "Transactions that ended in lane A.")                                   \
	X(XACTS_B, "xacts_b", "Transactions that ended in lane B.")                                   \
	X(LINKS, "links", "Links made by a program.")                                                 \
	X(RELEASES, "releases", "Links ended by a program.")                                          \
	X(PASSED_CLIENT, "passed_client", "Chunks passed to user space from clients.")               \
	X(PASSED_SERVER, "passed_server", "Chunks passed to user space from servers.")               \
	X(KEPT, "kept", "Requests kept in the kernel until a server was free.")                      \
	X(HANDED_ON, "handed_on", "Kept requests that a backend's own send() brought to it.")         \
	X(OVERLAPS, "overlaps", "Segments cut to what is new: a retransmission began with bytes that had come.") \
	X(EVENTS, "events", "Events posted.")                                                         \
	X(EVENTS_LOST, "events_lost", "Events that found the ring full; recovered by a scan.")        \
	X(TAPS, "taps", "Chunks told to user space for mirrors.")                                     \
	X(TAPS_LOST, "taps_lost", "Chunks for mirrors that found their ring full; the rest of their transaction is left out.")

enum lane_counter {
#define X(ident, name, meaning) COUNTER_##ident,
	LANE_COUNTERS(X)
#undef X
	COUNTER_NR
};

_Static_assert(sizeof(struct client_slot) == 256, "client_slot is four cache lines");
_Static_assert(sizeof(struct server_slot) == 192, "server_slot is three cache lines");
_Static_assert(sizeof(struct pool_slot) == 128 + 8 * POOL_ORDINALS_MAX + 8 * QUEUE_PLACES, "pool_slot");
_Static_assert(sizeof(struct kept_request) == 128 + KEPT_BYTES, "kept_request");
_Static_assert(sizeof(struct lane_event) == 16, "lane_event");
_Static_assert(sizeof(struct look_packet) == 48, "look_packet");

#endif /* LANES_H */
