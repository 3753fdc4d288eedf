/* MPI_Allreduce of floats, one thread per rank: in place, or --out-of-place.
 *
 *     mpicc -O2 -o mpi_all_reduce bench/peer/mpi_all_reduce.c
 *     mpirun --bind-to none -n 2 ./mpi_all_reduce --sizes 1000000,10000000
 *
 * Ranks meet at a barrier before every all-reduce. Prints one line of JSON per size: the median of
 * each rank, and of those the largest. Ranks pin themselves, where each has a core. */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void fail(const char *message) {
    fprintf(stderr, "error: %s\n", message);
    MPI_Abort(MPI_COMM_WORLD, 2);
    exit(2);
}

static void pin_to_core(int rank, int ranks) {
    cpu_set_t allowed, own;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < ranks) return;
    for (int core = 0, nth = 0; core < CPU_SETSIZE; core++) {
        if (CPU_ISSET(core, &allowed) && nth++ == rank) {
            CPU_ZERO(&own);
            CPU_SET(core, &own);
            sched_setaffinity(0, sizeof own, &own);
        }
    }
}

/* Seconds of the slowest rank's median. */
static double measure(int rank, int ranks, long bytes, int warmup, int iterations, int in_place) {
    int count = (int)(bytes / 4);
    float *data = malloc(bytes), *result = in_place ? data : malloc(bytes);
    double *seconds = malloc(iterations * sizeof *seconds), median, slowest;
    if (!data || !result || !seconds) fail("not enough memory");
    for (int i = -warmup; i < iterations; i++) {
        for (int j = 0; j < count; j++) data[j] = rank + 1.0f;
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        MPI_Allreduce(in_place ? MPI_IN_PLACE : data, result, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (i >= 0) seconds[i] = MPI_Wtime() - begin;
    }
    for (int j = 0; j < count; j++)
        if (result[j] != ranks * (ranks + 1) / 2.0f) fail("the all-reduce gave a wrong sum");
    qsort(seconds, iterations, sizeof *seconds, compare);
    median = (seconds[(iterations - 1) / 2] + seconds[iterations / 2]) / 2;
    MPI_Allreduce(&median, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (!in_place) free(result);
    free(data);
    free(seconds);
    return slowest;
}

int main(int argc, char **argv) {
    int rank, ranks, length, warmup = 5, iterations = 20, in_place = 1;
    char sizes[1024] = "1000000,10000000,100000000", version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--out-of-place")) in_place = 0;
        else if (i + 1 == argc) fail("the flags are --sizes, --warmup, --iterations, --out-of-place");
        else if (!strcmp(argv[i], "--sizes")) snprintf(sizes, sizeof sizes, "%s", argv[++i]);
        else if (!strcmp(argv[i], "--warmup")) warmup = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--iterations")) iterations = atoi(argv[++i]);
        else fail("the flags are --sizes, --warmup, --iterations, --out-of-place");
    }
    if (warmup < 0 || iterations < 1) fail("--warmup must not be negative, --iterations at least 1");
    pin_to_core(rank, ranks);
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n\"\\")] = 0; /* the name and the number; the rest is how it was built */
    for (char *size = strtok(sizes, ","); size; size = strtok(NULL, ",")) {
        long bytes = atol(size);
        if (bytes < 4 || bytes % 4) fail("--sizes must be multiples of 4, the bytes of a float");
        double seconds = measure(rank, ranks, bytes, warmup, iterations, in_place);
        double algbw = bytes / seconds / 1e9;
        if (rank == 0) {
            printf("{\"side\": \"mpi\", \"version\": \"%s\", \"op\": \"all_reduce\", \"in_place\": %s, "
                   "\"ranks\": %d, \"bytes\": %ld, \"ms\": %.5f, \"algbw\": %.4f, \"busbw\": %.4f}\n",
                   version, in_place ? "true" : "false", ranks, bytes, seconds * 1e3, algbw,
                   algbw * 2 * (ranks - 1) / ranks);
            fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
