/* A module with the command SAY, which puts its arguments into the replication stream as a command, and does nothing
 * else: so a server of today says what one of another version would. It declares what it needs of the servers' module
 * API itself, so that no header of theirs is needed to build it. */
#include <stddef.h>

static int (*get_api)(const char *name, void *function);
static void (*SetModuleAttribs)(void *ctx, const char *name, int version, int api);
static int (*CreateCommand)(void *ctx, const char *name, int (*command)(void *, void **, int), const char *flags,
                            int first, int last, int step);
static const char *(*StringPtrLen)(const void *string, size_t *length);
static int (*Replicate)(void *ctx, const char *command, const char *format, ...);
static int (*ReplyWithSimpleString)(void *ctx, const char *text);

static int say(void *ctx, void **argv, int argc) {
    if (argc < 3) return ReplyWithSimpleString(ctx, "a command is wanted");
    int said = Replicate(ctx, StringPtrLen(argv[1], NULL), "v", argv + 2, (size_t)(argc - 2));
    return ReplyWithSimpleString(ctx, said == 0 ? "OK" : "not known");
}

#define GET(name) get_api("RedisModule_" #name, (void *)&name)

int RedisModule_OnLoad(void *ctx, void **argv, int argc) {
    (void)argv, (void)argc;
    get_api = (int (*)(const char *, void *))((void **)ctx)[0];
    GET(SetModuleAttribs), GET(CreateCommand), GET(StringPtrLen), GET(Replicate), GET(ReplyWithSimpleString);
    SetModuleAttribs(ctx, "propagate", 1, 1);
    return CreateCommand(ctx, "say", say, "write", 0, 0, 0);
}
