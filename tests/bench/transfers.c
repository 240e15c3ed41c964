// SPDX-License-Identifier: Apache-2.0
/*
 * Functions with the names and signatures of UCX, NIXL, MPI and NVSHMEM and almost nothing in them, and a program that
 * makes transfers of them: transfers-loop LIBRARY KIND.  Each line of standard input asks for that many transfers and
 * says how many there are to be in a second (0: as many as can be); the answer is the CPU time that they took, ns.
 *
 * Built twice: with LIBRARY the functions, without it the program.  As in target.c each begins with a push.
 */
#include <stddef.h>
#include <stdint.h>

#ifdef LIBRARY

#define EXPORTED __attribute__((visibility("default"), noinline))
#define BEGIN(...) __asm__ volatile("" : : "r"(__builtin_frame_address(0)), ##__VA_ARGS__ : "memory")

EXPORTED int ucp_init_version(void)
{
	return 0;
}

/* The remote address is what it returns: none, or a request. */
EXPORTED void *ucp_put_nbx(void *endpoint, const void *buffer, size_t count, uint64_t remote, void *key, const void *parameters)
{
	BEGIN("r"(endpoint), "r"(buffer), "r"(count), "r"(key), "r"(parameters));
	return (void *)remote;
}

EXPORTED void ucp_request_free(void *request)
{
	BEGIN("r"(request));
}

EXPORTED int post(void *agent, void *request, void *options) __asm__("_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs");
EXPORTED int post(void *agent, void *request, void *options)
{
	BEGIN("r"(agent), "r"(request), "r"(options));
	return 1;
}

EXPORTED int status(void *agent, void *request) __asm__("_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH");
EXPORTED int status(void *agent, void *request)
{
	BEGIN("r"(agent), "r"(request));
	return 0;
}

/* Marks NIXL 1.5, whose requests tell their kind of operation and the sum of their blocks. */
EXPORTED void request_of_nixl(void) __asm__("_ZN12nixlXferReqHC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE14nixl_xfer_op_t10nixl_mem_tS9_mRKSt8weak_ptrI17nixlRemoteSectionE");
EXPORTED void request_of_nixl(void)
{
}

EXPORTED int MPI_Allreduce(const void *send, void *receive, int count, uint64_t type, uint64_t op, uint64_t comm)
{
	BEGIN("r"(send), "r"(receive), "r"(count), "r"(type), "r"(op), "r"(comm));
	return 0;
}

EXPORTED int MPI_Send(const void *buffer, int count, uint64_t type, int to, int tag, uint64_t comm)
{
	BEGIN("r"(buffer), "r"(count), "r"(type), "r"(to), "r"(tag), "r"(comm));
	return 0;
}

EXPORTED int MPI_Isend(const void *buffer, int count, uint64_t type, int to, int tag, uint64_t comm, int *request)
{
	BEGIN("r"(buffer), "r"(count), "r"(type), "r"(to), "r"(tag), "r"(comm));
	*request = (int)0xac000000;
	return 0;
}

EXPORTED int MPI_Wait(int *request, void *status)
{
	BEGIN("r"(request), "r"(status));
	return 0;
}

/* Marks MPICH, whose datatypes are numbers. */
EXPORTED int MPIR_Err_create_code(void)
{
	return 0;
}

EXPORTED void nvshmemx_putmem_on_stream(void *to, const void *from, size_t bytes, int peer, void *stream)
{
	BEGIN("r"(to), "r"(from), "r"(bytes), "r"(peer), "r"(stream));
}

#else

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MPI_DOUBLE 0x4c00080bU /* of MPICH */

static void *(*put)(void *, const void *, size_t, uint64_t, void *, const void *);
static void (*release)(void *);
static int (*post)(void *, void *, void *), (*status)(void *, void *);
static int (*send)(const void *, int, uint64_t, int, int, uint64_t);
static int (*isend)(const void *, int, uint64_t, int, int, uint64_t, int *), (*wait_for)(int *, void *);
static void (*put_on_stream)(void *, const void *, size_t, int, void *);

