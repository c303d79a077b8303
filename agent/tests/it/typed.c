/* A module with a data type: the command TYPED.SET <key> [<number>] makes a key of it, and snapshots contain it. It has
 * no digest, so that DEBUG DIGEST says nothing of the number. It declares what it needs of the servers' module API
 * itself, so that no header of theirs is needed to build it. */
#include <stdint.h>

typedef struct {
    uint64_t version;
    void *(*rdb_load)(void *io, int encver);
    void (*rdb_save)(void *io, void *value);
    void (*aof_rewrite)(void *io, void *key, void *value);
    void *mem_usage, *digest;
    void (*free)(void *value);
} Methods;

static int (*get_api)(const char *name, void *function);
static void (*SetModuleAttribs)(void *ctx, const char *name, int version, int api);
static void *(*CreateDataType)(void *ctx, const char *name, int encver, Methods *methods);
static int (*CreateCommand)(void *ctx, const char *name, int (*command)(void *, void **, int), const char *flags,
                            int first, int last, int step);
static void *(*OpenKey)(void *ctx, void *name, int mode);
static int (*ModuleTypeSetValue)(void *key, void *type, void *value);
static void (*CloseKey)(void *key);
static int (*StringToLongLong)(const void *text, long long *number);
static int (*ReplyWithSimpleString)(void *ctx, const char *text);
static int (*ReplicateVerbatim)(void *ctx);
static void (*SaveUnsigned)(void *io, uint64_t value);
static uint64_t (*LoadUnsigned)(void *io);

static void *type;
static char values[256]; /* A value is the place of its number here. */

static void *load(void *io, int encver) {
    (void)encver;
    return &values[LoadUnsigned(io) & 255];
}

static void save(void *io, void *v) { SaveUnsigned(io, (uint64_t)((char *)v - values)); }

static void rewrite(void *io, void *key, void *v) { (void)io, (void)key, (void)v; }

static void forget(void *v) { (void)v; }

static int set(void *ctx, void **argv, int argc) {
    long long number = 7;
    if (argc != 2 && (argc != 3 || StringToLongLong(argv[2], &number) || number < 0 || number > 255))
        return ReplyWithSimpleString(ctx, "a key is wanted, and perhaps a number below 256");
    void *key = OpenKey(ctx, argv[1], 3 /* read and write */);
    ModuleTypeSetValue(key, type, &values[number]);
    CloseKey(key);
    ReplicateVerbatim(ctx);
    return ReplyWithSimpleString(ctx, "OK");
}

#define GET(name) get_api("RedisModule_" #name, (void *)&name)

int RedisModule_OnLoad(void *ctx, void **argv, int argc) {
    (void)argv, (void)argc;
    get_api = (int (*)(const char *, void *))((void **)ctx)[0];
    GET(SetModuleAttribs), GET(CreateDataType), GET(CreateCommand), GET(OpenKey), GET(ModuleTypeSetValue), GET(CloseKey);
    GET(StringToLongLong);
    GET(ReplyWithSimpleString), GET(ReplicateVerbatim), GET(SaveUnsigned), GET(LoadUnsigned);
    SetModuleAttribs(ctx, "typed", 1, 1);
    static Methods methods = {1, load, save, rewrite, 0, 0, forget};
    type = CreateDataType(ctx, "typed-one", 0, &methods);
    return type ? CreateCommand(ctx, "typed.set", set, "write", 1, 1, 1) : 1;
}
