/* ZeroMQ as a rival of the messenger: request and reply over TCP, a ROUTER that answers, a DEALER per connection that asks with so many
 * requests under way. `remora-bench messenger` builds this where libzmq's header and a C compiler are, and has no figures of it elsewhere; nothing
 * else stands on it.
 *
 *   zeromq serve REPLY_BYTES                                        says its address, then its processor seconds for each line it is told
 *   zeromq ask ADDRESS CONNECTIONS DEPTH REQUEST_BYTES MILLISECONDS says: requests seconds mean p50 p99 p99.9 (µs) processor-seconds
 *
 * Counted as in dev/bench/src/messenger: a request is over when its reply has come, whole; exactly DEPTH are under way on each connection.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

/* Sixteen boxes for each doubling of nanoseconds, up to some five hours, as histogram.rs. */
#define STEPS 16
#define BOXES (16 * 42)
static unsigned long boxes[BOXES];

/* Milliseconds without any reply, after which the server is taken for dead. */
#define LONGEST_WAIT 10000

static void die(const char *what)
{
    fprintf(stderr, "zeromq: %s: %s\n", what, zmq_strerror(zmq_errno()));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double processor(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void record(double seconds)
{
    unsigned long nanos = seconds * 1e9, at = nanos < STEPS ? STEPS : nanos;
    int doubling = 0;
    while ((at >> doubling) >= 2 * STEPS)
        doubling++;
    unsigned long box = doubling * STEPS + (nanos >> doubling);
    boxes[box < BOXES ? box : BOXES - 1]++;
}

static double quantile(double q, unsigned long count)
{
    unsigned long wanted = q * count, seen = 0;
    for (int at = 0; at < BOXES; at++) {
        seen += boxes[at];
        if (seen > wanted) {
            int doubling = at / STEPS > 1 ? at / STEPS - 1 : 0;
            return ((double)(at - doubling * STEPS) + 0.5) * (1ul << doubling) / 1e3;
        }
    }
    return 0;
}

static void serve(int reply_bytes)
{
    void *context = zmq_ctx_new(), *router = zmq_socket(context, ZMQ_ROUTER);
    char address[256], identity[256], line[64], *reply = malloc(reply_bytes + 1);
    size_t length = sizeof address;
    memset(reply, 7, reply_bytes + 1);
    if (zmq_bind(router, "tcp://127.0.0.1:*") != 0 || zmq_getsockopt(router, ZMQ_LAST_ENDPOINT, address, &length) != 0)
        die("listening");
    printf("%s\n", address);
    fflush(stdout);
    zmq_pollitem_t items[] = {{router, 0, ZMQ_POLLIN, 0}, {0, STDIN_FILENO, ZMQ_POLLIN, 0}};
    zmq_msg_t request;
    zmq_msg_init(&request);
    for (;;) {
        if (zmq_poll(items, 2, -1) < 0)
            die("waiting");
        if (items[1].revents) {
            if (!fgets(line, sizeof line, stdin))
                exit(0);
            printf("%f 0\n", processor());
            fflush(stdout);
        }
        int who;
        while ((who = zmq_recv(router, identity, sizeof identity, ZMQ_DONTWAIT)) >= 0) {
            if (zmq_msg_recv(&request, router, 0) < 0)
                die("receiving");
            if (zmq_send(router, identity, who, ZMQ_SNDMORE) < 0 || zmq_send(router, reply, reply_bytes, 0) < 0)
                die("answering");
        }
    }
}

static void ask(const char *address, int connections, int depth, int request_bytes, double time)
{
    void *context = zmq_ctx_new();
    zmq_pollitem_t *items = calloc(connections, sizeof *items);
    double *asked = calloc((size_t)connections * depth, sizeof *asked);
    int *oldest = calloc(connections, sizeof *oldest);
    char *request = malloc(request_bytes + 1);
    zmq_msg_t reply;
    zmq_msg_init(&reply);
    srand(7);
    for (int at = 0; at < request_bytes; at++)
        request[at] = rand();
    for (int c = 0; c < connections; c++) {
        items[c].socket = zmq_socket(context, ZMQ_DEALER);
        items[c].events = ZMQ_POLLIN;
        if (zmq_connect(items[c].socket, address) != 0)
            die("connecting");
        /* One request and its reply, so that connecting is not measured. */
        if (zmq_send(items[c].socket, request, request_bytes, 0) < 0 || zmq_msg_recv(&reply, items[c].socket, 0) < 0)
            die("greeting");
    }
    double before = processor(), start = now(), end = start + time, sum = 0;
    unsigned long count = 0;
    for (int c = 0; c < connections; c++)
        for (int place = 0; place < depth; place++) {
            asked[(size_t)c * depth + place] = now();
            zmq_send(items[c].socket, request, request_bytes, 0);
        }
    for (double at = start; at < end;) {
        int ready = zmq_poll(items, connections, LONGEST_WAIT);
        if (ready < 0)
            die("waiting");
        if (ready == 0) {
            fprintf(stderr, "zeromq: no reply within %d ms\n", LONGEST_WAIT);
            exit(1);
        }
        for (int c = 0; c < connections; c++) {
            if (!items[c].revents)
                continue;
            while (at < end && zmq_msg_recv(&reply, items[c].socket, ZMQ_DONTWAIT) >= 0) {
                /* Replies of one connection come in the order of their requests. */
                double *mine = &asked[(size_t)c * depth + oldest[c]];
                oldest[c] = (oldest[c] + 1) % depth;
                at = now();
                record(at - *mine);
                sum += at - *mine;
                count++;
                *mine = at;
                if (zmq_send(items[c].socket, request, request_bytes, 0) < 0)
                    die("asking");
            }
        }
    }
    double took = now() - start;
    printf("%lu %f %f %f %f %f %f\n", count, took, count ? sum / count * 1e6 : 0, quantile(.5, count), quantile(.99, count),
           quantile(.999, count), processor() - before);
    fflush(stdout);
    _exit(0); /* requests in flight are not needed any more */
}

int main(int count, char **words)
{
    if (count == 3 && !strcmp(words[1], "serve"))
        serve(atoi(words[2]));
    if (count == 7 && !strcmp(words[1], "ask"))
        ask(words[2], atoi(words[3]), atoi(words[4]), atoi(words[5]), atoi(words[6]) / 1e3);
    fprintf(stderr, "zeromq: see the head of its source\n");
    return 2;
}
