/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The programs' C in a process: cases in, lines of text out. */
#ifndef FRAMING_H
#define FRAMING_H

#include <stddef.h>
#include <linux/types.h>

/* First byte of a case. */
#define CASE_LANE 1   /* else: one stream, framed */
#define CASE_PINNED 2 /* session pooling */

/* First byte of a piece. */
#define PIECE_SERVER 1 /* else: of the client */
#define PIECE_RETIRE 2 /* before it, user space wants the server closed */
#define PIECE_HOLD 4   /* before it, user space holds the link */

struct piece {
	__u8 *bytes; /* an allocation of its own, so that the address sanitizer sees every byte too many */
	__u32 size;
	__u8 what;
};

/*
 * Runs a case: one byte, then pieces of { u8 what; u32 size, little-endian; bytes }. The text is valid until the next call; NULL: not a
 * case.
 */
const char *framing_case(const __u8 *data, size_t size, size_t *length);

/* Adds to the text. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends the process if what must hold does not. */
#define CHECK(holds) check(!!(holds), #holds, __FILE__, __LINE__)
void check(int holds, const char *what, const char *file, int line);

/* One piece of a stream; 1: it is bad. */
int frames_piece(const struct piece *piece);
void frames_begin(void);
void frames_end(int bad);

/* One piece of a lane's traffic; 1: user space owns that direction now, or the server. */
int lane_piece(const struct piece *piece);
void lane_begin(int pinned);

#endif /* FRAMING_H */
