// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Cases from the standard input, their text to the standard output; each behind its size in four bytes, little-endian. */
#include <stdio.h>
#include <stdlib.h>

#include "framing.h"

int main(void)
{
	__u32 size;

	while (fread(&size, 4, 1, stdin) == 1) {
		__u8 *data = malloc(size ? size : 1);
		const char *text;
		size_t length;

		if (!data || (size && fread(data, size, 1, stdin) != 1))
			return 2;
		text = framing_case(data, size, &length);
		if (!text)
			return 2;
		size = length;
		fwrite(&size, 4, 1, stdout);
		fwrite(text, length, 1, stdout);
		fflush(stdout); /* so that the first case without an answer is the one that ended this */
		free(data);
	}
	return 0;
}
