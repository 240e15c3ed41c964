/* Loads the library that reads counters, on whatever processor this is compiled for, and runs its thread once. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

int main(int count, char **words)
{
	void *library = count == 2 ? dlopen(words[1], RTLD_NOW) : NULL;
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	void *(*make)(void) = (void *(*)(void))dlsym(library, "beats_new");
	void (*run)(void *) = (void (*)(void *))dlsym(library, "beats_run");
	void (*stop)(void *) = (void (*)(void *))dlsym(library, "beats_stop");
	void (*release)(void *) = (void (*)(void *))dlsym(library, "beats_free");
	if (!make || !run || !stop || !release)
		return 2;
	void *beats = make();
	pthread_t thread;
	if (!beats || pthread_create(&thread, NULL, (void *(*)(void *))run, beats))
		return 3;
	usleep(50000);
	stop(beats);
	pthread_join(thread, NULL);
	release(beats);
	puts("ran");
	return 0;
}
