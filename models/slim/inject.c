/* The library that CUDA_INJECTION64_PATH names: the driver loads it when it starts and calls InitializeInjection.

   It asks CUPTI, which is loaded from SLIM_CUPTI, to be told of every module that a card is given, and of launches. In the
   folder SLIM_TRACE each process PID writes

       PID_N.cubin   the machine code of its Nth module
       PID.log       "began", once CUPTI answers; "launched NAME" once for each kernel; "failed ERROR NAME" for a launch
                     that CUDA's runtime refused: NAME was cut, or never there

   What CUPTI hands over is declared here as its headers have it, since a machine may have none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { void *context, *handle, *descriptor; } Resource;                   /* CUpti_ResourceData */
typedef struct { uint32_t id; size_t size; const char *cubin; } Module;             /* CUpti_ModuleResourceData */
typedef struct { int site; const char *function; const void *arguments; void *result; const char *symbol; } Call;
typedef void Told(void *user, int domain, uint32_t what, const void *about);

enum { DRIVER = 1, RUNTIME = 2, RESOURCE = 3, MODULE_LOADED = 6, ENTER = 0, EXIT = 1, NAMES = 1 << 16 };
static const uint32_t DRIVER_LAUNCHES[] = {307, 442, 477, 478, 652, 653}; /* cuLaunchKernel, ...Cooperative, ...Ex */
static const uint32_t RUNTIME_LAUNCHES[] = {211, 214, 269, 270, 430, 431, 505, 506}; /* cudaLaunchKernel, ...ExC, ... */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file;
static int modules;
static char *seen[NAMES];

/* Whether a text is here for the first time. A full table forgets nothing, and takes nothing new. */
static int is_new(const char *text) {
    uint32_t at = 2166136261u;
    for (const char *c = text; *c; c++) at = (at ^ (uint8_t)*c) * 16777619u;
    for (int tries = 0; tries < NAMES; tries++, at++) {
        char **place = &seen[at % NAMES];
        if (!*place) return (*place = strdup(text)) != NULL;
        if (!strcmp(*place, text)) return 0;
    }
    return 0;
}

static void note(const char *line) {
    if (is_new(line)) fprintf(log_file, "%s\n", line), fflush(log_file);
}

static void keep(const Module *module) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d_%d.cubin", getenv("SLIM_TRACE"), (int)getpid(), modules++);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(module->cubin, 1, module->size, file) != module->size) note("lost a module: no room");
    if (file) fclose(file);
}

static void told(void *user, int domain, uint32_t what, const void *about) {
    char line[8192];
    pthread_mutex_lock(&lock);
    if (domain == RESOURCE && what == MODULE_LOADED) keep(((const Resource *)about)->descriptor);
    if (domain == DRIVER || domain == RUNTIME) {
        const Call *call = about;
        const char *name = call->symbol ? call->symbol : "";
        int error = call->site == EXIT && call->result ? *(const int *)call->result : 0;
        line[0] = 0;
        if (domain == DRIVER && call->site == ENTER && *name) snprintf(line, sizeof line, "launched %s", name);
        if (domain == RUNTIME && error) snprintf(line, sizeof line, "failed %d %s", error, name);
        if (line[0]) note(line);
    }
    pthread_mutex_unlock(&lock);
}

int InitializeInjection(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.log", getenv("SLIM_TRACE"), (int)getpid());
    log_file = fopen(path, "w");
    if (!log_file) return 0;
    const char *name = getenv("SLIM_CUPTI");
    void *cupti = dlopen(name, RTLD_NOW | RTLD_GLOBAL), *subscriber = NULL;
    int (*subscribe)(void **, Told *, void *) = cupti ? dlsym(cupti, "cuptiSubscribe") : NULL;
    int (*enable)(uint32_t, void *, int, uint32_t) = cupti ? dlsym(cupti, "cuptiEnableCallback") : NULL;
    int error = subscribe && enable ? subscribe(&subscriber, told, NULL) : -1;
    if (!error) error = enable(1, subscriber, RESOURCE, MODULE_LOADED);
    if (error) {
        fprintf(log_file, "error CUPTI (%s) does not answer: %d %s\n", name, error, cupti ? "" : dlerror());
        fclose(log_file);
        return 0;
    }
    for (size_t i = 0; i < sizeof DRIVER_LAUNCHES / sizeof *DRIVER_LAUNCHES; i++)
        enable(1, subscriber, DRIVER, DRIVER_LAUNCHES[i]);
    for (size_t i = 0; i < sizeof RUNTIME_LAUNCHES / sizeof *RUNTIME_LAUNCHES; i++)
        enable(1, subscriber, RUNTIME, RUNTIME_LAUNCHES[i]);
    fprintf(log_file, "began\n");
    fflush(log_file);
    return 1;
}
