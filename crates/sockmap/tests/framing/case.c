// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Reads a case and runs its pieces. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "framing.h"

static char text[4 << 20];
static size_t said;

void check(int holds, const char *what, const char *file, int line)
{
	if (holds)
		return;
	fprintf(stderr, "%s:%d: not so: %s\n%s", file, line, what, text);
	abort();
}

void say(const char *format, ...)
{
	va_list values;
	int n;

	va_start(values, format);
	n = vsnprintf(text + said, sizeof(text) - said, format, values);
	va_end(values);
	CHECK(n >= 0 && (size_t)n < sizeof(text) - said);
	said += n;
}

const char *framing_case(const __u8 *data, size_t size, size_t *length)
{
	size_t at = 1;
	int over = 0;

	said = 0;
	text[0] = 0;
	if (!size)
		return NULL;
	frames_begin();
	lane_begin(!!(data[0] & CASE_PINNED));
	while (at < size) {
		struct piece piece = { .what = data[at] };

		if (size - at < 5)
			return NULL;
		memcpy(&piece.size, data + at + 1, 4);
		at += 5;
		if (size - at < piece.size)
			return NULL;
		piece.bytes = malloc(piece.size ? piece.size : 1);
		CHECK(piece.bytes);
		memcpy(piece.bytes, data + at, piece.size);
		at += piece.size;
		if (!over)
			over = data[0] & CASE_LANE ? lane_piece(&piece) : frames_piece(&piece);
		free(piece.bytes);
	}
	if (!(data[0] & CASE_LANE))
		frames_end(over);
	*length = said;
	return text;
}
