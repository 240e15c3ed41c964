/*
 * Asks for counters at a steady beat, in a thread that needs no interpreter.
 *
 * A thread of Python's that is to run a thousand times a second pays for each waking with the interpreter's lock, and
 * is late whenever another thread computes.  This one only asks and keeps the answers, each in a slot of its question's
 * ring, with the times before and after; whoever understands them comes for many at a time.  It knows two questions: a
 * dump of a netlink table that fits one datagram, and files that show one number each.
 *
 * Anything else than such an answer ends the question: to say what is wrong is for those who can read errors.
 *
 * One lock guards everything but the slots.  It is not held while the kernel is asked, which may take long: a question
 * that is being asked is marked as such, and who ends it meanwhile leaves it to the thread to free.
 *
 * The functions are called through ctypes, from probes/native/beats.py.  Times are nanoseconds of CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/*
 * glibc 2.34 gave this function a new version when it moved to another library, and nothing else here is newer than
 * 2.17.  With the old one the library loads on both sides; source: sysdeps/unix/sysv/linux/<machine>/libpthread.abilist.
 */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_condattr_setclock, pthread_condattr_setclock@GLIBC_2.3.3");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_condattr_setclock, pthread_condattr_setclock@GLIBC_2.17");
#endif

#define EXPORTED __attribute__((visibility("default")))
#define SECOND_NS 1000000000ULL
#define TIMER_SLACK_NS 1000UL
#define THREAD_SHARE 3 /* a source is asked at most once in this many times its usual duration */
#define REQUEST_BYTES 64
#define NUMBER_BYTES 20 /* 19 digits and a line feed: a longer number may not go into 64 bits */
#define DONE_BYTES (sizeof(struct nlmsghdr) + sizeof(int))

/* As in probes/native/beats.py. */
struct slot {
	uint64_t due_ns, before_ns, after_ns;
	uint32_t bytes;
	uint32_t reserved;
	unsigned char answer[];
};

/* As in probes/native/beats.py. */
struct standing {
	uint64_t written; /* answers, ever */
	uint64_t missed;  /* beats that were too late, or found the ring full */
	uint64_t spared;  /* beats that were left out, as asking takes long */
	uint64_t due_ns;  /* of the next beat */
	uint32_t ended;   /* whether it asks no more */
	uint32_t reserved;
};

struct question {
	struct question *next;
	int *files; /* of `count` numbers; NULL: netlink */
	uint32_t count;
	int socket;
	uint32_t request_bytes, sequence;
	unsigned char request[REQUEST_BYTES];
	uint64_t period_ns, due_ns;
	int64_t usual_ns; /* smoothed duration */
	uint64_t missed, spared;
	uint32_t slots, slot_bytes;
	unsigned char *ring;
	_Atomic uint64_t written, taken;
	bool asking, paused, ended;
	_Atomic bool abandoned; /* nobody will come for it any more */
};