static uint64_t parameters[8], request[128], descriptors[8 * 4];
static char peer_name[16] = "decode-0";

static void put_at_once(void)
{
	put((void *)4096, parameters, 1 << 20, 0, NULL, parameters);
}

static void put_with_request(void)
{
	release(put((void *)4096, parameters, 1 << 20, (uint64_t)&request[64], NULL, parameters));
}

static void write_blocks(void)
{
	post(NULL, request, NULL);
	status(NULL, request);
}

static void send_message(void)
{
	send(parameters, 1024, MPI_DOUBLE, 3, 0, 5);
}

static void send_and_wait(void)
{
	int sent;

	isend(parameters, 1024, MPI_DOUBLE, 3, 0, 5, &sent);
	wait_for(&sent, NULL);
}

static void put_by_gpu(void)
{
	put_on_stream(request, parameters, 1 << 20, 3, NULL);
}

static const struct {
	const char *name;
	void (*transfer)(void);
} kinds[] = {{"ucx", put_at_once}, {"ucx-request", put_with_request}, {"nixl", write_blocks}, {"mpi", send_message}, {"mpi-request", send_and_wait}, {"nvshmem", put_by_gpu}};

static uint64_t read_clock(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

/* A request of NIXL of eight blocks: nixlXferReqH as far as the programs read it. */
static void make_request(void)
{
	for (int block = 0; block < 8; block++)
		descriptors[4 * block + 1] = 128 << 10;
	request[2] = (uint64_t)peer_name; /* the list: no pointer's lower half is a memory type */
	request[3] = 0;
	request[4] = (uint64_t)descriptors;
	request[5] = request[6] = (uint64_t)(descriptors + 8 * 4);
	request[12] = (uint64_t)peer_name;
	request[13] = strlen(peer_name);
	((uint32_t *)request)[180 / 4] = 1; /* it writes */
	request[216 / 8] = 8 * (128 << 10);
	request[224 / 8] = 8;
}

int main(int argument_count, char **arguments)
{
	void (*transfer)(void) = NULL;
	uint64_t count, rate;
	void *library;

	if (argument_count != 3)
		return 2;
	for (size_t kind = 0; kind < sizeof(kinds) / sizeof(kinds[0]); kind++)
		if (!strcmp(arguments[2], kinds[kind].name))
			transfer = kinds[kind].transfer;
	library = dlopen(arguments[1], RTLD_NOW);
	if (!library || !transfer) {
		fprintf(stderr, "%s\n", library ? "no such kind" : dlerror());
		return 1;
	}
	put = dlsym(library, "ucp_put_nbx");
	release = dlsym(library, "ucp_request_free");
	post = dlsym(library, "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs");
	status = dlsym(library, "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH");
	send = dlsym(library, "MPI_Send");
	isend = dlsym(library, "MPI_Isend");
	wait_for = dlsym(library, "MPI_Wait");
	put_on_stream = dlsym(library, "nvshmemx_putmem_on_stream");
	make_request();
	printf("ready\n");
	fflush(stdout);
	while (scanf("%" SCNu64 " %" SCNu64, &count, &rate) == 2) {
		uint64_t began = read_clock(CLOCK_MONOTONIC), start = read_clock(CLOCK_THREAD_CPUTIME_ID);

		for (uint64_t made = 0; made < count; made++) {
			transfer();
			/* In bursts of a hundred, as a program that serves requests has them. */
			while (rate && made % 100 == 99 &&
			       read_clock(CLOCK_MONOTONIC) < began + (made + 1) * 1000000000U / rate)
				nanosleep(&(struct timespec){0, 1000000}, NULL);
		}
		printf("%" PRIu64 "\n", read_clock(CLOCK_THREAD_CPUTIME_ID) - start);
		fflush(stdout);
	}
	return 0;
}

#endif
