/* Maps files as code, as any user may, and waits: mapper [--lease] FILE...

   --lease: holds a write lease on each file, so that whoever opens it would have to wait. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	int lease = count > 1 && !strcmp(arguments[1], "--lease");

	signal(SIGIO, SIG_IGN);
	for (int at = 1 + lease; at < count; at++) {
		int file = open(arguments[at], lease ? O_RDWR : O_RDONLY);

		if (file < 0 || mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0) == MAP_FAILED) {
			perror(arguments[at]);
			return 1;
		}
		if (lease && fcntl(file, F_SETLEASE, F_WRLCK)) {
			perror("lease");
			return 1;
		}
		if (!lease)
			close(file);
	}
	puts("ready");
	fflush(stdout);
	pause();
	return 0;
}