struct beats {
	pthread_mutex_t lock;
	pthread_cond_t changed; /* waited for by the thread */
	pthread_cond_t asked;   /* waited for by those who want a question not to be asked */
	pthread_cond_t news;    /* waited for by whoever hears the answers */
	bool has_news;          /* a question has ended, or somebody rang */
	struct question *questions;
	uint64_t wakes_ns; /* when the thread wakes by itself; 0: when told to */
	uint64_t asking_since_ns; /* 0: nothing is being asked */
	bool changed_meanwhile;   /* while the thread looked through the questions */
	bool stopping;
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static struct timespec timespec_of(uint64_t at_ns)
{
	return (struct timespec){ .tv_sec = at_ns / SECOND_NS, .tv_nsec = at_ns % SECOND_NS };
}

/* ---- asking ---- */

/* The bytes of a whole table in one datagram, or 0. */
static uint32_t ask_netlink(const struct question *one, unsigned char *answer, uint32_t room)
{
	struct nlmsghdr first, last;
	int error;
	ssize_t size;

	if (send(one->socket, one->request, one->request_bytes, 0) != (ssize_t)one->request_bytes)
		return 0;
	size = recv(one->socket, answer, room, MSG_TRUNC);
	if (size < (ssize_t)(sizeof(first) + DONE_BYTES) || size > (ssize_t)room)
		return 0;
	memcpy(&first, answer, sizeof(first));
	memcpy(&last, answer + size - DONE_BYTES, sizeof(last));
	memcpy(&error, answer + size - sizeof(error), sizeof(error));
	if (first.nlmsg_seq != one->sequence || last.nlmsg_seq != one->sequence || last.nlmsg_type != NLMSG_DONE ||
	    last.nlmsg_len != DONE_BYTES || last.nlmsg_flags & NLM_F_DUMP_INTR || error)
		return 0;
	return size;
}

/* The bytes of all numbers, a bar before, between and after them, or 0. */
static uint32_t ask_files(const struct question *one, unsigned char *answer)
{
	unsigned char *end = answer;

	*end++ = '|';
	for (uint32_t at = 0; at < one->count; at++) {
		ssize_t size = pread(one->files[at], end, NUMBER_BYTES, 0);

		if (atomic_load_explicit(&one->abandoned, memory_order_relaxed))
			return 0; /* the descriptors may be others' by now */
		if (size < 2 || end[size - 1] != '\n')
			return 0;
		for (ssize_t digit = 0; digit < size - 1; digit++)
			if (end[digit] < '0' || end[digit] > '9')
				return 0;
		end += size;
		*end++ = '|';
	}
	return end - answer;
}

/* What came of one beat; false: the question is answered otherwise than it was. */
static bool ask(struct question *one, uint64_t due_ns, uint64_t *before_ns, uint64_t *after_ns)
{
	uint64_t written = atomic_load_explicit(&one->written, memory_order_relaxed);
	struct slot *slot = (struct slot *)(one->ring + written % one->slots * one->slot_bytes);
	uint32_t room = one->slot_bytes - sizeof(*slot);

	*before_ns = slot->before_ns = now_ns();
	slot->bytes = one->files ? ask_files(one, slot->answer) : ask_netlink(one, slot->answer, room);
	*after_ns = slot->after_ns = now_ns();
	slot->due_ns = due_ns;
	if (!slot->bytes)
		return false;
	atomic_store_explicit(&one->written, written + 1, memory_order_release);
	return true;
}

static bool is_full(const struct question *one)
{
	return atomic_load_explicit(&one->written, memory_order_relaxed) -
		       atomic_load_explicit(&one->taken, memory_order_acquire) >=
	       one->slots;
}

/* ---- the beat: as in agent/node/sampling/source.py, where the same is done for sources that only Python can read ---- */

static void schedule(struct question *one, uint64_t before_ns, uint64_t after_ns)
{
	uint64_t period_ns = one->period_ns, missed = 0, pause_ns = 0, steps, late;

	one->usual_ns += ((int64_t)(after_ns - before_ns) - one->usual_ns) / 8;
	if (before_ns > one->due_ns)
		missed = (before_ns - one->due_ns) / period_ns;
	if ((uint64_t)one->usual_ns * THREAD_SHARE > period_ns)
		pause_ns = (uint64_t)one->usual_ns * THREAD_SHARE;
	steps = (pause_ns + period_ns - 1) / period_ns;
	if (!steps)
		steps = 1;
	one->due_ns += (missed + steps) * period_ns;
	if (one->due_ns <= after_ns) { /* one long answer: the beats that it covered are gone */
		late = (after_ns - one->due_ns) / period_ns + 1;
		one->due_ns += late * period_ns;
		missed += late;
	}
	one->missed += missed;
	one->spared += steps - 1;
}

static void free_question(struct question *one)
{
	munmap(one->ring, (size_t)one->slots * one->slot_bytes);
	if (!one->files)
		close(one->socket);
	free(one->files);
	free(one);
}

static void tell(struct beats *beats)
{
	beats->has_news = true;
	pthread_cond_signal(&beats->news);
}

static void end(struct beats *beats, struct question *one)
{
	one->ended = true;
	tell(beats);
}

/* Ask everything that is due; the time of the next beat, 0: there is none.  Called and left with the lock held. */
static uint64_t beat(struct beats *beats)
{
	uint64_t next_ns = 0, now = now_ns(), before_ns, after_ns;
	struct question **link = &beats->questions, *one;
	bool answered;

	while ((one = *link)) {
		if (atomic_load_explicit(&one->abandoned, memory_order_relaxed)) {
			*link = one->next;
			free_question(one);
			continue;
		}
		if (!one->paused && !one->ended && one->due_ns <= now && is_full(one)) {
			uint64_t late = (now - one->due_ns) / one->period_ns + 1;

			one->missed += late;
			one->due_ns += late * one->period_ns;
		} else if (!one->paused && !one->ended && one->due_ns <= now) {
			one->asking = true;
			beats->asking_since_ns = now_ns();
			pthread_mutex_unlock(&beats->lock);
			answered = ask(one, one->due_ns, &before_ns, &after_ns);
			pthread_mutex_lock(&beats->lock);
			one->asking = false;
			beats->asking_since_ns = 0;
			/* New questions come in at the front, and nobody else takes any out: `link` still leads here. */
			if (answered)
				schedule(one, before_ns, after_ns);
			else
				end(beats, one);
			if (one->paused || atomic_load_explicit(&one->abandoned, memory_order_relaxed))
				pthread_cond_broadcast(&beats->asked);
			continue; /* it may have been abandoned meanwhile, and is not due any more */
		}
		if (!one->paused && !one->ended && (!next_ns || one->due_ns < next_ns))
			next_ns = one->due_ns;
		link = &one->next;
	}
	return next_ns;
}

/* ---- what Python calls ---- */

EXPORTED struct beats *beats_new(void)
{
	struct beats *beats = calloc(1, sizeof(*beats));
	pthread_condattr_t monotonic;

	if (!beats)
		return NULL;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_mutex_init(&beats->lock, NULL);
	pthread_cond_init(&beats->changed, &monotonic);
	pthread_cond_init(&beats->asked, &monotonic);
	pthread_cond_init(&beats->news, &monotonic);
	pthread_condattr_destroy(&monotonic);
	return beats;
}

/* The thread's life: returns after beats_stop(). */
EXPORTED void beats_run(struct beats *beats)
{
	/* Wake within a microsecond of the time; the kernel's usual slack is 50. */
	prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
	pthread_mutex_lock(&beats->lock);
	while (!beats->stopping) {
		uint64_t next_ns;

		beats->changed_meanwhile = false;
		next_ns = beat(beats);
		if (beats->stopping || beats->changed_meanwhile)
			continue;
		beats->wakes_ns = next_ns;
		if (!next_ns) {
			pthread_cond_wait(&beats->changed, &beats->lock);
		} else if (next_ns > now_ns()) {
			struct timespec until = timespec_of(next_ns);

			pthread_cond_timedwait(&beats->changed, &beats->lock, &until);
		}
	}
	pthread_mutex_unlock(&beats->lock);
}

EXPORTED void beats_stop(struct beats *beats)
{
	pthread_mutex_lock(&beats->lock);
	beats->stopping = true;
	pthread_cond_signal(&beats->changed);
	pthread_mutex_unlock(&beats->lock);
}

/* Only when the thread has ended, and with it nobody uses any question. */
EXPORTED void beats_free(struct beats *beats)
{
	struct question *one;

	while ((one = beats->questions)) {
		beats->questions = one->next;
		free_question(one);
	}
	pthread_cond_destroy(&beats->changed);
	pthread_cond_destroy(&beats->asked);
	pthread_cond_destroy(&beats->news);
	pthread_mutex_destroy(&beats->lock);
	free(beats);
}

static struct question *begin(struct beats *beats, struct question *one, uint32_t answer_bytes)
{
	one->slot_bytes = (sizeof(struct slot) + answer_bytes + 63) & ~63U;
	one->ring = mmap(NULL, (size_t)one->slots * one->slot_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			 -1, 0);
	if (one->ring == MAP_FAILED) {
		if (!one->files)
			close(one->socket);
		free(one->files);
		free(one);
		return NULL;
	}
	pthread_mutex_lock(&beats->lock);
	one->next = beats->questions;
	beats->questions = one;
	beats->changed_meanwhile = true;
	pthread_cond_signal(&beats->changed);
	pthread_mutex_unlock(&beats->lock);
	return one;
}

/* `answer_bytes`: room for an answer.  NULL with errno set: no memory, or a request that is too long. */
EXPORTED struct question *beats_ask_netlink(struct beats *beats, int socket, const void *request, uint32_t request_bytes,
					    uint32_t answer_bytes, uint64_t period_ns, uint64_t due_ns, uint32_t slots)
{
	struct question *one;
	struct nlmsghdr header;

	if (request_bytes < sizeof(header) || request_bytes > REQUEST_BYTES) {
		errno = EMSGSIZE;
		return NULL;
	}
	one = calloc(1, sizeof(*one));
	if (!one)
		return NULL;
	memcpy(&header, request, sizeof(header));
	memcpy(one->request, request, request_bytes);
	one->request_bytes = request_bytes;
	one->sequence = header.nlmsg_seq;
	/* Of its own: while a question hangs, the caller's number may come to mean another socket. */
	one->socket = fcntl(socket, F_DUPFD_CLOEXEC, 0);
	if (one->socket < 0) {
		free(one);
		return NULL;
	}
	one->period_ns = period_ns;
	one->due_ns = due_ns;
	one->slots = slots;
	return begin(beats, one, answer_bytes);
}

EXPORTED struct question *beats_ask_files(struct beats *beats, const int *files, uint32_t count, uint64_t period_ns,
					  uint64_t due_ns, uint32_t slots)
{
	struct question *one = calloc(1, sizeof(*one));

	if (!one)
		return NULL;
	one->files = calloc(count, sizeof(*files));
	if (!one->files) {
		free(one);
		return NULL;
	}
	memcpy(one->files, files, count * sizeof(*files));
	one->count = count;
	one->period_ns = period_ns;
	one->due_ns = due_ns;
	one->slots = slots;
	return begin(beats, one, 1 + count * (NUMBER_BYTES + 1));
}

EXPORTED const void *beats_ring(const struct question *one, uint32_t *slot_bytes)
{
	*slot_bytes = one->slot_bytes;
	return one->ring;
}

EXPORTED void beats_standing(struct beats *beats, struct question *one, struct standing *standing)
{
	pthread_mutex_lock(&beats->lock);
	standing->written = atomic_load_explicit(&one->written, memory_order_acquire);
	standing->missed = one->missed;
	standing->spared = one->spared;
	standing->due_ns = one->due_ns;
	standing->ended = one->ended;
	pthread_mutex_unlock(&beats->lock);
}

/* Give back the slots of the first `taken` answers, ever. */
EXPORTED void beats_take(struct question *one, uint64_t taken)
{
	atomic_store_explicit(&one->taken, taken, memory_order_release);
}

/* Since when the thread waits for an answer, 0: it does not. */
EXPORTED uint64_t beats_asking_since(struct beats *beats)
{
	uint64_t since_ns;

	pthread_mutex_lock(&beats->lock);
	since_ns = beats->asking_since_ns;
	pthread_mutex_unlock(&beats->lock);
	return since_ns;
}

/* Wait until a time, 0: for ever, or until a question ends or somebody rings, if none did since the last time. */
EXPORTED void beats_wait(struct beats *beats, uint64_t until_ns)
{
	struct timespec until = timespec_of(until_ns);
	int error = 0;

	pthread_mutex_lock(&beats->lock);
	while (!beats->has_news && !error)
		error = until_ns ? pthread_cond_timedwait(&beats->news, &beats->lock, &until) :
				   pthread_cond_wait(&beats->news, &beats->lock);
	beats->has_news = false;
	pthread_mutex_unlock(&beats->lock);
}

EXPORTED void beats_ring_bell(struct beats *beats)
{
	pthread_mutex_lock(&beats->lock);
	tell(beats);
	pthread_mutex_unlock(&beats->lock);
}

/* Let a question not be asked for now; 0, or EBUSY: it still is being asked after `patience_ns`. */
EXPORTED int beats_pause(struct beats *beats, struct question *one, uint64_t patience_ns)
{
	struct timespec until = timespec_of(now_ns() + patience_ns);
	int error = 0;
	bool asking;

	pthread_mutex_lock(&beats->lock);
	one->paused = true;
	while (one->asking && !error)
		error = pthread_cond_timedwait(&beats->asked, &beats->lock, &until);
	asking = one->asking;
	pthread_mutex_unlock(&beats->lock);
	return asking ? EBUSY : 0;
}

EXPORTED void beats_resume(struct beats *beats, struct question *one)
{
	pthread_mutex_lock(&beats->lock);
	one->paused = false;
	beats->changed_meanwhile = true;
	if (!beats->wakes_ns || one->due_ns < beats->wakes_ns) /* to wake a thread costs more than all else here */
		pthread_cond_signal(&beats->changed);
	pthread_mutex_unlock(&beats->lock);
}

/* The question is not to be used any more; its thread frees it. */
EXPORTED void beats_end(struct beats *beats, struct question *one)
{
	pthread_mutex_lock(&beats->lock);
	atomic_store_explicit(&one->abandoned, true, memory_order_relaxed);
	beats->changed_meanwhile = true;
	pthread_cond_signal(&beats->changed);
	pthread_mutex_unlock(&beats->lock);
}
